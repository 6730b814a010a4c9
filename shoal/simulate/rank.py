"""One played rank: how it goes through its list, and what its two streams do (`shoal.simulate.engine`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.plan.schedules import Payload, Work
from shoal.simulate.course import ACT, NO_MESSAGE, RECEIVE, Course, Message, Slot
from shoal.simulate.journal import Journal
from shoal.simulate.passage import Collective, Exposed, Passage, Piece, Start
from shoal.simulate.stage_program import StageProgram
from shoal.timeline import Kind, Purpose

__all__ = ["BUBBLE", "Common", "Link", "Rank", "RankProgram"]

BUBBLE = "bubble"
"""What a rank waits for while another one along the pipeline has not sent yet, or is not done yet."""

_NOT_YET = -1.0


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
        contention: See `shoal.cluster.Device`.
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


class Common:
    """State that the ranks of one play share.

    Args:
        course: The lists of all ranks.
        programs: The program of each rank, by place.
        links: By places of sender and receiver, the link between them.
        journal: Where to note what ranks do; None to note nothing.
    """

    def __init__(
        self,
        course: Course,
        programs: Sequence[RankProgram],
        links: Mapping[tuple[int, int], Link],
        journal: Journal | None,
    ) -> None:
        self.course = course
        self.journal = journal
        self.numbers = [program.rank for program in programs]
        self.links = [links[each.sender, each.receiver] for each in course.messages]
        self.seconds = [link.seconds for link in self.links]
        self.sent: list[float] = []
        self.begun: list[float] = []  # when the receiver began to receive
        self.came: list[float] = []
        self.waiting: dict[int, int] = {}  # by message, the place of the rank that waits for it
        self.able: list[int] = []
        self.alone: dict[int, tuple[float, dict[str, float]]] = {}  # by passage: its seconds and its waits
        self.times = [0] * len(course.slots)  # by slot: how often its passage was not run again

    def begin(self) -> None:
        """Begin a step, in which no message was sent and every rank can go on."""
        number = len(self.course.messages)
        self.sent, self.begun, self.came = ([_NOT_YET] * number for _ in range(3))
        self.able = list(range(len(self.numbers)))


class Rank:
    """One rank: `begin` a step, `go_on` until a message is missing or the list ends, and `finish`."""

    def __init__(self, common: Common, place: int, program: RankProgram) -> None:
        self.now = 0.0  # time of the compute stream
        self.actions: list[tuple[float, float]] = []
        self._common = common
        self._journal = common.journal
        self._place = place
        self._program = program
        self._rank = program.rank
        self._ops = common.course.rows[place]
        self._next = 0  # number of the next entry of the list
        self._free = 0.0  # when all work beside compute has ended
        self._ends: dict[object, float] = {}  # end of each started communication, by key
        self._begun: deque[tuple[float, Start]] = deque()  # ends of started communications, in order
        self._receiving: dict[int, deque[int]] = {}  # by sender: messages on their way
        self._link_free: dict[int, float] = {}  # by sender: when its link is free
        self._due: list[StageProgram] = []  # stages with complete sums, not yet reduced
        self._passages: dict[int, Passage] = {}  # by slot
        self._alone: dict[int, float] = {}  # by slot: seconds of a passage with no communication before it
        self._waits: dict[str, float] = {}  # by what it waited for, without passages that were not run again
        self._waits_of: dict[int, dict[str, float]] = {}  # by slot: waits of a passage with none before it

    def begin(self) -> None:
        """Begin a step."""
        self._next, self.actions = 0, []
        for stage in self._program.stages.values():
            self._run(stage.begin_step())

    def go_on(self) -> None:
        """Go through the list until a message is missing, or to its end."""
        common, ops = self._common, self._ops
        sent, waiting = common.sent, common.waiting
        for position in range(self._next, len(ops)):
            kind, message, slot, action = ops[position]
            if kind == ACT:
                if self._due:
                    self._reduce_due()
                if message != NO_MESSAGE and (missing := self._take(message)) != NO_MESSAGE:
                    waiting[missing] = self._place
                    self._next = position
                    return
                start = self.now
                self._act(slot, str(action))
                self.actions.append((start, self.now))
            elif kind == RECEIVE:
                common.begun[message] = self.now
                self._receiving.setdefault(common.course.messages[message].sender, deque()).append(message)
            else:
                sent[message] = self.now
                if message in waiting:
                    common.able.append(waiting.pop(message))
        self._next = len(ops)
        self.end()

    @property
    def busy_until(self) -> float:
        """When all work beside compute has ended; infinite if more begins before the next action."""
        return math.inf if self._due else self._free

    def act(self, slot: int, before: float, start: float) -> float:
        """Do an action and return when it ends.

        Args:
            slot: Number of its slot.
            before: When the action before it ended.
            start: When what it waits for has come.
        """
        self.now = before
        self._reduce_due()
        self.now = start
        alone = self._alone.get(slot) if self._free <= start else None
        if alone is None:
            self._act(slot, "")
        else:
            self.now += alone
            self._common.times[slot] += 1
        return self.now

    def alone(self, slot: int) -> float:
        """Return the seconds of a passage with no communication before it; infinite if not known."""
        return self._alone.get(slot, math.inf)

    def add_waits(self, bubble: float, transfer: float) -> None:
        """Add waits for ranks that have not sent yet, and for messages on their way."""
        self._wait_for(BUBBLE, bubble)
        self._wait_for(Purpose.PIPELINE, transfer)

    def end(self) -> None:
        """Wait for reductions that run beside compute; then do what comes after the last action."""
        self._reduce_due()
        if len(self._common.numbers) > 1:
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
            for what, seconds in once.items():
                waits[what] = waits.get(what, 0.0) + self._common.times[slot] * seconds
        return waits

    def _wait_in(self, collective: Collective, seconds: float) -> None:
        """Count what is exposed of a communication; its wait for late ranks is one of control."""
        self._wait_for(collective.purpose, seconds - collective.late)
        if collective.late:
            self._wait_for(Purpose.CONTROL, collective.late)

    def _wait_for(self, what: str, seconds: float) -> None:
        self._waits[what] = self._waits.get(what, 0.0) + seconds

    def _take(self, message: int) -> int:
        """Wait for a message; return the number of the one that was not sent yet, NO_MESSAGE if it came."""
        common = self._common
        came, messages = common.came, common.course.messages
        if came[message] < 0:
            sender = messages[message].sender
            receiving = self._receiving[sender]
            while came[message] < 0:
                head = receiving[0]
                if common.sent[head] < 0:
                    return head
                receiving.popleft()
                self._receive(sender, head)
        if came[message] > self.now:
            together = max(common.sent[message], common.begun[message])
            self._wait_for(BUBBLE, max(0.0, together - self.now))
            self._wait_for(Purpose.PIPELINE, came[message] - max(self.now, together))
            if self._journal is not None:
                waited = _name_of(messages[message])
                self._journal.wait(self._rank, waited, Purpose.PIPELINE, self.now, together, came[message])
            self.now = came[message]
        return NO_MESSAGE

    def _receive(self, sender: int, message: int) -> None:
        """Note when a message that was sent arrives."""
        common = self._common
        together = max(common.sent[message], common.begun[message])
        came = max(together, self._link_free.get(sender, 0.0)) + common.seconds[message]
        self._link_free[sender] = common.came[message] = came
        if self._journal is not None:
            name, nbytes = _name_of(common.course.messages[message]), common.links[message].bytes
            ends = common.numbers[sender], self._rank
            sent, begun = common.sent[message], common.begun[message]
            self._journal.message(ends[0], sent, together, came, name, nbytes, ends)
            self._journal.message(ends[1], begun, together, came, name, nbytes, ends)

    def _act(self, slot: int, action: str) -> None:
        """Do an action in full."""
        where = self._common.course.slots[slot]
        passage = self._passages.get(slot)
        if passage is None:
            stage = self._program.stages[where.stage]
            passage = stage.passage(where.work, is_first=where.is_first, is_last=where.is_last)
            self._passages[slot] = passage
        kind = Kind.FORWARD if where.work is Work.FORWARD else Kind.BACKWARD
        name = action if len(self._common.numbers) > 1 else ""
        start, is_alone, waits = self.now, self._free <= self.now, dict(self._waits)
        known = self._common.alone.get(id(passage)) if is_alone and self._journal is None else None
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
        if is_alone and self._free <= self.now:
            waited = {what: seconds - waits.get(what, 0.0) for what, seconds in self._waits.items()}
            self._alone[slot], self._waits_of[slot] = self.now - start, waited
            self._common.alone[id(passage)] = self.now - start, waited
        if where.is_last:
            self._complete(where)

    def _complete(self, slot: Slot) -> None:
        """Note that a stage's sums are complete."""
        stage = self._program.stages[slot.stage]
        if stage.keeps_sums and len(self._common.numbers) > 1:
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


def _name_of(message: Message) -> str:
    """Return the runtime's name of a message: what is sent, and the action that waits for it."""
    what = "activation" if message.payload is Payload.ACTIVATION else "gradient"
    return f"{what}:{message.stage}{message.payload.value}{message.microbatch}"
