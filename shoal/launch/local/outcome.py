"""How each rank ended, and which rank's failure caused the others.

When one rank dies, the others fail a moment later in the collective that it left. The user needs the first
failure. So each rank writes how it ended, and whether it failed in a collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch.distributed import DistError

from shoal.analyze.hang import HangVerdict
from shoal.errors import CheckpointError, CommunicationError, ShoalError, UserError, WorkerError
from shoal.launch.submit import EXIT_STOPPED
from shoal.signals import stopped_early

EXIT_AGAIN = 76
"""Exit code of a member that ended because its group is lost, and that the launcher starts again."""

_CLEAR = UserError, CheckpointError
"""Errors whose messages name what was wrong, and where: a traceback would hide that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: The global rank.
        exit_code: Exit code of its process.
        error: Its error message for the user; empty if there was none.
        detail: The traceback; empty for an error that the user can correct, or of a checkpoint.
        in_collective: Whether it failed in a collective, and so perhaps because of another rank.
        is_early: Whether a signal ended it before its first step.
        when: Time of its end, in seconds since the epoch.
    """

    rank: int
    exit_code: int
    error: str = ""
    detail: str = ""
    in_collective: bool = False
    is_early: bool = False
    when: float = dataclasses.field(default_factory=time.time)

    @classmethod
    def of_error(cls, rank: int, error: BaseException) -> Outcome:
        """Return the outcome of a rank that raised an error."""
        return cls(
            rank=rank,
            exit_code=error.exit_code if isinstance(error, ShoalError) else 1,
            error=f"{type(error).__name__}: {error}",
            detail="" if isinstance(error, _CLEAR) else "".join(traceback.format_exception(error)),
            in_collective=isinstance(error, (CommunicationError, DistError)),
        )

    def write(self, folder: Path) -> None:
        """Write the outcome to a file for the launcher.

        Where its folder is full or gone, print the error: the launcher then has the exit code alone.
        """
        file = folder / f"rank-{self.rank:05d}.json"
        try:
            file.write_text(json.dumps(dataclasses.asdict(self)))
        except OSError as error:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)  # a part of it says nothing
            print(f"how this rank ended cannot be written to {file}: {error.strerror}", file=sys.stderr)
            if self.error:
                print(f"{self.error}\n{self.detail}".rstrip(), file=sys.stderr, flush=True)

    @classmethod
    def read_all(cls, folder: Path) -> list[Outcome]:
        """Read the outcomes that the ranks wrote, by rank."""
        return [cls(**json.loads(path.read_text())) for path in sorted(folder.glob("rank-*.json"))]


def root_cause(
    outcomes: Sequence[Outcome],
    exit_codes: Mapping[int, int],
    stopped: Collection[int] = (),
    hang: HangVerdict | None = None,
) -> WorkerError:
    """Return the failure that came before the others.

    It is the first of these that exists: the earliest error outside of a collective, a rank that a signal
    killed, a rank that ended without an outcome, a rank that is stopped, the cause of a hang, a rank that
    aborted, the earliest error in a collective. NCCL's watchdog aborts ranks that waited for another.

    Args:
        outcomes: The outcomes that ranks wrote.
        exit_codes: Exit codes of the ranks that failed by themselves, without those that were ended because
            of a failure; negative for a signal, as in `subprocess`.
        stopped: Ranks whose processes were stopped, not ended, when the others failed.
        hang: The verdict of ranks that waited too long; None if none did.
    """
    failures = sorted((outcome for outcome in outcomes if outcome.error), key=lambda outcome: outcome.when)
    for outcome in failures:
        if not outcome.in_collective:
            return _as_error(outcome)
    told = {outcome.rank for outcome in outcomes}
    silent = {rank: code for rank, code in exit_codes.items() if rank not in told or not failures}
    aborted = {rank: code for rank, code in silent.items() if code == -signal.SIGABRT}
    others = {rank: code for rank, code in silent.items() if rank not in aborted}
    killed = {rank: code for rank, code in others.items() if code < 0 and -code != signal.SIGTERM}
    is_explained = bool(stopped) or (hang is not None and bool(hang.ranks))
    for rank, code in (killed or others or ({} if is_explained else aborted)).items():
        if code < 0:
            number = signal.Signals(-code)
            return WorkerError(rank, f"killed by {number.name}{_HINTS.get(number, '')}")
        return WorkerError(rank, f"its process ended with exit code {code}", exit_code=1)
    if stopped:
        lost = "; ".join(f"rank {outcome.rank}: {outcome.error}" for outcome in failures[:1])
        return WorkerError(
            min(stopped), f"its process was stopped (by SIGSTOP, Ctrl-Z or a debugger); {lost}", exit_code=1
        )
    if hang is not None and hang.ranks:
        met = "\n".join(f"rank {each.rank}: {each.error}\n{each.detail}" for each in failures[:1])
        return WorkerError(min(hang.ranks), hang.text, detail=met, exit_code=1)
    return _as_error(failures[0])


_HINTS = {
    signal.SIGKILL: " (by a person, or by the system because memory ran out: see `dmesg`)",
    signal.SIGSEGV: " (a fault in native code)",
    signal.SIGABRT: " (by native code, such as NCCL's watchdog when a collective has waited too long)",
    signal.SIGBUS: " (often a full /dev/shm or disk)",
}


def _as_error(outcome: Outcome) -> WorkerError:
    return WorkerError(outcome.rank, outcome.error, detail=outcome.detail, exit_code=outcome.exit_code)


def exit_code_of(
    ranks: Collection[int],
    outcomes: Sequence[Outcome],
    exit_codes: Mapping[int, int],
    stopped: Collection[int],
    signal_name: str,
    hang: HangVerdict | None,
) -> int:
    """Return the exit code of the run: 0, or `EXIT_STOPPED` if a signal ended it and its state is saved.

    Args:
        ranks: The ranks that count; not those of units without which the others went on.
        outcomes: The outcomes that ranks wrote.
        exit_codes: Exit codes of the ranks that ended by themselves; a rank that its launcher ended is not
            the cause of a failure. Negative for a signal.
        stopped: Ranks that were stopped when the first rank failed.
        signal_name: Name of the signal that the launcher got before any rank failed; empty for none.
        hang: The verdict of ranks that waited too long; None if none did.

    Raises:
        WorkerError: A rank failed; the error names the rank that failed first.
    """
    if signal_name:
        left = {outcome.rank: outcome for outcome in outcomes if outcome.rank in ranks}
        for rank in set(ranks) - left.keys():  # the folder of the outcomes may be full, or gone
            if (code := exit_codes.get(rank)) in (0, EXIT_STOPPED):
                left[rank] = Outcome(rank=rank, exit_code=code)
        return exit_code_after_signal(list(left.values()), ranks, signal_name)
    codes = {rank: code for rank, code in exit_codes.items() if rank in ranks}
    if codes and set(codes.values()) <= {0, EXIT_STOPPED}:
        return max(codes.values())
    told = {outcome.rank: outcome for outcome in outcomes}
    if set(codes) <= set(told) and _are_stopped([told[rank] for rank in codes]):
        return EXIT_STOPPED
    failed = {rank: code for rank, code in exit_codes.items() if code}
    raise root_cause(outcomes, failed, stopped, hang)


def exit_code_after_signal(outcomes: Sequence[Outcome], ranks: Collection[int], signal_name: str) -> int:
    """Return the exit code after a signal to the ranks, and say if none had made a step.

    Raises:
        WorkerError: One could not save its state.
    """
    if all(outcome.is_early for outcome in outcomes) and set(ranks) <= {each.rank for each in outcomes}:
        print(stopped_early(signal_name), file=sys.stderr, flush=True)
        return EXIT_STOPPED
    failed = [outcome for outcome in outcomes if outcome.error]
    ended = set(ranks) - {outcome.rank for outcome in outcomes}
    if ended and all(outcome.in_collective for outcome in failed):
        reason = f"ended by {signal_name} before its state was saved"
        raise WorkerError(min(ended), reason, exit_code=130)
    if _are_stopped(outcomes):
        return EXIT_STOPPED
    if failed:
        raise root_cause(failed, {})
    # All ranks may have finished when the signal came.
    return max(outcome.exit_code for outcome in outcomes)


def _are_stopped(outcomes: Sequence[Outcome]) -> bool:
    """Return whether a rank has stopped without a loss, and the others failed only because it was gone.

    A rank ends with `EXIT_STOPPED` when all have saved, or before it made a step: then none made one.
    """
    has_stopped = any(outcome.exit_code == EXIT_STOPPED for outcome in outcomes)
    return has_stopped and all(outcome.in_collective for outcome in outcomes if outcome.error)


@final
class Causes:
    """The causes of failures.

    Args:
        folder: Where members leave their outcomes, and verdicts on hangs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._given_up: dict[int, str] = {}  # members that the launcher ends, and why
        self._told: HangVerdict | None = None

    def give_up(self, member: int, why: str) -> None:
        """Note why the launcher ends a member."""
        self._given_up.setdefault(member, f"its process {why}, and was ended")

    def forget(self, member: int) -> None:
        """Forget what is known of a member, which is started again."""
        for outcome in self._folder.glob(f"rank-{member:05d}.json"):
            outcome.unlink()
        self._given_up.pop(member, None)

    def of(self, failed: Mapping[int, int]) -> WorkerError:
        """Return the failure that came first of those of some members.

        Args:
            failed: Their exit codes.
        """
        outcomes = [outcome for outcome in Outcome.read_all(self._folder) if outcome.rank in failed]
        given_up = next((member for member in failed if member in self._given_up), None)
        if given_up is not None and not any(outcome.error for outcome in outcomes):
            return WorkerError(given_up, self._given_up[given_up], exit_code=1)
        return root_cause(outcomes, failed)

    def after_signal(self, codes: Mapping[int, int], name: str) -> int:
        """Return the exit code of a training that a signal has ended.

        Args:
            codes: The exit code of each member that was there when it came.
            name: The name of the signal.

        Raises:
            WorkerError: Members have trained, and none has saved the state.
        """
        outcomes = Outcome.read_all(self._folder)
        early = {each.rank for each in outcomes if each.is_early}
        trained = [member for member in codes if member not in early]
        members = [member for member in trained if codes[member] == EXIT_STOPPED] or trained or list(codes)
        return exit_code_after_signal([each for each in outcomes if each.rank in members], members, name)

    def hang_of(self, member: int) -> str:
        """Return a colon and why a member hangs; "" unless the ranks that waited for it have found out."""
        verdict = self._newest_verdict()
        return f": {verdict.text}" if verdict is not None and verdict.ranks == (member,) else ""

    def newest_hang(self) -> str:
        """Return a colon and what ranks waited for last; "" if none has found out."""
        verdict = self._newest_verdict()
        return f": {verdict.text}" if verdict is not None else ""

    def new_hang(self) -> str:
        """Return what `newest_hang` does; "" if that was returned before."""
        before, self._told = self._told, self._newest_verdict()
        return self.newest_hang() if self._told != before else ""

    def _newest_verdict(self) -> HangVerdict | None:
        files = sorted(self._folder.glob("verdict-*"), key=lambda path: path.stat().st_mtime)
        return HangVerdict.read(files[-1]) if files else None
