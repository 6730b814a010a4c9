"""Starts ranks on this machine through torch's elastic launcher, and stands in for them as one process."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from shoal.elastic.outcome import EXIT_STOPPED, Outcome, root_cause
from shoal.errors import WorkerError

__all__ = ["LAUNCHER", "OUTCOMES", "launch"]

LAUNCHER = "SHOAL_LAUNCHER"
"""Environment variable: the process that started a rank, and that it must not outlive."""

OUTCOMES = "SHOAL_OUTCOMES"
"""Environment variable: the folder where a rank that `launch` started leaves its outcome."""

_GRACE_SECONDS = 600  # for ranks to end their step and save, after a signal


def launch(command: Sequence[str], ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """Runs a command as each of some ranks on this machine, with torchrun's environment.

    A signal (Ctrl-C, SIGTERM) is passed on to all ranks, which end their step and save. When a rank fails,
    the others are ended. None outlives this process, even if it is killed.

    Args:
        command: A program and its arguments.
        ranks: How many.
        environment: What OMP_NUM_THREADS and GLOO_SOCKET_IFNAME are taken from, if the user set them.

    Returns:
        The exit code: 0, or `EXIT_STOPPED` after a signal if all ranks saved their state.

    Raises:
        WorkerError: A rank failed; it names the one that failed first.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    with (
        tempfile.TemporaryDirectory(prefix="shoal-") as folder,
        _inherited(_rank_environment(folder, ranks, environment)),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        if hasattr(config, "shutdown_timeout"):  # torch 2.13; before, torchelastic waits for 30 s
            config.shutdown_timeout = _GRACE_SECONDS
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            outcomes = Outcome.read_all(Path(folder))
            if codes and set(codes.values()) == {EXIT_STOPPED}:
                return EXIT_STOPPED
            raise root_cause(outcomes, codes) from None
        except SignalException as error:
            return _exit_code_after_signal(Outcome.read_all(Path(folder)), ranks, error.sigval.name)
    return 0


def _exit_code_after_signal(outcomes: Sequence[Outcome], ranks: int, signal_name: str) -> int:
    """What became of ranks that a signal was passed on to; raises if they could not save their state."""
    failed = [outcome for outcome in outcomes if outcome.error]
    ended = set(range(ranks)) - {outcome.rank for outcome in outcomes}
    if ended and all(outcome.in_collective for outcome in failed):
        reason = f"ended by {signal_name} before its state was saved"
        raise WorkerError(min(ended), reason, exit_code=130)
    if failed:
        raise root_cause(failed, {})
    # All may have been done when the signal came.
    return max(outcome.exit_code for outcome in outcomes)


@contextmanager
def _inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Within it, processes that are started have these variables too."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rank_environment(folder: str, ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    threads = max(1, (len(os.sched_getaffinity(0)) or 1) // ranks)
    return {
        LAUNCHER: str(os.getpid()),
        OUTCOMES: folder,
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS") or str(threads),
        # Ranks on one machine need no name service and no network but loopback.
        "GLOO_SOCKET_IFNAME": environment.get("GLOO_SOCKET_IFNAME") or "lo",
    }
