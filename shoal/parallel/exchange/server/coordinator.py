"""The board: knows the workers, hands out samples, and says who may go on.

The samples of a training are cut into shares, one worker's part of a batch each. A worker that has sent what
it made of its share arrives at the board, waits until it may go on, and gets its next share. So each share is
trained on once, however many workers there are and however fast each is; the share of a worker that is lost
is handed out again.

    rounds    all present workers arrive, and what they sent is averaged: one update. With a quorum, it is
              closed `grace` seconds after that many have arrived; who comes later is in the next round
    bound s   what a worker sends is applied at once. It may be s clocks ahead of the slowest worker (stale
              synchronous: Ho et al., NIPS 2013), and ahead of those of the first workers that have not come
              yet; with s infinite it never waits

A worker's clock counts the shares that it has finished. The guard may let rounds take the place of a bound.
Each worker is told with its answer, and sends its next contribution accordingly: so a round waits for those
that do not know of it yet, until they have arrived once more.

The guard of stale gradients: rounds take their place when they do harm.

It listens to the losses of all contributions that are applied one by one, in windows.

    a window's mean is above the least one by a quarter,    rounds, from the servers' snapshot
    and by six standard errors
    as many losses in a row as there are workers, two at    rounds, from the servers' snapshot
    least, are not finite
    a worker says that its step is too large                rounds

In rounds nothing is stale: they are the steps of `staleness=0`. Rounds last for a tenth of the training, and
a hundred steps at least; twice as long after each failure. A single loss that is not finite may be that of a
sample, and its step is left out anyway; that all workers have such losses is a matter of the values. Servers
take a snapshot whenever a window has passed, and return to the one before: losses are late, so that the
newest may be of values that are bad already, and a window has passed since the one before.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, variance
from typing import Any, final

from shoal.parallel.exchange.server.protocol import Decision, Mode, ServerError, Terms, Ticket

_WINDOW = 32  # contributions
_RISE = 0.25  # share by which the mean loss of a window may be above the least
_ERRORS = 6  # standard errors by which it may be above it: the least of many means is low by chance
_LEAST = 100  # steps in rounds


@final
class Guard:
    """Decide whether contributions are applied one by one, or in rounds.

    Losses that it has heard are not part of its state: a copy of the board begins to listen anew.

    Args:
        terms: What workers go by.

    Attributes:
        mode: How contributions are applied.
        until: The number of finished shares after which rounds end; 0 without an end.
        failures: Number of times that rounds took the place of stale gradients.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._is_asked = terms.guard and not terms.has_rounds
        self.mode = Mode(in_rounds=terms.has_rounds, snapshots=int(self._is_asked))
        self.until = 0
        self.failures = 0
        self._losses: list[float] = []
        self._least = math.inf, 0.0  # mean of a window, and the square of its standard error
        self._not_finite = 0

    def hear(self, loss: float, failed: str, workers: int, finished: int) -> None:
        """Take note of a contribution that was applied by itself.

        Args:
            loss: Its loss; not finite if its step was left out.
            failed: Why its worker finds stale gradients harmful; "" if it does not.
            workers: Workers that are present.
            finished: Shares that are finished.
        """
        if not self._is_asked or self.mode.in_rounds:
            return
        if failed:
            self._fall_back(failed, finished)
        elif math.isfinite(loss):
            self._not_finite = 0
            self._losses.append(loss)
            if len(self._losses) == _WINDOW:
                self._look(finished)
        else:
            self._not_finite += 1
            if self._not_finite >= max(2, workers):
                reason = f"{self._not_finite} losses in a row are not finite"
                self._return(reason, finished)

    def close(self, finished: int) -> None:
        """Take note that a round was closed; end rounds that took the place of stale gradients in time."""
        if self.until and finished >= self.until:
            self.until = 0
            self._listen_anew()
            self._change(f"{self._terms.staleness:g} steps ahead are allowed again")
            self.mode = replace(self.mode, in_rounds=False, snapshots=self.mode.snapshots + 1)

    def _look(self, finished: int) -> None:
        """Judge a window."""
        mean, square = fmean(self._losses), variance(self._losses) / len(self._losses)
        self._losses.clear()
        least, square_of_least = self._least
        # The error of the difference. Losses that grow vary too, and that is no noise.
        error = math.sqrt(2 * square_of_least)
        if mean > least + max(_RISE * abs(least), _ERRORS * error):
            reason = f"the loss rose from {least:.4g} to {mean:.4g} with gradients that were late"
            self._return(reason, finished)
            return
        self.mode = replace(self.mode, snapshots=self.mode.snapshots + 1)
        self._least = min(self._least, (mean, square))

    def _return(self, reason: str, finished: int) -> None:
        self.mode = replace(self.mode, returns=self.mode.returns + 1)
        self._fall_back(f"{reason}; values are those of the snapshot before", finished)

    def _fall_back(self, reason: str, finished: int) -> None:
        terms = self._terms
        self.failures += 1
        steps = max(_LEAST, terms.shares // terms.workers // 10) * 2 ** (self.failures - 1)
        self.until = finished + steps * terms.workers
        self._change(reason)
        self.mode = replace(self.mode, in_rounds=True)

    def _change(self, reason: str) -> None:
        self.mode = replace(self.mode, changes=self.mode.changes + 1, reason=reason)

    def _listen_anew(self) -> None:
        self._losses.clear()
        self._least = math.inf, 0.0
        self._not_finite = 0


_NO_ROUND = Decision(shares=(), finished=0, complete=0, leads=False)


@dataclass(slots=True)
class _Member:
    """A worker that is present.

    Attributes:
        clock: Arrivals that it has made.
        base: The round that it was last told of; its contribution is computed from that round's values.
        shares: The shares that it trains on.
        in_rounds: Whether it was told that its contribution waits for a round.
        weight: Weight of what it sent, while it waits for its round to close; otherwise None.
        loss: Loss of what it sent.
        heard: Sum of the losses, each times its weight, of what workers sent since this one was told of them.
        of: Sum of these weights.
    """

    clock: int
    base: int
    shares: list[int]
    in_rounds: bool = False
    weight: float | None = None
    loss: float = 0.0
    heard: float = 0.0
    of: float = 0.0


@dataclass(slots=True)
class _State:
    """What a copy of a board needs to go on.

    Attributes:
        next: The first share that was never handed out.
        complete: The first share that is not finished.
        round: Rounds closed.
        joined: Workers that ever joined.
        again: Shares of lost workers.
        lost: Workers that were lost since the last round.
        ahead: Finished shares after `complete`.
        members: The workers that are present.
        idle: Workers that wait for others to finish the last shares, and get them if one is lost.
        answers: The last Decision of each worker, and the clock with which it arrived for it.
        leaving: Workers that were told that no share is left, and have not gone.
        saver: The one of them that saves the end; -1 while nobody does.
        has_saved: Whether the worker that saves at the end has done so.
        guard: The mode, the end of rounds and the failures of the guard.
    """

    next: int
    complete: int
    round: int = 0
    joined: int = 0
    again: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    members: dict[int, _Member] = field(default_factory=dict)
    idle: dict[int, _Member] = field(default_factory=dict)
    answers: dict[int, tuple[int, Decision]] = field(default_factory=dict)
    leaving: list[int] = field(default_factory=list)
    saver: int = -1
    has_saved: bool = False
    guard: tuple[Mode, int, int] | None = None


@final
class Board:
    """The members of a training; threads call it for the workers that they serve.

    Args:
        terms: What it goes by.
        first: The first share to hand out.
        keep: Called under the lock with a JSON object of the state after each change, before anyone is told.
    """

    def __init__(
        self, terms: Terms, first: int = 0, keep: Callable[[dict[str, Any]], object] = lambda state: None
    ) -> None:
        self.terms = terms
        self._state = _State(first, first)
        self._guard = Guard(terms)
        self._keep = keep
        self._changed = threading.Condition()
        self._quorum_since = math.inf
        self._closed: dict[int, Decision] = {}  # of idle workers: their last round

    def join(self) -> Ticket:
        """Make a new worker a member, with its first shares; if none is left, wait for one given back."""
        with self._changed:
            state, worker = self._state, self._state.joined
            state.joined += 1
            clock = min((each.clock for each in state.members.values()), default=0)
            member = _Member(clock, state.round, self._hand_out(), self._guard.mode.in_rounds)
            (state.members if member.shares else state.idle)[worker] = member
            leads, is_late = worker == min(state.members, default=worker), not member.shares
            if is_late:
                self._wake_idle()
            self._note()
            if is_late:
                self._wait(lambda: worker not in state.idle)
                leads = state.answers[worker][1].leads
            return Ticket(worker, clock, tuple(member.shares), self._finished, leads, self._guard.mode)

    def leave(self, worker: int, *, is_last: bool = False) -> None:
        """Let a worker go; the shares that it has not finished are handed out again.

        Args:
            worker: The worker.
            is_last: Whether it has saved the end of the training. It then waits until all others are gone.
        """
        with self._changed:
            if worker in self._state.leaving:
                self._state.leaving.remove(worker)
                self._state.has_saved |= is_last
                if worker == self._state.saver and not is_last:
                    self._state.saver = min(self._state.leaving, default=-1)
                self._note()
            if is_last:
                self._changed.wait_for(lambda: not self._state.leaving, timeout=self.terms.patience)
            self._state.idle.pop(worker, None)
            if self._lose(worker):
                self._close_if_due()
                self._wake_idle()
                self._note()

    def retire(self, worker: int) -> bool:
        """Wait until the end of the training is saved; return whether this worker has to do it now."""
        state, ours = self._state, (worker, -1)
        with self._changed:
            self._changed.wait_for(lambda: state.has_saved or state.saver in ours, self.terms.patience)
            return state.saver in ours and not state.has_saved

    def arrive(self, worker: int, clock: int, weight: float, loss: float = 0.0, failed: str = "") -> Decision:
        """Wait until a worker that has sent its contribution may go on.

        Args:
            worker: The worker.
            clock: Arrivals that it has made before. If a copy of the board has answered it, it is told again.
            weight: Weight of its contribution.
            loss: Mean loss of the samples that the contribution was computed from.
            failed: Why the worker finds stale gradients harmful; "" if it does not.

        Raises:
            ServerError: The worker was taken for lost.
        """
        with self._changed:
            if self._has_answer(worker, clock):
                return self._state.answers[worker][1]
            if worker not in self._state.idle:
                member = self._member(worker)
                if member.in_rounds:
                    member.weight, member.loss = weight, loss
                    self._close_if_due()
                else:
                    member.clock = clock + 1
                    self._finish(member.shares)
                    self._hear(weight, loss)
                    self._guard.hear(loss, failed, len(self._state.members), self._finished)
                    member.shares = []
                    self._changed.notify_all()
                    self._wait(lambda: self._may_go_on(worker))
                    self._go_on([worker], _NO_ROUND)
                    self._close_if_due()  # a round may have waited for this one, which has no share left
            self._wait(lambda: self._is_answered(worker, clock))
            return self._state.answers[worker][1]

    def state(self) -> dict[str, Any]:
        """Return a JSON object of the state."""
        guard = self._guard
        self._state.guard = guard.mode, guard.until, guard.failures
        return {"terms": asdict(self.terms), **asdict(self._state)}

    @classmethod
    def of(cls, state: Mapping[str, Any], keep: Callable[[dict[str, Any]], object]) -> Board:
        """Return the board whose state was kept; its members are those that it had."""
        settings = dict(state)
        board = cls(Terms(**settings.pop("terms")), keep=keep)
        members = {int(worker): _Member(**each) for worker, each in settings.pop("members").items()}
        idle = {int(worker): _Member(**each) for worker, each in settings.pop("idle").items()}
        answers = {
            int(worker): (each[0], Decision.from_json(each[1]))
            for worker, each in settings.pop("answers").items()
        }
        mode, board._guard.until, board._guard.failures = settings.pop("guard")
        board._guard.mode = Mode(**mode)
        board._state = _State(**settings, members=members, idle=idle, answers=answers)
        return board

    @property
    def is_over(self) -> bool:
        """Whether all shares are finished and all members have left."""
        with self._changed:
            state = self._state
            have_left = state.joined > 0 and not (state.members or state.idle)
            return have_left and self._finished >= self.terms.shares

    @property
    def _finished(self) -> int:
        return self._state.complete + len(self._state.ahead)

    def _member(self, worker: int) -> _Member:
        if worker not in self._state.members:
            raise ServerError(
                f"worker {worker} was taken for lost, because others waited {self.terms.patience:g} s for it"
            )
        return self._state.members[worker]

    def _hand_out(self) -> list[int]:
        """Return shares that nobody has: first those of workers that were lost."""
        state = self._state
        shares = [state.again.pop(0) for _ in range(min(self.terms.every, len(state.again)))]
        more = min(self.terms.every - len(shares), self.terms.shares - state.next)
        shares += range(state.next, state.next + more)
        state.next += more
        return shares

    def _finish(self, shares: list[int]) -> None:
        state = self._state
        ahead = {*state.ahead, *shares}
        while state.complete in ahead:
            ahead.remove(state.complete)
            state.complete += 1
        state.ahead = sorted(ahead)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait for a condition, and take workers for lost that keep others waiting too long."""
        until = time.monotonic() + self.terms.patience
        while not is_over():
            due = min(until, self._quorum_since + self.terms.grace)
            self._changed.wait(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            if now >= self._quorum_since + self.terms.grace:
                self._close_if_due()
            elif now >= until and not is_over():
                self._give_up_slow()
                until = now + self.terms.patience

    def _give_up_slow(self) -> None:
        """Take those for lost that the others wait for."""
        state, in_rounds = self._state, self._guard.mode.in_rounds
        if in_rounds or state.joined >= self.terms.workers:
            slowest = min(each.clock for each in state.members.values())
            for worker, member in list(state.members.items()):
                if member.weight is None if in_rounds else member.clock == slowest:
                    self._lose(worker)
        state.joined = max(state.joined, self.terms.workers)  # who has not come by now is not waited for
        self._close_if_due()
        self._wake_idle()
        self._note()

    def _lose(self, worker: int) -> bool:
        """Let other workers have the shares of a member; return whether there is such a member."""
        member = self._state.members.pop(worker, None)
        if member is None:
            return False
        self._state.lost.append(worker)
        self._state.again = sorted([*self._state.again, *member.shares])
        return True

    def _is_answered(self, worker: int, clock: int) -> bool:
        """Return whether a worker that arrived has its answer; raise ServerError if it was taken for lost."""
        if self._has_answer(worker, clock):
            return True
        if worker not in self._state.idle:
            self._member(worker)
        return False

    def _has_answer(self, worker: int, clock: int) -> bool:
        answer = self._state.answers.get(worker)
        return answer is not None and answer[0] == clock

    def _may_go_on(self, worker: int) -> bool:
        self._member(worker)  # it may be lost
        if self._guard.mode.in_rounds:
            return True
        slowest = min(each.clock for each in self._state.members.values())
        slowest = slowest if self._state.joined >= self.terms.workers else 0
        return self._member(worker).clock <= slowest + self.terms.staleness

    def _close_if_due(self) -> None:
        """Close the round, if all are there, or a quorum and its grace is over."""
        state, terms = self._state, self.terms
        self._changed.notify_all()
        if not self._guard.mode.in_rounds or state.joined < terms.workers:
            return
        here = [worker for worker, member in state.members.items() if member.weight is not None]
        if not here:
            return
        now = time.monotonic()
        if terms.quorum and len(here) >= terms.quorum:
            self._quorum_since = min(self._quorum_since, now)
        if len(here) == len(state.members) or now >= self._quorum_since + terms.grace:
            self._close(sorted(here, key=lambda worker: state.members[worker].shares))

    def _close(self, order: list[int]) -> None:
        """Close the round with these workers, and give them their next shares in the order of their last."""
        state = self._state
        members = [state.members[worker] for worker in order]
        round, self._quorum_since = state.round, math.inf
        closed = replace(
            _NO_ROUND,
            round=round,
            members=tuple((worker, member.clock) for worker, member in zip(order, members, strict=True)),
            weights=tuple(member.weight or 0.0 for member in members),
            staleness=tuple(round - member.base for member in members),
            lost=tuple(state.lost),
        )
        state.lost = []
        state.round += 1
        for member in members:
            self._finish(member.shares)
            self._hear(member.weight or 0.0, member.loss)
            member.weight, member.clock = None, member.clock + 1
        self._guard.close(self._finished)
        self._go_on(order, closed)

    def _hear(self, weight: float, loss: float) -> None:
        """Note the loss of a contribution, of which each worker is told with its next answer."""
        for member in (*self._state.members.values(), *self._state.idle.values()):
            if weight:
                member.heard, member.of = member.heard + weight * loss, member.of + weight

    def _go_on(self, order: list[int], closed: Decision) -> None:
        """Give workers their next shares, and tell them; those for whom none is left wait for the others."""
        state = self._state
        staying = []
        for worker in order:
            member = state.members[worker]
            member.shares = self._hand_out()
            if member.shares:
                staying.append(worker)
            else:
                state.idle[worker] = state.members.pop(worker)
                self._closed[worker] = closed
        for worker in staying:
            self._tell(worker, state.members[worker], worker == min(state.members), closed)
        self._wake_idle()
        self._note()

    def _wake_idle(self) -> None:
        """Tell workers without a share to end if all are finished, or give them what a lost one had."""
        state = self._state
        if self._finished >= self.terms.shares:
            if state.saver < 0:
                state.saver = min(state.idle, default=-1)
            for worker, member in state.idle.items():
                self._tell(worker, member, worker == state.saver, self._closed.get(worker, _NO_ROUND))
            state.idle = {}
        while state.idle and state.again:
            worker = min(state.idle)
            member = state.members[worker] = state.idle.pop(worker)
            member.shares = self._hand_out()
            self._tell(worker, member, worker == min(state.members), self._closed.get(worker, _NO_ROUND))

    def _tell(self, worker: int, member: _Member, leads: bool, closed: Decision) -> None:
        """Answer a worker: with its shares, and the round that was closed."""
        state = self._state
        member.base, member.in_rounds = state.round, self._guard.mode.in_rounds
        decision = replace(
            closed,
            shares=tuple(member.shares),
            finished=self._finished,
            complete=state.complete,
            leads=leads,
            loss=member.heard / member.of if member.of else None,
            mode=self._guard.mode,
        )
        member.heard = member.of = 0.0
        state.answers[worker] = (member.clock - 1, decision)
        if not member.shares:
            state.leaving.append(worker)

    def _note(self) -> None:
        self._keep(self.state())
        self._changed.notify_all()
