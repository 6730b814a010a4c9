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
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.launched_train import TrainWords, add_words
from shoal.cli.local import least_and_most, positive_seconds, positive_whole, whole
from shoal.errors import ConfigError
from shoal.launch.submit import FORMS, Container, KubernetesJob, SlurmJob, submit

if TYPE_CHECKING:
    from shoal.launch.fleet import Policy, Work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the targets."""
    targets = parser.add_subparsers(dest="target", metavar="TARGET", required=True)
    _add_local(targets)
    _add_ssh(targets)
    _add_ray(targets)
    add_slurm(targets)
    add_kubernetes(targets)
    _add_container(targets)
    add_node(targets)


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
    from shoal.launch.fleet import (
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
    from shoal.launch.fleet import RayCluster, train_on

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
    from shoal.launch.fleet import Policy

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
    from shoal.launch.fleet import Work

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


def add_kubernetes(targets: argparse._SubParsersAction) -> None:
    """Add the target to `shoal launch`."""
    parser = targets.add_parser(
        "kubernetes",
        help="as manifests of Kubernetes, which this prints",
        description="Prints manifests: ... | kubectl apply -f -. A pod is a host. SIGTERM, as on eviction, "
        "makes the ranks save, and the pods are made again; after a failure too, --restarts times.",
    )
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="jobset",
        help="JobSet, Indexed Job with a headless Service, or TrainJob of Kubeflow; by default a JobSet",
    )
    parser.add_argument("--image", metavar="IMAGE", required=True, help="an image with Shoal")
    parser.add_argument("--name", metavar="NAME", default="shoal", help="name of the job")
    parser.add_argument("--nodes", metavar="N", type=positive_whole, default=1, help="pods")
    parser.add_argument("--nproc", metavar="N", type=positive_whole, default=1, help="ranks in each pod")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each rank")
    parser.add_argument(
        "--grace", metavar="SECONDS", type=positive_whole, default=120, help="from SIGTERM to the kill"
    )
    parser.add_argument(
        "--restarts", metavar="N", type=whole, default=3, help="how often it is started again after a failure"
    )
    parser.add_argument("--port", metavar="PORT", type=int, default=29500, help="where the ranks meet")
    parser.add_argument("--folder", metavar="DIR", default="/work", help="working directory")
    parser.add_argument(
        "--claim",
        metavar="NAME=DIR",
        action="append",
        default=[],
        help="mount a PersistentVolumeClaim there, for the run's directory; all pods write to it",
    )
    parser.add_argument(
        "--secret",
        metavar="NAME",
        action="append",
        default=[],
        help="a Secret whose entries become variables",
    )
    parser.add_argument(
        "--request",
        metavar="RESOURCE=AMOUNT",
        action="append",
        default=[],
        help="a resource of each pod, such as cpu=8 or memory=64Gi",
    )
    parser.add_argument(
        "--runtime", metavar="NAME", default="torch-distributed", help="ClusterTrainingRuntime of a TrainJob"
    )
    add_words(parser)
    parser.set_defaults(run=_run_kubernetes)


def _run_kubernetes(args: argparse.Namespace) -> int:
    claims, requests = (dict(map(_pair, given)) for given in (args.claim, args.request))
    if args.form == "trainjob" and (claims or args.secret):
        raise ConfigError(
            "--claim or --secret was given with --form trainjob",
            possible="volumes and secrets in the ClusterTrainingRuntime, or --form jobset",
            change="leave them out, or choose another form",
        )
    words = TrainWords.of(args.words).without("--nproc", "--nodes", "--rendezvous", "--grace").resumable()
    job = KubernetesJob(
        words=words.with_grace(args.grace).words,
        name=args.name,
        image=args.image,
        nodes=args.nodes,
        ranks=args.nproc,
        gpus=args.gpus,
        grace=args.grace,
        restarts=args.restarts,
        port=args.port,
        folder=args.folder,
        claims=claims,
        secrets=args.secret,
        requests=requests,
        runtime=args.runtime,
    )
    print(job.text(args.form), end="")
    return 0


def _pair(given: str) -> tuple[str, str]:
    name, _, value = given.partition("=")
    if not name or not value:
        raise ConfigError(
            f"{given} has no value",
            possible="NAME=VALUE, such as memory=64Gi",
            change="write the name with its value",
        )
    return name, value


def add_node(targets: argparse._SubParsersAction) -> None:
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
    parser.set_defaults(run=_run_node)


def _run_node(args: argparse.Namespace) -> int:
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
    from shoal.launch.hosts import ranks_here
    from shoal.launch.local import launch_on_node, open_nursery, open_store

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


def add_slurm(targets: argparse._SubParsersAction) -> None:
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
    parser.set_defaults(run=_run_slurm)


def _run_slurm(args: argparse.Namespace) -> int:
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
