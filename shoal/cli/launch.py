"""Starts a training elsewhere: shoal launch TARGET [options] -- train [options of shoal train].
With --dry-run it prints what it would run or submit, and does nothing.

The exit codes are those of `shoal train`; Slurm, Kubernetes and Ray start a training again according to them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import launch_kubernetes, launch_node, launch_slurm
from shoal.cli.launched_train import TrainWords, add_words
from shoal.cli.local import least_and_most, positive_seconds, positive_whole, whole
from shoal.errors import ConfigError
from shoal.submit import Container

if TYPE_CHECKING:
    from shoal.fleet import Policy, Work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the targets."""
    targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)
    _add_local(targets)
    _add_ssh(targets)
    _add_ray(targets)
    launch_slurm.add_target(targets)
    launch_kubernetes.add_target(targets)
    _add_container(targets)
    launch_node.add_target(targets)


def _add_local(targets: argparse._SubParsersAction) -> None:
    parser = targets.add_parser("local", help="on this machine, as `shoal train` does by itself")
    add_words(parser)
    parser.set_defaults(run=_run_local)


def _add_ssh(targets: argparse._SubParsersAction) -> None:
    parser = targets.add_parser(
        "ssh",
        help="on hosts that ssh reaches",
        description="Starts ranks on several hosts by ssh, shows the output of all with host and rank before "
        "each line, and passes signals on. After a failure, the first line names what failed first. "
        "Every host needs Shoal, the configuration, and the run's directory on a file system that all share.",
    )
    hosts = parser.add_mutually_exclusive_group(required=True)
    hosts.add_argument("--hosts", metavar="A,B,...", help="the hosts; those beyond --nodes are spares")
    hosts.add_argument(
        "--hosts-file", metavar="FILE", type=Path, help="one host a line: NAME, or NAME slots=RANKS"
    )
    _add_fleet(parser)
    parser.add_argument("--folder", metavar="DIR", help="working directory on each host; that of here")
    parser.add_argument(
        "--python",
        metavar="COMMAND",
        default=sys.executable,
        help="the Python with Shoal on each host; by default the path of the one here",
    )
    parser.add_argument(
        "--ssh", metavar="COMMAND", default="ssh", help="ssh with options, such as 'ssh -F FILE'"
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", default="", help="the first host's address, as the others reach it"
    )
    add_words(parser)
    parser.set_defaults(run=_run_ssh)


def _add_ray(targets: argparse._SubParsersAction) -> None:
    parser = targets.add_parser(
        "ray",
        help="on the nodes of a Ray cluster, as actors (extra ray)",
        description="Starts one actor on each node that the training uses; it holds the node's ranks. If an "
        "actor or a node is lost, the training is started again on the nodes that are there then.",
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", default="auto", help="the cluster; by default the one of this host"
    )
    _add_fleet(parser)
    parser.add_argument("--folder", metavar="DIR", help="working directory on each node; that of here")
    add_words(parser)
    parser.set_defaults(run=_run_ray)


def _add_container(targets: argparse._SubParsersAction) -> None:
    parser = targets.add_parser(
        "container",
        help="in a container, whose Containerfile this prints",
        description="Prints a Containerfile, which buildah, podman and docker build in the folder of Shoal's "
        "source. A container of it trains with the words after --, or does what it is given instead.",
    )
    parser.add_argument(
        "--base", metavar="IMAGE", default="python:3.12-slim", help="with Python, its venv, and apt"
    )
    parser.add_argument(
        "--extra", metavar="NAME", action="append", default=[], help="an extra of Shoal, such as hf"
    )
    add_words(parser)
    parser.set_defaults(run=_run_container)


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        metavar="N|MIN:MAX",
        help="hosts to use; by default all. After failures, as many from MIN to MAX as are left",
    )
    parser.add_argument(
        "--nproc", metavar="N", type=positive_whole, help="ranks on each host; by default one for each GPU"
    )
    parser.add_argument(
        "--restarts", metavar="N", type=whole, default=3, help="how often it is started again after a failure"
    )
    parser.add_argument(
        "--backoff",
        metavar="SECONDS",
        type=positive_seconds,
        default=1.0,
        help="pause before it is started again; doubles after each failure within a minute, up to 5 minutes",
    )
    parser.add_argument(
        "--strikes", metavar="N", type=positive_whole, default=2, help="failures that leave a host out"
    )
    parser.add_argument(
        "--port", metavar="PORT", type=int, default=0, help="where the ranks meet; by default any free port"
    )
    parser.add_argument(
        "--env",
        metavar="NAME",
        action="append",
        default=[],
        help="pass this variable of the environment on to the ranks; its value is in no command line",
    )


def _run_local(args: argparse.Namespace) -> int:
    words = TrainWords.of(args.words)
    command = [sys.executable, "-m", "shoal", *words.words]
    if args.dry_run:
        print(shlex.join(command))
        return 0
    sys.stdout.flush()
    return os.execv(command[0], command)


def _run_ssh(args: argparse.Namespace) -> int:
    from shoal.fleet import (
        Host,
        agent_command,
        parse_hosts,
        read_hosts,
        ssh_command,
        start_program,
        train_on,
    )

    hosts = parse_hosts(args.hosts) if args.hosts is not None else read_hosts(args.hosts_file)
    policy, work = _policy(args, len(hosts)), _work(args)
    command = agent_command(work.folder, shlex.split(args.python))

    def on(host: Host) -> list[str]:
        return ssh_command(host.name, command, shlex.split(args.ssh))

    if args.dry_run:
        for number, host in enumerate(hosts):
            spare = "  # a spare" if number >= policy.most else ""
            print(shlex.join(on(host)) + spare)
        _print_work(args, work.words)
        return 0
    return train_on(lambda: hosts, work, policy, lambda host, said: start_program(on(host), said))


def _run_ray(args: argparse.Namespace) -> int:
    from shoal.fleet import RayCluster, train_on

    work = _work(args)
    if args.dry_run:
        print(f"ray.init(address={args.address!r})")
        count = args.nodes or "as many as there are nodes"
        print(f"actors on nodes of their own: {count}; each with {args.nproc or 1} CPUs, and its node's GPUs")
        _print_work(args, work.words)
        return 0
    with RayCluster(args.address, args.nproc) as cluster:
        policy = _policy(args, len(cluster.hosts()))
        return train_on(cluster.hosts, work, policy, cluster.start_agent)


def _run_container(args: argparse.Namespace) -> int:
    words = TrainWords.of(args.words).words
    print(Container(words=words, base=args.base, extras=args.extra).text, end="")
    return 0


def _policy(args: argparse.Namespace, hosts: int) -> Policy:
    from shoal.fleet import Policy

    least, most = least_and_most(args.nodes or str(hosts)) or (0, 0)
    policy = Policy(
        least=least,
        most=most,
        restarts=args.restarts,
        pause=args.backoff,
        strikes=args.strikes,
    )
    if not 1 <= policy.least <= policy.most or policy.least > hosts:
        raise ConfigError(
            f"--nodes {args.nodes} was given with {hosts} hosts",
            possible=f"N from 1 to {hosts}, or MIN:MAX with 1 <= MIN <= MAX and MIN at most {hosts}",
            change="correct --nodes, or give more hosts",
        )
    return policy


def _work(args: argparse.Namespace) -> Work:
    from shoal.fleet import Work

    words = TrainWords.of(args.words).without("--nproc", "--nodes", "--rendezvous").resumable()
    missing = [name for name in args.env if name not in os.environ]
    if missing:
        raise ConfigError(
            f"--env {missing[0]} was given, and the environment has no such variable",
            possible="names of variables that are set here",
            change=f"set {missing[0]}, or leave it out",
        )
    return Work(
        words=words.words,
        folder=os.path.abspath(args.folder or "."),
        environment={name: os.environ[name] for name in args.env},
        ranks=args.nproc,
        address=args.address if args.target == "ssh" else "",
        port=args.port,
        logs=str(words.run / "log"),
        grace=words.grace,
    )


def _print_work(args: argparse.Namespace, words: Sequence[str]) -> None:
    names = "".join(f", and {name} of this environment" for name in args.env)
    count = f"{args.nproc} ranks" if args.nproc else "one rank for each GPU, or one"
    print(f"each agent starts {count} with torchrun's variables{names}:")
    print(shlex.join(["python", "-m", "shoal", *words]))
