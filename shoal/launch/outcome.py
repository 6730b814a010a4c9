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

from torch.distributed import DistError

from shoal.errors import CheckpointError, CommunicationError, ShoalError, UserError, WorkerError
from shoal.hang import HangVerdict

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
