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

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.predict.simulate.journal import Journal
from shoal.predict.simulate.stage_pass import Collective, Exposed, Passage, Piece, Start
from shoal.predict.simulate.stage_program import StageProgram
from shoal.spec.plan.schedules import NO_MESSAGE, UNKNOWN, CommonOrder, Message, Work, play_in_order
from shoal.spec.timeline import Kind, Purpose

BUBBLE = "bubble"
"""What a rank waits for while another one along the pipeline has not sent yet, or is not done yet."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link from one stage to another.

    Attributes:
        seconds: Seconds of a message.
        bytes: Bytes of a message.
    """

    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """What a played rank does in a step beside its list.

    Attributes:
        rank: Global rank.
        stages: The rank's stages, by number.
        finish: Communications after the last action, one after another: gradients of weights that two stages
            share.
        norm: The collective in which all ranks compute the gradients' norm; None if it needs none.
        merge: A step's share of the exchange in which workers merge what they changed; None if they do not.
        update: Seconds of the optimizer's step, with `files`.
        contention: See `shoal.spec.cluster.Device`.
        files: Seconds of all waits for files in the step; they are played after the optimizer's own work.
    """

    rank: int
    stages: Mapping[int, StageProgram]
    finish: Sequence[Collective]
    norm: Collective | None
    merge: Collective | None
    update: float
    contention: float
    files: float = 0.0


class Notes:
    """What the ranks of a play note: in a Journal, and the times of their actions in the current step.

    Args:
        journal: The Journal.
        order: The actions and messages of all ranks.
        programs: The program of each rank, by place.
        links: By places of sender and receiver, the link between them.
    """

    def __init__(
        self,
        journal: Journal,
        order: CommonOrder,
        programs: Sequence[RankProgram],
        links: Mapping[tuple[int, int], Link],
    ) -> None:
        self.journal = journal
        self.messages: list[Message] = []
        self.actions: list[list[tuple[float, float]]] = []
        self._order = order
        self._numbers = [program.rank for program in programs]
        self._links = links
        self._ends = [(sender, receiver) for entry in order.entries for _, sender, receiver, *_ in entry[3]]

    def begin(self) -> list[Message]:
        """Begin a step; return where its messages are to be noted."""
        self.messages, self.actions = [], [[] for _ in self._numbers]
        return self.messages

    def name(self, place: int) -> str:
        """Return the name of the rank's next action; ranks alone need none."""
        if len(self._numbers) == 1:
            return ""
        return str(self._order.schedule.table[place][len(self.actions[place])])

    def receive(self, place: int, message: int, before: float) -> None:
        """Note a message, and that compute stood still for it since the action before."""
        action = self._order.schedule.table[place][len(self.actions[place])]
        what, letter = ("activation", "F") if action.work is Work.FORWARD else ("gradient", "B")
        name = f"{what}:{action.stage}{letter}{action.microbatch}"  # that of the runtime
        sent, begun, arrived = self.messages[message]
        together, nbytes = max(sent, begun), self._links[self._ends[message]].bytes
        sender, receiver = (self._numbers[end] for end in self._ends[message])
        for rank, start in ((sender, sent), (receiver, begun)):
            self.journal.message(rank, start, together, arrived, name, nbytes, (sender, receiver))
        if arrived > before:
            self.journal.wait(receiver, name, Purpose.PIPELINE, before, together, arrived)


class Rank:
    """One rank: `begin` a step, `act` for each action that is not known, `end` the list and `finish`.

    Args:
        order: The actions and messages of all ranks.
        place: Its place along the pipeline.
        program: Its program.
        seconds: By slot, the seconds of an action beside which nothing travels, for all ranks; UNKNOWN until
            it was run, with notes, and if sums are complete after it.
        busy: By place, until when something travels beside compute, for all ranks.
        alone: The seconds and the waits of passages beside which nothing travels, for all ranks.
        notes: Where to note what it does; None to note nothing.
    """

    def __init__(
        self,
        order: CommonOrder,
        place: int,
        program: RankProgram,
        seconds: list[float],
        busy: list[float],
        alone: dict[Passage, tuple[float, dict[str, float]]],
        notes: Notes | None,
    ) -> None:
        self.now = 0.0  # time of the compute stream
        self._order = order
        self._place = place
        self._program = program
        self._seconds = seconds
        self._busy = busy
        self._known = alone
        self._notes = notes
        self._journal = None if notes is None else notes.journal
        self._rank = program.rank
        self._is_piped = order.schedule.ranks > 1
        self._free = 0.0  # when all work beside compute has ended
        self._ends: dict[object, float] = {}  # end of each started communication, by key
        self._begun: deque[tuple[float, Start]] = deque()  # ends of started communications, in order
        self._due: list[StageProgram] = []  # stages with complete sums, not yet reduced
        self._runs: Counter[int] = Counter()  # by slot: how often it was run in full
        self._steps = 0
        self._waits: dict[str, float] = {}  # by what it waited for, in all that was run in full
        self._waits_of: dict[int, dict[str, float]] = {}  # by slot: waits of a passage with none before it

    def begin(self) -> None:
        """Begin a step."""
        self._steps += 1
        for stage in self._program.stages.values():
            self._run(stage.begin_step())
        self._busy[self._place] = self._free

    def act(self, slot: int, before: float, start: float, message: int) -> float:
        """Do an action and return when it ends.

        Args:
            slot: Number of its slot.
            before: When the action before it ended.
            start: When what it waits for has come.
            message: Number of the message that it waited for; NO_MESSAGE if none.
        """
        self.now = before
        self._reduce_due()
        self.now = start
        if self._notes is not None:
            if message != NO_MESSAGE:
                self._notes.receive(self._place, message, before)
            self._act(slot, self._notes.name(self._place))
            self._notes.actions[self._place].append((start, self.now))
        elif self._free <= start and self._seconds[slot] != UNKNOWN:
            self.now += self._seconds[slot]
        else:
            self._act(slot, "")
        self._busy[self._place] = math.inf if self._due else self._free  # more begins before the next action
        return self.now

    def end(self, bubble: float, transfer: float) -> None:
        """Wait for reductions that run beside compute; then do what comes after the last action.

        Args:
            bubble: Seconds of this step's waits for ranks that had not sent yet.
            transfer: Seconds of its waits for messages on their way.
        """
        self._reduce_due()
        if self._is_piped:
            self._wait_for(BUBBLE, bubble)
            self._wait_for(Purpose.PIPELINE, transfer)
            for stage in self._program.stages.values():
                if stage.keeps_sums:
                    self._run(stage.data_parallel.wait_reduced())
        for collective in self._program.finish:
            self._expose(collective)

    def finish(self, begin: float, last: float, together: float, name: str) -> None:
        """Wait for all ranks, and step the optimizer.

        Args:
            begin: When the step began.
            last: When the last of the played ranks is done.
            together: When the slowest of all ranks is done.
            name: Name of the step.
        """
        done, norm, journal = self.now, self._program.norm, self._journal
        self._wait_for(BUBBLE, last - done)
        self._wait_for(Purpose.CONTROL, together - last + (norm.seconds if norm is not None else 0.0))
        self.now = together + (norm.seconds if norm is not None else 0.0)
        if journal is not None:
            if norm is not None:
                journal.collective(self._rank, done, together, self.now, norm)
            if self.now > done:
                waited = norm.name if norm is not None else "slowest rank"
                journal.wait(self._rank, waited, Purpose.CONTROL, done, together, self.now)
            journal.work(self._rank, Kind.OPTIMIZER, "", done, self.now + self._program.update)
        self.now += self._program.update
        if journal is not None and self._program.files:
            journal.work(self._rank, Kind.FILE_WAIT, "", self.now - self._program.files, self.now)
        if self._program.merge is not None:
            self._expose(self._program.merge)
        if journal is not None:
            journal.work(self._rank, Kind.STEP, name, begin, self.now)

    def waited(self) -> dict[str, float]:
        """Return the seconds that it waited, by what for."""
        waits = dict(self._waits)
        for slot, once in self._waits_of.items():
            again = self._steps * self._order.numbers[slot] - self._runs[slot]
            for what, seconds in once.items():
                waits[what] = waits.get(what, 0.0) + again * seconds
        return waits

    def _wait_in(self, collective: Collective, seconds: float) -> None:
        """Count what is exposed of a communication; its wait for late ranks is one of control."""
        self._wait_for(collective.purpose, seconds - collective.late)
        if collective.late:
            self._wait_for(Purpose.CONTROL, collective.late)

    def _wait_for(self, what: str, seconds: float) -> None:
        self._waits[what] = self._waits.get(what, 0.0) + seconds

    def _act(self, slot: int, name: str) -> None:
        """Do an action in full."""
        where = self._order.slots[slot]
        self._runs[slot] += 1
        stage = self._program.stages[where.stage]
        passage = stage.passage(where.work, is_first=where.is_first, is_last=where.is_last)
        kind = Kind.FORWARD if where.work is Work.FORWARD else Kind.BACKWARD
        start, is_alone, waits = self.now, self._free <= self.now, dict(self._waits)
        known = self._known.get(passage) if is_alone and self._journal is None else None
        if known is not None:
            self.now += known[0]
            for what, seconds in known[1].items():
                self._wait_for(what, seconds)
        elif passage.is_plain and is_alone:
            self.now += passage.seconds
            for collective in passage.exposed:
                self._wait_in(collective, collective.seconds)
            if self._journal is not None:
                self._journal.passage(self._rank, kind, name, start, passage)
        else:
            self._run(passage.pieces)
            if self._journal is not None:
                self._journal.work(self._rank, kind, name, start, self.now)
        if is_alone and self._free <= self.now and self._journal is None:
            waited = {what: seconds - waits.get(what, 0.0) for what, seconds in self._waits.items()}
            self._known[passage] = self.now - start, waited
            if not where.is_last:
                self._seconds[slot], self._waits_of[slot] = self.now - start, waited
        if where.is_last and stage.keeps_sums and self._is_piped:
            self._due.append(stage)

    def _reduce_due(self) -> None:
        """Begin to reduce the stages whose sums are complete."""
        for stage in self._due:
            self._run(stage.data_parallel.reduce_all())
        self._due.clear()

    def _run(self, pieces: Sequence[Piece]) -> None:
        """Do pieces one after another."""
        for piece in pieces:
            if isinstance(piece, float):
                self.now = self._computed(piece)
            elif isinstance(piece, Exposed):
                self._expose(piece.collective)
            elif isinstance(piece, Start):
                start = max(self.now, self._free)
                self._free = self._ends[piece.key] = start + piece.collective.seconds
                self._begun.append((self._free, piece))
                if self._journal is not None:
                    self._journal.collective(self._rank, start, start, self._free, piece.collective)
            else:
                self._await(self._ends.get(piece.key, 0.0))

    def _expose(self, collective: Collective) -> None:
        """Do a communication that compute waits for."""
        if self._journal is not None:
            self._journal.exposed(self._rank, self.now, collective)
        self.now += collective.seconds
        self._wait_in(collective, collective.seconds)

    def _await(self, end: float) -> None:
        """Wait until this communication has ended, and those that were begun before it."""
        while self.now < end:
            stop, begun = self._begun.popleft()
            if stop > self.now:
                collective = begun.collective
                self._wait_in(collective, stop - self.now)
                if self._journal is not None:
                    self._journal.wait(
                        self._rank, collective.name, collective.purpose, self.now, self.now, stop
                    )
                self.now = stop

    def _computed(self, seconds: float) -> float:
        """Return when compute that begins now ends, slowed by communications that still travel."""
        now, begun = self.now, self._begun
        while begun and begun[0][0] <= now:
            begun.popleft()
        for stop, start in begun:
            rate = 1 - self._program.contention * start.load
            done = rate * (stop - now)
            if seconds < done:
                return now + seconds / rate
            seconds -= done
            now = stop
        return now + seconds


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
