"""What it means for a run how its ranks ended."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence

from shoal.errors import WorkerError
from shoal.hang import HangVerdict
from shoal.launch.outcome import Outcome, root_cause
from shoal.signals import stopped_early
from shoal.submit import EXIT_STOPPED


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
