"""The engine: plays the programs of all ranks along a pipeline.

A rank has two streams. Compute does its list in order. Communications that run beside compute go one after
another, in the order in which they were begun. While one travels, compute runs at 1 - c of its rate, so that
t seconds of hidden communication cost c t seconds; c is `contention` times the load that the communication
puts on the device. Communication within blocks has its own communicator and stops compute.

A message between stages starts when three things have happened: it was sent, its receiver has begun to
receive (one action early, as in the runtime), and the message before it on that link has arrived. Messages do
not slow compute. Each pair of places has its own link (`Link`).

Only ranks that differ along the pipeline are played: along all other axes ranks do the same at the same time.
So communication over the other axes takes just its seconds. Ranks wait for one another only for messages and
at the end of the step, when the norm of all gradients is computed. There they also wait for the slowest rank:
`lateness` times what the step took until then.

A planner plays many steps and asks only for the end. Without a Journal, an action beside which nothing
travels is run once for each kind, and then takes what it took the time before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.plan.schedules import UNKNOWN, CommonOrder, Message, play_in_order
from shoal.simulate.journal import Journal
from shoal.simulate.passage import Passage
from shoal.simulate.rank import Link, Notes, Rank, RankProgram

Actions = list[list[tuple[float, float]]]
"""By place, the start and stop of each action of a step."""


class Play(NamedTuple):
    """Steps that were played.

    Attributes:
        end: When the last step ends.
        starts: By place, the start of each action of the last step.
        actions: Times of the actions of each step; none without a Journal.
        ranks: The ranks, by place; none if only passes were played (`played_passes`).
    """

    end: float
    starts: list[list[float]]
    actions: Sequence[Actions] = ()
    ranks: Sequence[Rank] = ()

    @property
    def waits(self) -> list[dict[str, float]]:
        """By place, the seconds in which a rank's compute stood still, by what it waited for: the values of
        `Purpose`, and BUBBLE (for a rank that had not sent yet, or was not done yet).
        """
        return [rank.waited() for rank in self.ranks]


def play_steps(
    order: CommonOrder,
    programs: Sequence[RankProgram],
    links: Mapping[tuple[int, int], Link],
    *,
    lateness: float,
    steps: int = 1,
    journal: Journal | None = None,
) -> Play:
    """Play steps one after another.

    Args:
        order: The actions and messages of all ranks along the pipeline.
        programs: The program of each rank, by place along the pipeline.
        links: By places of sender and receiver, the link between them.
        lateness: How long all ranks wait for the slowest at the step's end, as a share of the time until
            then.
        steps: Number of steps.
        journal: Where to note what ranks do; None to note nothing.
    """
    notes = None if journal is None else Notes(journal, order, programs, links)
    seconds, busy = [UNKNOWN] * len(order.slots), [0.0] * len(programs)
    alone: dict[Passage, tuple[float, dict[str, float]]] = {}
    ranks = [
        Rank(order, place, program, seconds, busy, alone, notes) for place, program in enumerate(programs)
    ]
    transfers = [links[pair].seconds for pair in order.pairs]
    actions, acts = list[Actions](), [rank.act for rank in ranks]
    for index in range(steps):
        begins = [rank.now for rank in ranks]
        for rank in ranks:
            rank.begin()
        messages: list[Message] | None = None if notes is None else notes.begin()
        played = play_in_order(
            order, seconds, transfers, begins=begins, busy=busy, acts=acts, messages=messages
        )
        for place, rank in enumerate(ranks):
            rank.end(played.bubbles[place], played.transfers[place])
        last = max([rank.now for rank in ranks])
        for rank, begin in zip(ranks, begins, strict=True):
            rank.finish(begin, last, last + lateness * (last - begin), str(index))
        if notes is not None:
            actions.append(notes.actions)
    return Play(max(rank.now for rank in ranks), played.starts, actions, ranks)
