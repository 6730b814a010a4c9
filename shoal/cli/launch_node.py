"""`shoal launch node`: this host's ranks, among those of hosts that something else started."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import nullcontext

from shoal.cli.launched_train import TrainWords, add_words
from shoal.errors import ConfigError


def add_target(targets: argparse._SubParsersAction) -> None:
    """Add the target to `shoal launch`."""
    parser = targets.add_parser(
        "node",
        help="this host's ranks of a training on several hosts that something else starts",
        description="Starts this host's ranks, and joins those of the other hosts, on each of which the same "
        "command runs. Kubernetes' manifests use it. The numbers may come from the environment.",
    )
    for name, variables, text in (
        ("nodes", ("PET_NNODES",), "number of hosts"),
        ("node", ("PET_NODE_RANK", "JOB_COMPLETION_INDEX"), "number of this host, from 0"),
        ("nproc", ("PET_NPROC_PER_NODE",), "ranks on each host; by default one for each GPU"),
    ):
        from_environment = next((os.environ[each] for each in variables if each in os.environ), None)
        parser.add_argument(
            f"--{name}",
            metavar="N",
            default=from_environment,
            help=f"{text}; else {' or '.join(variables)}",
        )
    parser.add_argument(
        "--master",
        metavar="HOST:PORT",
        help="where all ranks meet: a port on the first host; else PET_MASTER_ADDR and PET_MASTER_PORT",
    )
    add_words(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Start this host's ranks; return the exit code of the training, as far as this host can tell it.

    Raises:
        ConfigError: A number is missing or wrong.
        WorkerError: A rank of this host failed.
    """
    words = TrainWords.of(args.words).without("--nproc", "--nodes", "--rendezvous")
    nodes, number = _number(args.nodes, "--nodes", 1), _number(args.node, "--node", 0)
    given = None if args.nproc is None else _number(args.nproc, "--nproc", 1)
    if number >= nodes:
        raise ConfigError(
            f"--node {number} was given with --nodes {nodes}",
            possible=f"numbers from 0 to {nodes - 1}",
            change="correct the number of this host, or of all",
        )
    host, port = _master(args.master)
    command = [sys.executable, "-m", "shoal", *words.words]
    if args.dry_run:
        ranks = "one rank for each GPU, or one" if given is None else f"{given} ranks"
        print(f"{ranks}; host {number} of {nodes}; all ranks meet at {host}:{port}:")
        print(shlex.join(command))
        return 0
    return _start(command, nodes, number, given, (host, port), words.grace, args.is_program)


def _start(
    command: list[str],
    nodes: int,
    number: int,
    given: int | None,
    master: tuple[str, int],
    grace: float | None,
    may_fork: bool,
) -> int:
    from shoal.launch import launch_on_node, open_nursery, open_store, ranks_here

    with open_nursery("shoal.train") if may_fork else nullcontext() as nursery:
        store = open_store("", master[1]) if number == 0 else None
        ranks = given or ranks_here()
        numbers, name = range(number * ranks, (number + 1) * ranks), os.environ.get("HOSTNAME")
        host = name or f"host {number}"
        code = launch_on_node(command, numbers, nodes * ranks, master, host, nursery=nursery, grace=grace)
        del store  # which the ranks of all hosts need until they have ended
        return code


def _number(given: str | None, option: str, least: int) -> int:
    if given is None or not given.isdecimal() or int(given) < least:
        raise ConfigError(
            f"{option} is not given" if given is None else f"{option} {given} is no number",
            possible=f"a whole number from {least}",
            change=f"give {option}, or set the variable that --help names",
        )
    return int(given)


def _master(given: str | None) -> tuple[str, int]:
    text = given or f"{os.environ.get('PET_MASTER_ADDR', '')}:{os.environ.get('PET_MASTER_PORT', '')}"
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"--master {given} is no place to meet" if given else "--master is not given",
            possible="HOST:PORT, a free port on the first host",
            change="give --master, or set PET_MASTER_ADDR and PET_MASTER_PORT",
        )
    return host.strip("[]"), int(port)
