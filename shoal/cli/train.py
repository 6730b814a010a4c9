"""Trains a model. Without arguments, it trains a small transformer on the source of Python's standard
library, with one local rank for each core. Under torchrun, srun or accelerate, it runs as one of the ranks
they started.
Two dashes end torchrun's own options: torchrun --nproc-per-node 8 --no-python -- shoal train --run DIR

SIGTERM, SIGUSR1, SIGHUP and Ctrl-C end the run after its step, and save; a second Ctrl-C ends it at once.
Exit codes: 0 all steps done; 1 a rank failed; 2 wrong input; 75 stopped by a signal after the state was saved
(continue with --resume); 130 stopped before the state was saved.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.local import least_and_most, nursery_for, positive_seconds
from shoal.cli.nodes import add_nodes, run_on_hosts
from shoal.errors import ConfigError, PlanError, RunError, WorkerError
from shoal.launch.submit import EXIT_STOPPED
from shoal.scratch import scratch_folder
from shoal.signals import end_early
from shoal.values import encode

if TYPE_CHECKING:
    from shoal.launch.elastic import Elasticity
    from shoal.launch.local import Nursery, World
    from shoal.spec.run import Run
    from shoal.train import Job

_FAILED = (1, 130)  # exit codes after which resuming may help: a rank failed, or was stopped before it saved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("config", metavar="CONFIG.toml", type=Path, nargs="?", help="the configuration")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="settings",
        help="change one key, such as optimizer.learning_rate=1e-3; may be given several times",
    )
    parser.add_argument(
        "--plan", metavar="PLAN", help="a Plan, such as dp=2,shard=zero1, or auto; short for --set plan=PLAN"
    )
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="the machines, a preset or a file of `shoal probe`: --plan auto chooses for them, and "
        "`shoal report` compares with their prediction; short for --set cluster=CLUSTER",
    )
    parser.add_argument(
        "--nproc",
        metavar="N|MIN:MAX",
        help="ranks to start on this machine; with MIN, ranks may fail while MIN are left: the others go on, "
        "and the failed ones are started again",
    )
    parser.add_argument(
        "--restarts",
        metavar="N",
        type=int,
        default=10,
        help="with --nproc MIN:MAX or --nodes: how often failed ranks are started again, in total",
    )
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=positive_seconds,
        help="seconds that the system leaves from SIGTERM or SIGUSR1 to the kill, such as Slurm's --signal "
        "or Kubernetes' grace period; if they do not suffice to save, the command says so and ends before",
    )
    add_nodes(parser)
    parser.add_argument("--run", metavar="DIR", type=Path, dest="directory", help="directory of the new run")
    parser.add_argument(
        "--resume",
        metavar="auto|PATH",
        help="continue a run: its directory, one of its checkpoints, or auto for the run of --run, else for "
        "the newest",
    )
    parser.add_argument(
        "--advice",
        action="store_true",
        help="with --resume: first make the change of `shoal advise` that is predicted to gain most",
    )
    parser.add_argument(
        "--join",
        metavar="RUN",
        type=Path,
        help="add a worker to a run with parameter servers that goes on; it takes the run's configuration",
    )
    parser.add_argument(
        "--profile",
        metavar="FIRST:LAST",
        help="steps that torch.profiler traces into the run's profile/; short for --set "
        "record.profile=FIRST:LAST. SIGUSR2 to this command traces the next five steps",
    )


def run(args: argparse.Namespace) -> int:
    """Train a model.

    Raises:
        UserError: Something given cannot work; nothing was started.
        WorkerError: A rank failed.
    """
    if args.is_program:  # before torch is imported, which takes seconds
        end_early(EXIT_STOPPED)
    from shoal.launch.local import find_world, process_age

    # Where another program runs this one, its age says nothing.
    args.launched = time.time() - (process_age() if _is_program() else 0.0)
    world = None if args.nodes is not None else find_world()  # srun may have started it once on each host
    if world is not None:
        _require_ranks(args.nproc, world.ranks)
        return _as_rank(world, lambda: _checked_job(args, world.ranks), args.grace)
    with nursery_for(args, "shoal.train") as nursery:
        return (_on_this_machine if args.nodes is None else _on_hosts)(args, nursery)


def _on_hosts(args: argparse.Namespace, nursery: Nursery | None) -> int:
    elasticity = _elasticity(args)
    paths: list[Path] = []

    def job_for(ranks: int) -> Job:
        job = _checked_job(args, ranks)
        paths.append(job.path)
        return job

    with _telling_how_to_go_on(paths), _noting_the_end(paths):
        least = None if elasticity is None else elasticity.least
        return run_on_hosts(args, _settings(args), job_for, least, nursery)


def _is_program() -> bool:
    """Return whether this process was started for this command."""
    return Path(sys.argv[0]).parts[-2:] == ("shoal", "__main__.py") or Path(sys.argv[0]).name == "shoal"


def _on_this_machine(args: argparse.Namespace, nursery: Nursery | None) -> int:
    from shoal.launch.local import RankLog, World, choose_device, keep_output
    from shoal.train import check, nothing_left_to_do

    elasticity = _elasticity(args)
    job = _job(args, None)
    if elasticity is not None:
        _require_elastic(job, elasticity)
    if text := nothing_left_to_do(job):
        print(text, file=sys.stderr)
        return 0
    check(job)
    choose_device(job.config.device, 0)
    with _noting_the_end([job.path]):
        if job.processes == 1 and elasticity is None:
            with keep_output(RankLog(job.path / "log", 0, 1)):
                world = World(rank=0, ranks=1, local_rank=0, master=("", 0))
                return _as_rank(world, lambda: job, args.grace)
        return _on_local_ranks(job, nursery, elasticity, args.grace)


def _elasticity(args: argparse.Namespace) -> Elasticity | None:
    """Return how many ranks may be lost, as `--nproc MIN:MAX` says, and leave MAX in its place."""
    from shoal.launch.elastic import Elasticity

    given = args.nproc
    if not given:
        args.nproc = None
        return None
    is_elastic, ranks = ":" in given, least_and_most(given)
    if ranks is None or (is_elastic and not 1 <= ranks[0] <= ranks[1]):
        raise ConfigError(
            f"--nproc {given} is no number of ranks",
            possible="N, or MIN:MAX with 1 <= MIN <= MAX",
            change="write, for example, --nproc 4, or --nproc 2:4",
        )
    args.nproc = ranks[1]
    return Elasticity(ranks[0], args.restarts) if is_elastic else None


def _require_ranks(given: str | None, ranks: int) -> None:
    """Check that --nproc does not ask for other ranks than those that another program started."""
    if given not in (None, str(ranks)):
        raise ConfigError(
            f"--nproc {given} was given to a rank that torchrun, accelerate or srun started, one of {ranks}",
            possible="without --nproc: the ranks are those that were started",
            change="leave --nproc out, or start ranks here: unset RANK and WORLD_SIZE, or, in a shell "
            "that srun started, SLURM_STEP_NUM_TASKS",
        )


def _require_elastic(job: Job, elasticity: Elasticity) -> None:
    """Check that a job can go on with fewer ranks.

    Raises:
        PlanError: Its workers exchange through servers, which have a way of their own.
    """
    if job.is_served:
        raise PlanError(
            f"--nproc {elasticity.least}:{job.processes} was given with the Plan {job.plan}",
            possible="a Plan without parameter servers; with them, workers may be lost and join as it is",
            change="leave MIN out",
        )


def _as_rank(world: World, choose: Callable[[], Job], grace: float | None) -> int:
    """Train as one rank; `run_rank` prints its error, and rank 0 then prints how to resume."""
    from shoal.launch.local import run_rank
    from shoal.train import execute

    chosen: list[Job] = []

    def noted() -> Job:
        chosen.append(choose())
        return chosen[0]

    code = run_rank(world.rank, partial(execute, noted, world), grace=grace, early=EXIT_STOPPED)
    if code in _FAILED and world.rank == 0 and chosen and (text := _how_to_go_on(chosen[0].path)):
        print(text, file=sys.stderr)
    return code


def _on_local_ranks(
    job: Job, nursery: Nursery | None, elasticity: Elasticity | None, grace: float | None
) -> int:
    from shoal.launch.elastic import launch_elastic
    from shoal.launch.local import launch
    from shoal.spec.run import Run, shown
    from shoal.spec.run.writer import require_free
    from shoal.train import FOLDER, memory_folder

    run = Run(job.path)
    require_free(run.checkpoints, f"the run {shown(run.path)}")
    with scratch_folder() as scratch:
        file = scratch / "job"
        file.write_bytes(encode(job))
        command = [sys.executable, "-m", "shoal.train", str(file)]
        with _telling_how_to_go_on([job.path]):
            if elasticity is None:
                return launch(
                    command,
                    job.processes,
                    logs=job.path / "log",
                    events=run.events_file,
                    nursery=nursery,
                    units=job.units,
                    grace=grace,
                )
            with memory_folder() as folder:
                return launch_elastic(
                    command,
                    job.processes,
                    elasticity,
                    {} if folder is None else {FOLDER: str(folder)},
                    timeout=job.config.timeout,
                    logs=job.path / "log",
                    events=run.members_file,
                    nursery=nursery,
                    grace=grace,
                )


@contextlib.contextmanager
def _noting_the_end(runs: Sequence[Path]) -> Iterator[None]:
    """Note in the events of a run that its command ends, unless another process writes the run."""
    from shoal.spec.run import Run, write_event
    from shoal.spec.run.writer import is_written

    try:
        yield
    finally:
        for run in map(Run, runs):
            if run.events_file.exists() and not is_written(run.checkpoints):
                write_event(run.events_file, "ended", reason="the command ends")


@contextlib.contextmanager
def _telling_how_to_go_on(runs: Sequence[Path]) -> Iterator[None]:
    """Add to the failure of a rank how to resume its run."""
    try:
        yield
    except WorkerError as error:
        for run in runs:
            if error.exit_code in _FAILED and (text := _how_to_go_on(run)):
                error.detail = f"{error.detail}\n\n{text}".lstrip()
        raise


def _how_to_go_on(run: Path) -> str:
    """Return a sentence on how to resume a failed run; empty if it has saved nothing."""
    from shoal.checkpoint import checkpoints, step_of
    from shoal.spec.run.directory import resume_command

    saved = checkpoints(run / "checkpoints")
    return f"Step {step_of(saved[0])} is saved; continue with: {resume_command(run)}" if saved else ""


def _checked_job(args: argparse.Namespace, ranks: int) -> Job:
    from shoal.train import check

    job = _job(args, ranks)
    check(job)
    return job


def _joining_job(path: Path) -> Job:
    """Return the job of one more worker of a run with parameter servers."""
    from shoal.spec.plan import Plan, SettledPlan
    from shoal.spec.run import Run, absolute
    from shoal.train import Job, load_config, located

    described = Run.open(path).description
    config = located(load_config(base=described["config"]), described["config"])
    plan = SettledPlan.of(Plan.parse(described["plan"]), config.batch)
    if not plan.exchanged.is_served:
        raise RunError(
            f"--join {path} was given, and its Plan {plan} has no parameter servers",
            possible="a run with exchange=server, or with exchange=local,servers=1",
            change="give such a run, or start a new one",
        )
    return Job(config=config, plan=plan, path=absolute(path), resume=None, joins=True)


def _advised(args: argparse.Namespace, run: Run | None) -> tuple[str, ...]:
    """Return the settings that --advice asks for; empty without it, or if nothing is faster.

    Raises:
        RunError: There is no run to resume, or it has nothing to advise on.
    """
    if not args.advice:
        return ()
    from shoal.cli.advise import advice_on

    if run is None:
        raise RunError(
            "--advice was given, and no run is resumed",
            possible="--resume with a run that recorded its timeline",
            change="add --resume, or leave out --advice",
        )
    best = next((each for each in advice_on(run, args.cluster) if each.settings and not each.is_bound), None)
    if best is None:
        print("advice: nothing is predicted to be faster; the run goes on as it was", file=sys.stderr)
        return ()
    print(f"advice: {best.change} {best.gain:.1%} less time a step are predicted.", file=sys.stderr)
    return best.settings


def _settings(args: argparse.Namespace) -> list[str]:
    """Return the settings that the command line gives, as for `load_config`."""
    named = {"plan": args.plan, "cluster": args.cluster, "record.profile": args.profile}
    return [*args.settings, *(f'{key}="{value}"' for key, value in named.items() if value is not None)]


def _job(args: argparse.Namespace, ranks: int | None) -> Job:
    """Return the job of the command line, for the ranks that are there; None if ranks must be started."""
    from shoal.train import (
        Job,
        choose_path,
        choose_ranks,
        find_resume,
        load_config,
        located,
        resolve,
        servers_of,
        with_classes,
    )

    if args.join is not None:
        return _joining_job(args.join)
    resume = find_resume(args.resume, args.directory)
    before = resume.run.description if resume is not None else {}
    advised = _advised(args, None if resume is None else resume.run)
    settings = [*advised, *_settings(args)]
    config = located(load_config(args.config, settings, before.get("config")), before.get("config"))
    config = with_classes(config)
    if ranks is None:
        as_before = before.get("world_size") if config.plan == before.get("config", {}).get("plan") else None
        ranks = choose_ranks(config, args.nproc if args.nproc is not None else as_before)
    else:
        ranks -= servers_of(config)
    resolved = resolve(config, ranks, None if resume is None else resume.run)
    return Job(
        config=config,
        plan=resolved.plan,
        path=choose_path(args.directory, resume, config),
        resume=resume,
        cluster=resolved.cluster,
        passed_over=resolved.passed_over,
        launched=args.launched,
    )
