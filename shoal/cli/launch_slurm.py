"""`shoal launch slurm`: a training as a batch job of Slurm, which requeues itself."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from shoal.cli.launched_train import TrainWords, add_words
from shoal.cli.local import positive_seconds, positive_whole, whole
from shoal.errors import ConfigError
from shoal.submit import SlurmJob, submit


def add_target(targets: argparse._SubParsersAction) -> None:
    """Add the target to `shoal launch`."""
    parser = targets.add_parser(
        "slurm",
        help="as a batch job of Slurm",
        description="Submits a batch job that starts one task for each rank, and prints its number. Before "
        "its time limit, and when it is preempted, the ranks save, and the job is requeued; after a failure "
        "too, --restarts times. The output of all ranks, with the rank before each line, is in NAME-JOB.log.",
    )
    parser.add_argument("--nodes", metavar="N", type=positive_whole, default=1, help="nodes")
    parser.add_argument("--nproc", metavar="N", type=positive_whole, default=1, help="ranks on each node")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank, which sees no other")
    parser.add_argument("--time", metavar="TIME", default="", help="time limit, such as 04:00:00")
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=positive_whole,
        default=120,
        help="time to save before the limit; Slurm may send the signal up to 60 s earlier",
    )
    parser.add_argument(
        "--restarts", metavar="N", type=whole, default=3, help="how often a job that failed is requeued"
    )
    parser.add_argument(
        "--backoff",
        metavar="SECONDS",
        type=positive_seconds,
        default=10.0,
        help="pause before that; doubles each time, up to 5 minutes",
    )
    parser.add_argument("--name", metavar="NAME", default="shoal", help="name of the job")
    parser.add_argument("--folder", metavar="DIR", default=".", help="working directory; that of here")
    parser.add_argument(
        "--python",
        metavar="COMMAND",
        default=sys.executable,
        help="the Python with Shoal on the nodes; by default the path of the one here",
    )
    parser.add_argument(
        "--sbatch",
        metavar="OPTION=VALUE",
        action="append",
        default=[],
        help="another option of sbatch, such as partition=gpu; may be given several times",
    )
    add_words(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    options = dict(_option(given) for given in args.sbatch)
    words = TrainWords.of(args.words).without("--nproc", "--nodes", "--rendezvous", "--grace").resumable()
    job = SlurmJob(
        words=words.with_grace(args.grace).words,
        nodes=args.nodes,
        ranks=args.nproc,
        gpus=args.gpus,
        time=args.time,
        grace=args.grace,
        restarts=args.restarts,
        pause=args.backoff,
        name=args.name,
        folder=os.path.abspath(args.folder),
        python=shlex.split(args.python),
        options=options,
    )
    print(job.text.rstrip() if args.dry_run else submit(job))
    return 0


def _option(given: str) -> tuple[str, str]:
    name, between, value = given.removeprefix("--").partition("=")
    if not between:
        raise ConfigError(
            f"--sbatch {given} has no value",
            possible="OPTION=VALUE, such as partition=gpu",
            change="write the option with its value",
        )
    return name, value
