"""The event engine: each rank goes through its list as far as the things that it waits for are there.

A rank has two streams. Compute does its list in order. Communications that run beside compute go one after
another, in the order in which they were begun. While one travels, compute runs at 1 - c of its rate, so that
t seconds of hidden communication cost c t seconds; c is `contention` times the load that the communication
puts on the device. Communication within blocks has its own communicator and stops compute.

A message between stages starts when three things have happened: it was sent, its receiver has begun to
receive (`transfers` says at which action), and the message before it on that link has arrived. Messages do
not slow compute.

Only ranks that differ along the pipeline are played: along all other axes ranks do the same at the same time.
So communication over the other axes takes just its seconds. Ranks wait for one another only for messages and
at the end of the step, when the norm of all gradients is computed. There they also wait for the slowest rank:
`lateness` times what the step took until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.plan.schedules import Action, Payload, Receive, Send, Step, Work
from shoal.simulate.journal import Journal
from shoal.simulate.passage import Collective, Exposed, Passage, Piece, Start
from shoal.simulate.stage_program import StageProgram
from shoal.timeline import Kind, Purpose

__all__ = ["Link", "RankProgram", "play_steps"]


@dataclass(frozen=True, slots=True)
class Link:
    """The link between stages.

    Attributes:
        seconds: Seconds of a message.
        bytes: Bytes of a message.
    """

    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """The work of one played rank in a step.

    Attributes:
        rank: Global rank.
        steps: Its actions, sends and receives in order.
        stages: The rank's stages, by number.
        last: By stage, the last action that adds to the gradients of its weights.
        finish: Communications after the last action, one after another: gradients of weights that two stages
            share.
        norm: The collective in which all ranks compute the gradients' norm; None if it needs none.
        update: Seconds of the optimizer's step.
    """

    rank: int
    steps: Sequence[Step]
    stages: Mapping[int, StageProgram]
    last: Mapping[int, Action]
    finish: Sequence[Collective]
    norm: Collective | None
    update: float


_Key = tuple[object, ...]
"""The event that a rank waits for: a message (payload, stage, micro-batch), or a step's end (number)."""


def play_steps(
    programs: Sequence[RankProgram],
    placement: Sequence[int],
    link: Link,
    *,
    contention: float,
    lateness: float,
    steps: int,
) -> tuple[Journal, list[list[list[tuple[float, float]]]], float]:
    """Play steps one after another.

    Args:
        programs: The program of each rank, by place along the pipeline.
        placement: By stage, the place of the rank that holds it.
        link: The link between stages.
        contention: See `shoal.cluster.Device`.
        lateness: How long all ranks wait for the slowest at the step's end, as a share of the time until
            then.
        steps: Number of steps.

    Returns:
        The journal; by step and place, the start and stop of each action; the time at which the last step
        ends.
    """
    engine = _Engine(programs, placement, link, contention, lateness, steps)
    end = engine.play()
    return engine.journal, engine.actions, end


class _Engine:
    """State that the ranks of one play share: sent messages, waiting ranks, and the journal."""

    def __init__(
        self,
        programs: Sequence[RankProgram],
        placement: Sequence[int],
        link: Link,
        contention: float,
        lateness: float,
        steps: int,
    ) -> None:
        self.journal = Journal()
        self.actions: list[list[list[tuple[float, float]]]] = [[[] for _ in programs] for _ in range(steps)]
        self.placement = placement
        self.link = link
        self.contention = contention
        self.lateness = lateness
        self.steps = steps
        self.numbers = [program.rank for program in programs]
        self.sent: dict[_Key, float] = {}
        self.arrived: list[list[float]] = [[] for _ in range(steps)]  # arrivals at the end of each step
        self._ranks = [_Rank(self, place, program) for place, program in enumerate(programs)]
        self._waiting: dict[_Key, list[int]] = {}
        self._able = list(range(len(programs)))

    def play(self) -> float:
        """Let every rank go on as far as it can, until all have ended."""
        going = [rank.play() for rank in self._ranks]
        while self._able:
            place = self._able.pop()
            key = next(going[place], None)
            if key is not None:
                self._waiting.setdefault(key, []).append(place)
        assert not self._waiting, "a sound table always ends"
        return max(rank.now for rank in self._ranks)

    def tell(self, key: _Key) -> None:
        """Resume the ranks that wait for this key."""
        self._able += self._waiting.pop(key, ())


class _Rank:
    """One rank, whose `play` yields the key of what it waits for."""

    def __init__(self, engine: _Engine, place: int, program: RankProgram) -> None:
        self.now = 0.0  # time of the compute stream
        self._engine = engine
        self._place = place
        self._program = program
        self._rank = program.rank
        self._free = 0.0  # when all work beside compute has ended
        self._ends: dict[object, float] = {}  # end of each started communication, by key
        self._begun: deque[tuple[float, Start]] = deque()  # ends of started communications, in order
        self._receiving: dict[int, deque[tuple[_Key, float]]] = {}  # by sender: messages on their way
        self._link_free: dict[int, float] = {}  # by sender: when its link is free
        self._there: dict[_Key, tuple[float, float, str]] = {}  # start on both ranks, and arrival

    def play(self) -> Iterator[_Key]:
        """Play all steps."""
        for index in range(self._engine.steps):
            begin = self.now
            yield from self._step(index, begin)
            self._engine.journal.work(self._rank, Kind.STEP, str(index), begin, self.now)

    def _step(self, index: int, begin: float) -> Iterator[_Key]:
        engine, program = self._engine, self._program
        entered: set[int] = set()  # stages that have run a forward
        due: list[StageProgram] = []  # stages with complete sums, not yet reduced
        for stage in program.stages.values():
            self._run(stage.begin_step())
        for step in program.steps:
            if isinstance(step, Receive):
                key = step.payload, step.stage, step.microbatch
                self._receiving.setdefault(step.peer, deque()).append((key, self.now))
            elif isinstance(step, Send):
                key = step.payload, step.target, step.microbatch
                engine.sent[key] = self.now
                engine.tell(key)
            else:
                self._begin(due)
                yield from self._take(step)
                stage = program.stages[step.stage]
                is_last = program.last[step.stage] == step
                is_first = step.work is Work.FORWARD and step.stage not in entered
                entered.add(step.stage)
                start = self.now
                self._perform(step, stage.passage(step, is_first=is_first, is_last=is_last))
                engine.actions[index][self._place].append((start, self.now))
                if is_last and stage.keeps_sums and len(engine.numbers) > 1:
                    due.append(stage)
        self._begin(due)
        yield from self._finish(index, begin)

    def _begin(self, due: list[StageProgram]) -> None:
        """Begin to reduce the stages whose gradients are complete."""
        for stage in due:
            self._run(stage.data_parallel.reduce_all())
        due.clear()

    def _finish(self, index: int, begin: float) -> Iterator[_Key]:
        """Play the end of a step: wait for reductions, then for all ranks, then step the optimizer."""
        engine, program = self._engine, self._program
        if len(engine.numbers) > 1:
            for stage in program.stages.values():
                if stage.keeps_sums:
                    self._run(stage.data_parallel.wait_reduced())
        for collective in program.finish:
            self.now = engine.journal.exposed(self._rank, self.now, collective)
        done = self.now
        arrived = engine.arrived[index]
        arrived.append(done)
        if len(arrived) < len(engine.numbers):
            yield "end", index
        else:
            engine.tell(("end", index))
        last = max(arrived)
        together = last + engine.lateness * (last - begin)
        norm = program.norm
        self.now = together + (norm.seconds if norm is not None else 0.0)
        if norm is not None:
            engine.journal.collective(self._rank, done, together, self.now, norm)
        if self.now > done:
            name = norm.name if norm is not None else "slowest rank"
            engine.journal.wait(self._rank, name, Purpose.CONTROL, done, together, self.now)
        self.now += program.update
        engine.journal.work(self._rank, Kind.OPTIMIZER, "", done, self.now)

    def _take(self, action: Action) -> Iterator[_Key]:
        """Wait for what an action needs from another rank."""
        if action.work is Work.WEIGHT:
            return
        placement = self._engine.placement
        is_forward = action.work is Work.FORWARD
        before = action.stage + (-1 if is_forward else 1)
        if not 0 <= before < len(placement) or placement[before] == self._place:
            return
        key = Payload.ACTIVATION if is_forward else Payload.GRADIENT, action.stage, action.microbatch
        receiving = self._receiving[placement[before]]
        while key not in self._there:
            if receiving[0][0] not in self._engine.sent:
                yield receiving[0][0]
            self._receive(placement[before], *receiving.popleft())
        together, came, name = self._there.pop(key)
        if came > self.now:
            self._engine.journal.wait(self._rank, name, Purpose.PIPELINE, self.now, together, came)
            self.now = came

    def _receive(self, sender: int, key: _Key, begin: float) -> None:
        """Note when a message that was sent arrives."""
        engine = self._engine
        sent = engine.sent.pop(key)
        together = max(sent, begin)
        came = max(together, self._link_free.get(sender, 0.0)) + engine.link.seconds
        name, nbytes = _name_of(key), engine.link.bytes
        self._link_free[sender] = came
        self._there[key] = together, came, name
        ends = engine.numbers[sender], self._rank
        engine.journal.message(ends[0], sent, together, came, name, nbytes, ends)
        engine.journal.message(ends[1], begin, together, came, name, nbytes, ends)

    def _perform(self, action: Action, passage: Passage) -> None:
        kind = Kind.FORWARD if action.work is Work.FORWARD else Kind.BACKWARD
        name = str(action) if len(self._engine.numbers) > 1 else ""
        start = self.now
        if passage.is_plain and self._free <= start:
            self.now += passage.seconds
            self._engine.journal.passage(self._rank, kind, name, start, passage)
        else:
            self._run(passage.pieces)
            self._engine.journal.work(self._rank, kind, name, start, self.now)

    def _run(self, pieces: Sequence[Piece]) -> None:
        """Do pieces one after another."""
        journal = self._engine.journal
        for piece in pieces:
            if isinstance(piece, float):
                self.now = self._computed(piece)
            elif isinstance(piece, Exposed):
                self.now = journal.exposed(self._rank, self.now, piece.collective)
            elif isinstance(piece, Start):
                start = max(self.now, self._free)
                self._free = self._ends[piece.key] = start + piece.collective.seconds
                self._begun.append((self._free, piece))
                journal.collective(self._rank, start, start, self._free, piece.collective)
            else:
                self._await(self._ends.get(piece.key, 0.0))

    def _await(self, end: float) -> None:
        """Wait until this communication has ended, and those that were begun before it."""
        while self.now < end:
            stop, begun = self._begun.popleft()
            if stop > self.now:
                collective = begun.collective
                journal = self._engine.journal
                journal.wait(self._rank, collective.name, collective.purpose, self.now, self.now, stop)
                self.now = stop

    def _computed(self, seconds: float) -> float:
        """Return when compute that begins now ends, slowed by communications that still travel."""
        now = self.now
        while self._begun and self._begun[0][0] <= now:
            self._begun.popleft()
        for stop, begun in self._begun:
            rate = 1 - self._engine.contention * begun.load
            done = rate * (stop - now)
            if seconds < done:
                return now + seconds / rate
            seconds -= done
            now = stop
        return now + seconds


def _name_of(key: _Key) -> str:
    """Return the runtime's name of a message: what is sent, and the action that waits for it."""
    payload, stage, microbatch = key
    assert isinstance(payload, Payload)
    what = "activation" if payload is Payload.ACTIVATION else "gradient"
    return f"{what}:{stage}{payload.value}{microbatch}"
