"""`plan = "auto"`: choose the planner's Plan for this model on these ranks."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from shoal.errors import ConfigError, ModelError, UserError
from shoal.models import Transformer, next_token_loss
from shoal.parallel import require_layout
from shoal.parallel.device import available_memory
from shoal.predict.cost import settle_split
from shoal.predict.cost.time import workload_on
from shoal.predict.planner import choose
from shoal.signals import withheld_from_children
from shoal.spec.cluster import Cluster, limited
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.workload import Workload, transformer_shape, with_adapters
from shoal.trace import trace
from shoal.train.absolute_paths import build_model, shape_of
from shoal.train.classes import require_data_parallel
from shoal.train.config import TrainConfig
from shoal.train.optimizer import needs_whole_parameters

AUTOMATIC_MEMORY = "auto"
"""The word in a configuration that stands for what is free."""

PROCESS_BYTES = 320 << 20
"""Bytes of a rank's Python and libraries on a CPU, which are no tensors."""

_FREE_ON_GPUS = """
import sys, torch
print(*(torch.cuda.mem_get_info(each)[0] for each in range(torch.cuda.device_count())), flush=True)
sys.stdin.read()
"""
"""Prints the bytes of each GPU that are free while it has a context there, and ends with its input."""


def within_memory(config: TrainConfig, cluster: Cluster, ranks: int) -> Cluster:
    """Return the Cluster whose devices have the memory that a configuration allows.

    With `memory = "auto"` it is what is free now, divided among the ranks of this host: on CPUs within the
    control group, less PROCESS_BYTES for each rank; on GPUs what the fullest GPU has left, less what a
    context takes for each rank beyond what the Cluster reserves for it. Other hosts count as this one.

    Args:
        config: The configuration.
        cluster: The machines.
        ranks: Number of ranks.

    Raises:
        ConfigError: The limit cannot be read, or is "auto" and this system does not say what is free.
        ClusterError: It is less than contexts and libraries take.
    """
    if config.memory != AUTOMATIC_MEMORY:
        return limited(cluster, config.memory)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if cluster.cores or config.device == "cpu":
        free = _free_on_cpu(here)
    else:
        free = _free_on_gpus(here, int(cluster.reserved))
    if free is None or free <= 0:
        raise ConfigError(
            f"memory={AUTOMATIC_MEMORY} was given, and this host "
            + ("does not say how much memory is free" if free is None else "has no memory left for a rank"),
            possible="a size such as 20GiB",
            change="set memory to a size, or leave it out",
        )
    return cluster.with_each_device(lambda device: replace(device, memory=float(free)))


def _free_on_cpu(ranks: int) -> int | None:
    free = available_memory()
    return None if free is None else free // ranks - PROCESS_BYTES


def _free_on_gpus(ranks: int, reserved: int) -> int | None:
    """Return the bytes that each rank has on a GPU, with those that the Cluster reserves for its context.

    Other processes ask, because the question makes a context on each GPU. While the second one asks there are
    two contexts, and while the first one asks there is one: the difference is the size of a context.
    """
    with _asking() as first:
        with_one = _answer_of(first)
        with _asking() as second:
            with_two = _answer_of(second)
    if not with_one or len(with_one) != len(with_two):
        return None
    sharing = -(-ranks // len(with_one))
    return min(map(partial(_of_a_rank, sharing, reserved), with_one, with_two))


def _asking() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _FREE_ON_GPUS]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with withheld_from_children():
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True)


def _answer_of(asked: subprocess.Popen[str]) -> list[int]:
    assert asked.stdout is not None
    return [int(each) for each in asked.stdout.readline().split()]


def _of_a_rank(sharing: int, reserved: int, with_one: int, with_two: int) -> int:
    """Return the bytes of each rank on a GPU, from what is free there with one context and with two."""
    context = max(0, with_one - with_two)
    return (with_one + context) // sharing - max(0, context - reserved)


AUTOMATIC = "auto"
"""The word in a configuration that stands for the planner's choice of a Plan."""

_LOOKED_AT = 20  # degrees; the first that fits the model is taken

_GPU = "cuda"

_CHILD = """
import os, pickle, sys
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what the model prints is no answer
sys.path[:], asked = pickle.load(sys.stdin.buffer)
answer, *arguments = pickle.loads(asked)
pickle.dump(answer(*arguments), answers)
answers.close()
"""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A Plan that was predicted to be quicker than the chosen one, and the reason why it was not chosen."""

    plan: Plan
    reason: str

    def __str__(self) -> str:
        return f"{self.plan}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The Plan and the Cluster with which a configuration is trained.

    Attributes:
        plan: The Plan, with all its degrees and its micro-batch fixed.
        cluster: The machines, with as many devices as the Plan has ranks; None if nothing names them.
        passed_over: If the Plan was chosen, the Plans before it in the ranking.
    """

    plan: Plan
    cluster: Cluster | None = None
    passed_over: tuple[PassedOver, ...] = ()


def choose_plan(
    config: TrainConfig, ranks: int, cluster: Cluster | None, precision: str | None = None
) -> Resolved:
    """Return the best Plan for the configuration's model, batch and sequences.

    Args:
        config: The configuration.
        ranks: Number of ranks.
        cluster: The machines; None for this host: its GPUs if these are known, or a laptop.
        precision: The precision of the Plan; None for the quickest type of 16 bits or more.

    Raises:
        ConfigError: The model's work cannot be traced, or the limit of memory cannot be read.
        ClusterError: The host's GPUs are unknown.
        PlanError: No Plan for this many ranks is legal, or none fits.
    """
    found, model, workload = machines_and_work(config, ranks, cluster)
    machines = within_memory(config, found, ranks)
    may_offload = not needs_whole_parameters(config.optimizer)
    choice = choose(
        workload, machines, config.batch, limit=_LOOKED_AT, precision=precision, may_offload=may_offload
    )
    passed_over = []
    for candidate in choice.candidates:
        try:
            require_data_parallel(config, candidate.plan)
            require_layout(model, candidate.plan, config.sequence)
        except UserError as error:
            passed_over.append(PassedOver(candidate.plan, error.given))
        else:
            return Resolved(candidate.plan, found, tuple(passed_over))
    plain = SettledPlan.of(Plan(dp=ranks, precision=precision or "fp32"), config.batch)
    return Resolved(plain, found, tuple(passed_over))


def settled_stages(config: TrainConfig, plan: SettledPlan, cluster: Cluster) -> SettledPlan:
    """Return the Plan with the numbers of blocks that a split by cost means on a cluster.

    A model whose work cannot be traced is split when it is laid over ranks, by its parameters.

    Args:
        config: The configuration.
        plan: Its Plan.
        cluster: The machines.

    Raises:
        ConfigError: The limit of memory cannot be read.
        PlanError: The model has fewer blocks than there are stages.
    """
    if plan.pp == 1 or plan.split != "cost":
        return plan
    machines = within_memory(config, cluster, plan.ranks)
    try:
        workload = workload_of_config(config, shape_of(config), machines)
    except UserError:
        return plan
    return settle_split(plan, workload, machines, config.batch)


def machines_and_work(
    config: TrainConfig, ranks: int, cluster: Cluster | None
) -> tuple[Cluster, nn.Module, Workload]:
    """Return what predictions need: the machines, or this host if none are given; the model; and its work.

    Raises:
        ConfigError: The model's work cannot be traced.
        ClusterError: The host's GPUs are unknown.
    """
    machines = this_host(config, ranks) if cluster is None else cluster
    model = build_model(config, "meta" if ":" not in config.model else "cpu")
    return machines, model, workload_of_config(config, model, machines)


def workload_of_config(config: TrainConfig, model: nn.Module, cluster: Cluster) -> Workload:
    """Return the workload of the model: a Shoal transformer's from its shape, any other's from a trace.

    The trace uses the precision of Plans for the cluster: the one in which the device is fastest. For a GPU
    another process traces, unless this one is a rank and has a context there: to trace makes one, which would
    take half a gigabyte from the ranks until this process ends.
    """
    if isinstance(model, Transformer):
        shape = transformer_shape(model.config.model_dump(), config.model).replace(seq=config.sequence)
        workload, lora = workload_on(cluster, shape), config.lora
        return (
            workload if lora.rank is None else with_adapters(workload, lora.rank, lora.targets, lora.dropout)
        )
    on_gpu = torch.cuda.is_available() and not cluster.cores
    if on_gpu and not _has_context():
        return _traced_apart(config, cluster)
    return _traced(config, model, cluster, _GPU if on_gpu else "cpu")


def _traced(config: TrainConfig, model: nn.Module, cluster: Cluster, device: str) -> Workload:
    tokens = torch.zeros(1, config.sequence, dtype=torch.long)
    targets = tokens[:, 0] if config.data.label else tokens
    try:
        return trace(
            model.train(),
            tokens,
            lambda output: next_token_loss(output, targets),
            precision=max(("fp32", "bf16"), key=lambda name: cluster.device.peak.get(name, 0.0)),
            device=device,
        )
    except ModelError as error:
        raise _untraceable(config, error.given, error.possible) from error


def _traced_apart(config: TrainConfig, cluster: Cluster) -> Workload:
    """Trace the configuration's model in another process, which has the modules of this one."""
    asked = pickle.dumps((sys.path, pickle.dumps((_answer, config, cluster, _GPU))))
    with withheld_from_children():
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    with child:
        try:
            told, _ = child.communicate(asked)
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        why = f"the process that traced it ended with {child.returncode}"
        raise _untraceable(config, why, "another one")
    answer: Workload | UserError = pickle.loads(told)
    if isinstance(answer, UserError):
        raise answer
    return answer


def _answer(config: TrainConfig, cluster: Cluster, device: str) -> Workload | UserError:
    try:
        return _traced(config, build_model(config, "cpu"), cluster, device)
    except UserError as error:
        return error


def _has_context() -> bool:
    """Return whether this process has a context on its current GPU."""
    has: Callable[[int], bool] | None = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return has is not None and torch.cuda.is_initialized() and has(torch.cuda.current_device())


def _untraceable(config: TrainConfig, why: str, possible: str) -> ConfigError:
    return ConfigError(
        f'plan = "{AUTOMATIC}" was given, and {config.model} could not be traced: {why}',
        possible=f"a model that can be traced: {possible}",
        change="choose a Plan, such as dp=2,shard=zero1",
    )


def this_host(config: TrainConfig, ranks: int) -> Cluster:
    """Return this host's GPUs, if these are known, or a laptop with its cores, as a Cluster of so many ranks.

    Raises:
        ClusterError: The GPUs are unknown.
    """
    if config.device != "cpu" and torch.cuda.is_available():
        node = min(ranks, torch.cuda.device_count())
        return Cluster.assemble(torch.cuda.get_device_name(), ranks, node, None)
    cores = len(os.sched_getaffinity(0))
    return Cluster.preset("laptop").with_cores(cores).with_devices(ranks)
