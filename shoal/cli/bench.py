"""Measures collectives: checks results, then times all backends in interleaved rounds. Without arguments, it
measures all-reduce on two local ranks over shoal and gloo. Under torchrun, srun or mpirun, it runs as one of
the ranks they started. With the backend mpi, it starts its ranks through mpirun.

backends: shoal; shoal-shared (buffers in shared memory); gloo; nccl; mpi (through mpi4py); oneccl;
memory (the same reads and writes on private memory, without communication: what shared memory cannot beat)
collectives: all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter send_recv barrier

Exit codes: 0 measured; 1 a result was wrong, or a rank failed; 2 wrong input; 130 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.local import nursery_for
from shoal.errors import ConfigError, WorkerError

if TYPE_CHECKING:
    from shoal.launch.local import Nursery
    from shoal.machine.bench import Settings
    from shoal.machine.bench.settings import Ranks

_STOPPED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--collective",
        metavar="NAME,...",
        default="all_reduce",
        help="collectives, or all (default all_reduce)",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME,...",
        default="shoal,gloo",
        help="backends; ratios are to the first (default shoal,gloo)",
    )
    parser.add_argument("--ranks", metavar="N", type=int, default=2, help="local ranks to start (default 2)")
    parser.add_argument(
        "--sizes",
        metavar="SIZES",
        default="1KiB:64MiB:x4",
        help="a list such as 1KiB,1MiB or a range FIRST:LAST[:xFACTOR] (default 1KiB:64MiB:x4)",
    )
    parser.add_argument("--dtype", default="float32", help="element type (default float32)")
    parser.add_argument("--op", default="sum", help="sum, avg, min, max or product (default sum)")
    parser.add_argument(
        "--rounds", metavar="N", type=int, default=5, help="rounds of each backend (default 5)"
    )
    parser.add_argument(
        "--algorithm", metavar="NAME", help="algorithm for the backend shoal (default: from its table)"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="also measure with new tensors for each operation"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every round's time")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        help="also draw time and busbw over size, into a file such as bench.png",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        type=Path,
        help="instead, time every algorithm of the backend shoal, and write the table from which it chooses, "
        "as TOML",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, as one of the ranks that a launcher started or on local ranks that this starts.

    Raises:
        UserError: Something given cannot work; nothing was started.
        WorkerError: A rank failed.
    """
    # Imported here because they bring torch, which `--help` should not wait for.
    from shoal.launch.local import find_world, run_rank
    from shoal.machine.bench.mpirun import abort, choose_master, ranks_of_mpi, started_by_mpirun
    from shoal.machine.bench.settings import Ranks

    world = find_world()
    if world is None and not started_by_mpirun():
        with nursery_for(args, "shoal.machine.bench.measure") as nursery:
            return _on_this_machine(args, nursery)
    settings = _settings(args)
    if world is not None:
        _require_no_mpi(settings)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = world.master[0], str(world.master[1])
        ranks = Ranks(world.rank, world.ranks, world.local_rank)
        return run_rank(world.rank, lambda _: _measure(args, settings, ranks))
    ranks = ranks_of_mpi()
    choose_master()
    code = run_rank(ranks.rank, lambda _: _measure(args, settings, ranks))
    return code if code == 0 else abort(code)


def _on_this_machine(args: argparse.Namespace, nursery: Nursery | None) -> int:
    from shoal.launch.local import launch
    from shoal.machine.bench.mpirun import mpirun

    settings = _settings(args)
    command = [sys.executable, "-m", "shoal", *_words(args)]
    try:
        if _needs_mpirun(settings):
            return mpirun(command, args.ranks)
        return launch(command, args.ranks, nursery=nursery)
    except WorkerError as error:
        if error.exit_code == _STOPPED:  # there was nothing to save
            return _STOPPED
        raise


def _settings(args: argparse.Namespace) -> Settings:
    """Return the settings, after a check that they can be measured."""
    from shoal.machine.bench import COLLECTIVES, Settings, parse_names, parse_sizes
    from shoal.machine.bench.contestants import require_available
    from shoal.machine.bench.report import require_plot

    settings = Settings(
        collectives=tuple(COLLECTIVES) if args.collective == "all" else parse_names(args.collective),
        backends=parse_names(args.backend),
        sizes=parse_sizes(args.sizes),
        dtype=args.dtype,
        op=args.op,
        rounds=args.rounds,
        algorithm=args.algorithm,
        fresh=args.fresh,
    )
    if args.ranks < 1:
        raise ConfigError(
            f"--ranks {args.ranks} are no ranks", possible="1 or more", change="give a larger --ranks"
        )
    for backend in settings.backends:
        require_available(backend)
    if args.plot is not None:
        require_plot(args.plot)
    return settings


def _measure(args: argparse.Namespace, settings: Settings, ranks: Ranks) -> int:
    from shoal.machine.bench.calibration import write_table
    from shoal.machine.bench.measure import run, stdout_for_data
    from shoal.machine.bench.report import report_json, report_table
    from shoal.machine.bench.settings import joined

    with stdout_for_data(), joined(ranks):
        if args.calibrate is not None:
            write_table(settings, ranks, args.calibrate)
            return 0
        run(settings, ranks, report_json if args.json else report_table, args.plot)
    return 0


def _needs_mpirun(settings: Settings) -> bool:
    return not {"mpi", "oneccl"}.isdisjoint(settings.backends)


def _require_no_mpi(settings: Settings) -> None:
    """Raise ConfigError if MPI is to be measured by ranks that another launcher started."""
    if _needs_mpirun(settings):
        raise ConfigError(
            "--backend mpi and oneccl cannot join ranks that torchrun or srun started",
            possible="ranks that mpirun starts",
            change="run: mpirun -n N shoal bench --backend mpi,...",
        )


def _words(args: argparse.Namespace) -> list[str]:
    """Return the command line for the ranks."""
    names = ("collective", "backend", "sizes", "dtype", "op", "rounds", "algorithm", "plot", "calibrate")
    given = {name: getattr(args, name) for name in names}
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    flags = [f"--{name}" for name in ("fresh", "json") if getattr(args, name)]
    return ["bench", *words, *flags]
