"""The event engine: each rank goes through its list as far as the things that it waits for are there.

A rank has two streams. Compute does its list in order. Communications that run beside compute go one after
another, in the order in which they were begun. While one travels, compute runs at 1 - c of its rate, so that
t seconds of hidden communication cost c t seconds; c is `contention` times the load that the communication
puts on the device. Communication within blocks has its own communicator and stops compute.

A message between stages starts when three things have happened: it was sent, its receiver has begun to
receive (`transfers` says at which action), and the message before it on that link has arrived. Messages do
not slow compute. Each pair of places has its own link (`Link`).

Only ranks that differ along the pipeline are played: along all other axes ranks do the same at the same time.
So communication over the other axes takes just its seconds. Ranks wait for one another only for messages and
at the end of the step, when the norm of all gradients is computed. There they also wait for the slowest rank:
`lateness` times what the step took until then.

A planner plays many steps and asks only for the end: see `shoal.simulate.in_order`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.simulate.course import Course
from shoal.simulate.journal import Journal
from shoal.simulate.rank import BUBBLE, Common, Link, Rank, RankProgram

__all__ = ["BUBBLE", "Actions", "Link", "Play", "RankProgram", "play_steps"]

Actions = list[list[tuple[float, float]]]
"""By place, the start and stop of each action of a step."""


class Play(NamedTuple):
    """Steps that were played.

    Attributes:
        end: When the last step ends.
        actions: Times of the actions of each step.
        waits: By place, the seconds in which a rank's compute stood still, by what it waited for: the values
            of `Purpose`, and BUBBLE (for a rank that had not sent yet, or was not done yet).
    """

    end: float
    actions: list[Actions]
    waits: list[dict[str, float]]


def play_steps(
    course: Course,
    programs: Sequence[RankProgram],
    links: Mapping[tuple[int, int], Link],
    *,
    lateness: float,
    steps: int = 1,
    journal: Journal | None = None,
) -> Play:
    """Play steps one after another.

    Args:
        course: The lists of all ranks along the pipeline.
        programs: The program of each rank, by place along the pipeline.
        links: By places of sender and receiver, the link between them.
        lateness: How long all ranks wait for the slowest at the step's end, as a share of the time until
            then.
        steps: Number of steps.
        journal: Where to note what ranks do; None to note nothing.
    """
    engine = _Engine(Common(course, programs, links, journal), programs, lateness)
    actions = [engine.step(str(index)) for index in range(steps)]
    return Play(engine.end, actions, engine.waits)


class _Engine:
    """The ranks of one play."""

    def __init__(self, common: Common, programs: Sequence[RankProgram], lateness: float) -> None:
        self._common = common
        self._lateness = lateness
        self._ranks = [Rank(common, place, program) for place, program in enumerate(programs)]

    @property
    def waits(self) -> list[dict[str, float]]:
        """What each rank waited for, in seconds."""
        return [rank.waited() for rank in self._ranks]

    @property
    def end(self) -> float:
        """When the last rank has ended."""
        return max(rank.now for rank in self._ranks)

    def step(self, name: str) -> Actions:
        """Let every rank go on as far as it can, until all have ended; return the times of actions."""
        self._common.begin()
        begins = [rank.now for rank in self._ranks]
        for rank in self._ranks:
            rank.begin()
        while self._common.able:
            self._ranks[self._common.able.pop()].go_on()
        assert not self._common.waiting, "a sound table always ends"
        last = max([rank.now for rank in self._ranks])
        for rank, begin in zip(self._ranks, begins, strict=True):
            rank.finish(begin, last, last + self._lateness * (last - begin), name)
        return [rank.actions for rank in self._ranks]
