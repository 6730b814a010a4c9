"""A job: a configuration and its run, with the checks that are made before any rank starts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint import SingleProcess, Store, checkpoints, newest_verified, step_of
from shoal.data import AnyCorpus
from shoal.errors import CheckpointError, ConfigError, ModelError, RunError
from shoal.models import Transformer
from shoal.parallel import require_documents, require_layout, require_trainable
from shoal.predict.simulate import recorded_cluster
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan, parse_settings
from shoal.spec.run import Run, absolute, default_path, is_free, shown
from shoal.spec.run.directory import resume_command
from shoal.train.absolute_paths import shape_of
from shoal.train.auto_plan import AUTOMATIC, PassedOver, Resolved, choose_plan, settled_stages
from shoal.train.classes import prepared, require_classes, require_data_parallel
from shoal.train.config import OptimizerConfig, TrainConfig
from shoal.train.init_from import require_weights
from shoal.train.optimizer import require_elementwise, require_factories
from shoal.units import format_bytes

_FP32 = 4  # bytes
_STATES = {"adamw": 2, "lion": 1}


def offload_folder(config: TrainConfig, run: Path) -> Path:
    """Return the folder of offloaded state: the configured one, or the run's directory."""
    return Path(config.offload_folder) if config.offload_folder else run


def require_offload(config: TrainConfig, plan: Plan, run: Path, model: nn.Module) -> None:
    """Refuse an optimizer or a folder that a Plan's `offload` cannot use; nothing is written.

    Args:
        config: The configuration.
        plan: The Plan.
        run: The run's directory, which need not exist yet.
        model: The model, maybe without values.

    Raises:
        ConfigError: The optimizer needs whole parameters, or the folder is no folder, may not be written, or
            has less space left than the state takes.
    """
    if not plan.tiers.has_files:
        return
    if plan.tiers.optimizer != "device":
        require_elementwise(config.optimizer, plan.offload)
    folder = offload_folder(config, run).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    needed, free = _bytes_here(config.optimizer, plan, model), os.statvfs(there)
    left = free.f_bavail * free.f_frsize
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "which is not a folder" if not there.is_dir() else "where this user may not write"
    elif left < needed:
        reason = f"with {format_bytes(left)} left, and the state takes {format_bytes(needed)} on this host"
    else:
        return
    raise ConfigError(
        f"offload={plan.offload} was given with files in {folder}, {reason}",
        possible="a folder with enough space in which this user may write, best on a fast local disk",
        change="set offload_folder to such a folder",
    )


def _bytes_here(optimizer: OptimizerConfig, plan: Plan, model: nn.Module) -> int:
    """Return a lower bound on the bytes of the files of all ranks on this host."""
    elements = sum(each.numel() for each in model.parameters() if each.requires_grad)
    moved = plan.tiers.moved
    states = _STATES.get(optimizer.name, int("momentum" in optimizer.options))
    arrays = states * ("optimizer" in moved) + ("gradients" in moved) + ("parameters" in moved)
    shards = plan.shards * plan.cp if plan.sharding.cuts_optimizer else 1
    of_rank = _FP32 * arrays * elements // (shards * plan.tp * plan.pp)
    return of_rank * int(os.environ.get("LOCAL_WORLD_SIZE", plan.ranks))


@dataclass(frozen=True, slots=True)
class Resume:
    """The saved state from which a run continues.

    Attributes:
        run: The run that saved it: the one that goes on, or the one that a new run begins from.
        checkpoint: The named checkpoint; None for the newest sound one, if the run has any.
    """

    run: Run
    checkpoint: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The description of a run that every rank receives.

    Attributes:
        config: The configuration as it was given.
        plan: The configuration's Plan, resolved for the ranks and the batch.
        path: The run's directory, absolute, since a model's code may change the working directory.
        resume: The state from which it continues; None for a run that begins anew.
        cluster: The machines for its predictions; None if nothing names them.
        passed_over: Plans that would have been quicker, but cannot be trained.
        joins: Whether this is another worker of a run that goes on.
        launched: When the command that makes the job began, in seconds since the epoch.
    """

    config: TrainConfig
    plan: Plan
    path: Path
    resume: Resume | None
    cluster: Cluster | None = None
    passed_over: tuple[PassedOver, ...] = ()
    joins: bool = False
    launched: float = field(default_factory=time.time)

    @property
    def goes_on(self) -> bool:
        """Whether the run existed before."""
        return self.joins or (self.resume is not None and self.resume.run.path == self.path)

    @property
    def processes(self) -> int:
        """Number of processes to start: ranks and parameter servers, or the ranks of a worker that joins."""
        return self.plan.of_worker().ranks if self.joins else self.plan.processes

    @property
    def units(self) -> list[range]:
        """The ranks of each worker, if servers join workers, of which some may be lost; else empty."""
        if not self.is_served:
            return []
        size = self.plan.of_worker().ranks
        ranks = size if self.joins else self.plan.ranks
        return [range(first, first + size) for first in range(0, ranks, size)]

    @property
    def is_served(self) -> bool:
        """Whether workers exchange through parameter servers."""
        return self.plan.exchanged.is_served


def choose_ranks(config: TrainConfig, asked: int | None) -> int:
    """Return the number of ranks to start on this machine.

    It is the number asked for; otherwise the number that a Plan with `dp` needs; otherwise one for each GPU,
    or for each core, but no more than can share the batch evenly.

    Raises:
        ConfigError: `asked` is less than 1.
        PlanError: The configuration's Plan is wrong.
    """
    if asked is not None:
        if asked < 1:
            raise ConfigError(
                f"--nproc {asked} is not a number of ranks",
                possible="1 or more",
                change="leave it out to start one rank for each core",
            )
        return asked
    settings = {} if config.plan == AUTOMATIC else parse_settings(config.plan)
    if "dp" in settings:
        return Plan(**settings).ranks
    others = _ranks_beside_dp(settings)
    replicas = max(1, settings.get("replicate", 1))
    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    most = (gpus or len(os.sched_getaffinity(0))) // others
    fitting = (dp for dp in range(most, 0, -1) if dp % replicas == 0 and config.batch % dp == 0)
    return next(fitting, replicas) * others


def servers_of(config: TrainConfig) -> int:
    """Return the number of parameter servers that the configuration's Plan has."""
    settings = {} if config.plan == AUTOMATIC else parse_settings(config.plan)
    named = {name: settings[name] for name in ("exchange", "servers") if name in settings}
    return Plan(**named).exchanged.processes


def resolve(config: TrainConfig, ranks: int, before: Run | None = None) -> Resolved:
    """Return the configuration's Plan and Cluster for this many ranks.

    Args:
        config: The configuration.
        ranks: Number of ranks.
        before: The run that goes on. If its configuration named the same cluster, the description that it
            recorded is used, and the cluster's file need not exist any more.

    Raises:
        PlanError: The Plan does not fit the ranks or the batch, or no Plan that fits can be chosen.
        ClusterError: The cluster is unknown, or cannot have this many devices.
        UserError: A Plan must be chosen, and the model's work is not known.
    """
    cluster = _cluster_of(config, before)
    if cluster is not None and cluster.devices != ranks:
        cluster = cluster.with_devices(ranks)
    if config.plan == AUTOMATIC:
        return choose_plan(config, ranks, cluster)
    plan = _named_plan(config, ranks)
    return Resolved(plan if cluster is None else settled_stages(config, plan, cluster), cluster)


def _cluster_of(config: TrainConfig, before: Run | None) -> Cluster | None:
    if before is not None and before.description.get("config", {}).get("cluster") == config.cluster:
        recorded = recorded_cluster(before)
        if recorded is not None:
            return recorded
    return Cluster.parse(config.cluster) if config.cluster else None


def _named_plan(config: TrainConfig, ranks: int) -> SettledPlan:
    settings = parse_settings(config.plan)
    if "dp" not in settings:
        settings["dp"] = max(1, ranks // _ranks_beside_dp(settings))
    plan = Plan(**settings)
    plan.require_ranks(ranks)
    return SettledPlan.of(plan, config.batch)


def _ranks_beside_dp(settings: Mapping[str, Any]) -> int:
    """Return the product of the other degrees of a Plan."""
    return Plan(**{degree: settings[degree] for degree in ("tp", "pp", "cp") if degree in settings}).ranks


def find_resume(given: str | None, directory: Path | None) -> Resume | None:
    """Return the state from which a run is to go on.

    Args:
        given: None for nothing; "auto" for the run in `directory`, or the newest in `runs/`, if there is one;
            otherwise the path of a run or of one of its checkpoints.
        directory: The directory that was asked for, if one was.

    Raises:
        RunError: The path is neither a run nor a checkpoint.
    """
    if given is None:
        return None
    if given == "auto":
        if directory is None:
            newest = Run.newest(absolute(Path("runs")))
            return None if newest is None else Resume(newest, None)
        directory = absolute(directory)
        return Resume(Run.open(directory), None) if (directory / "run.json").is_file() else None
    path = absolute(Path(given))
    if (path / "run.json").is_file():
        return Resume(Run.open(path), None)
    if (path / "manifest.json").is_file():
        return Resume(Run.open(path.parent.parent), path)
    raise RunError(
        f"--resume {given} is neither a run nor a checkpoint",
        possible="auto, a run's directory, or a checkpoint such as runs/NAME/checkpoints/step-00000100",
        change="correct the path",
    )


def choose_path(directory: Path | None, resume: Resume | None, config: TrainConfig) -> Path:
    """Return the run's absolute directory: of the run that goes on, or a new one, maybe from a checkpoint.

    Raises:
        RunError: A new run's directory exists already; or the run would go on from a checkpoint that is not
            its newest, and so have two futures.
    """
    if resume is not None and (directory is None or directory.resolve() == resume.run.path.resolve()):
        newest = checkpoints(resume.run.checkpoints)[:1]
        if resume.checkpoint is not None and resume.checkpoint.name != newest[0].name:
            raise RunError(
                f"{resume.checkpoint.name} is not the newest checkpoint of {shown(resume.run.path)}: "
                f"{newest[0].name} is",
                possible="a run goes on from its newest checkpoint; a new run may begin from any",
                change="add --run with a new directory, or resume the run itself",
            )
        return resume.run.path
    given = directory if directory is not None else default_path("runs", Path(config.model).name)
    path = absolute(given)
    if not is_free(path):
        raise RunError(
            f"{given} exists already, and a run is never overwritten",
            possible="a path that does not exist yet, or an empty directory",
            change=f"give another --run, or resume the run that is there: --resume {given}",
        )
    return path


def nothing_left_to_do(job: Job) -> str:
    """Return a message if the run has made all its steps; empty if something is left: steps, or a validation.

    Reads the checkpoint in full: a corrupt one does not count, and its steps are made again.
    """
    if job.resume is None or not job.goes_on:
        return ""
    last = newest_verified(_saved_at_the_end(job, job.resume), SingleProcess(), lambda text: None)
    if last is None:
        return ""
    made, asked = step_of(last), job.config.steps
    if made == asked and not job.is_served and not _is_validated(job.resume.run, made):
        return ""  # a signal has stopped the last validation
    return (
        f"{shown(job.path)} is complete: {made} of {asked} steps are made, and {last.name} is sound; nothing "
        f"was started. To train longer: {resume_command(job.path)} --set steps=N, with N above {made}"
    )


def _is_validated(run: Run, step: int) -> bool:
    """Return whether a run was validated after a step, as far as is known."""
    values = run.metrics()
    return not values or any(each["step"] == step and "validation_loss" in each for each in values)


def _saved_at_the_end(job: Job, resume: Resume) -> list[Path]:
    """Return the checkpoints that a job may load and that leave it no steps to make, newest first."""
    found = checkpoints(resume.run.checkpoints) if resume.checkpoint is None else [resume.checkpoint]
    return [path for path in found if step_of(path) >= job.config.steps]


def _require_steps_to_make(job: Job) -> None:
    """Refuse a new run that begins at its end."""
    if job.resume is not None and not job.goes_on and (found := _saved_at_the_end(job, job.resume)):
        made = step_of(found[0])
        raise ConfigError(
            f"{found[0]} has made {made} steps, and steps={job.config.steps} leaves no step to make",
            possible="steps counts from the beginning, and includes the steps of the checkpoint",
            change=f"set steps to more than {made}, or begin from an earlier checkpoint",
        )


def check(job: Job) -> AnyCorpus:
    """Refuse what would fail in the ranks: data, model, or both together; return the prepared data.

    Raises:
        UserError: Some part cannot work.
    """
    config = job.config
    _require_steps_to_make(job)
    require_data_parallel(config, job.plan)
    corpus = prepared(config)
    for split in ("train", "validation"):
        corpus.samples(split, config.sequence)
    config.record.destinations().check()
    if config.checkpoint.store:
        store = Store(config.checkpoint.store)
        with contextlib.suppress(CheckpointError):  # a store that cannot be read now may take copies later
            store.require_free_for(job.path if job.goes_on else None)
    model = shape_of(config)
    require_classes(config, model)
    require_trainable(model)
    if config.init and (job.resume is None or not checkpoints(job.resume.run.checkpoints)):
        require_weights(config.init, model)
    require_factories(config.optimizer)
    require_layout(model, job.plan, config.sequence)
    require_offload(config, job.plan, job.path, model)
    if config.data.boundaries:
        require_documents(model, config.sequence)
    if isinstance(model, Transformer):
        _require_fit(config, corpus, model.config.vocab_size, model.config.seq, "seq")
    elif config.model.startswith("hf:"):
        shape: Any = model.config
        context = getattr(shape, "max_position_embeddings", None)  # some have no limit
        _require_fit(config, corpus, shape.vocab_size, context, "max_position_embeddings")
    return corpus


def _require_fit(
    config: TrainConfig, corpus: AnyCorpus, vocabulary: int, context: int | None, option: str
) -> None:
    """Refuse tokens and sequences that the model does not take; its `option` sets the context."""
    if corpus.tokenizer.vocab_size > vocabulary:
        raise ModelError(
            f"the model {config.model} has a vocabulary of {vocabulary}, and the tokenizer "
            f"{corpus.tokenizer.name} gives {corpus.tokenizer.vocab_size} different tokens",
            possible="a vocabulary at least as large as the tokenizer's",
            change=f"set model_options.vocab_size={corpus.tokenizer.vocab_size}",
        )
    if context is not None and config.sequence > context:
        raise ModelError(
            f"sequence={config.sequence} is longer than the context of the model {config.model}",
            possible=f"up to {context} tokens",
            change=f"set sequence={context}, or model_options.{option}={config.sequence}",
        )
