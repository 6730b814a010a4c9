"""Comparisons of a few milliseconds on ranks, and the faults that are planted into them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from pipeline_faults import PIPELINE_FAULTS

from shoal.data import Loader
from shoal.models import Mixture
from shoal.models.experts import within_capacity
from shoal.models.task import map_tensors
from shoal.parallel import Axis, GradientNorm, Parallel
from shoal.parallel.communication import Striped
from shoal.parallel.context import context
from shoal.parallel.context.positions import POSITIONS
from shoal.parallel.data.replicated import WeightUpdate
from shoal.parallel.expert import expert
from shoal.spec.plan import Plan, SettledPlan
from shoal.testing.check import Comparison, Tolerance, Trial, Verdict
from shoal.testing.check.distributed import trace_under
from shoal.testing.check.forward import ForwardReference
from shoal.testing.check.trace import RankTrace

MEASURED: dict[Any, Any] = {}

SHAPE = {"vocab_size": 64, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": 32}


def make_trial(**changes: Any) -> Trial:
    return Trial(**{"model_options": SHAPE, "sequence": 16, **changes})


def check(plans: list[str], trial: Trial, fault: str = "", detail: str = "") -> list[Verdict | None]:
    """The verdicts on the first rank, of Plans that all have the same fault."""
    with FAULTS[fault](detail) if fault else contextlib.nullcontext(), measured_once():
        comparison = Comparison(trial, torch.device("cpu"))
        return [comparison.check(Plan.parse(plan)) for plan in plans]


@contextlib.contextmanager
def measured_once() -> Iterator[None]:
    """References on one device are kept for later tests, which have the same trials."""
    with contextlib.ExitStack() as stack:
        for kind in (Tolerance, ForwardReference):

            def measure(*args: Any, kind: Any = kind, original: Any = kind.measure) -> Any:
                key = kind, *map(repr, args)
                if key not in MEASURED:
                    MEASURED[key] = original(*args)
                return MEASURED[key]

            stack.enter_context(patch.object(kind, "measure", measure))
        yield


def groups_after_plans(plans: list[str], trial: Trial) -> list[int]:
    """How many process groups there are after each Plan."""
    comparison = Comparison(trial, torch.device("cpu"))
    counts = []
    for plan in plans:
        comparison.check(Plan.parse(plan))
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def trace(plan: str, trial: Trial) -> RankTrace:
    """What this rank sees of the first step."""
    return trace_under(trial, SettledPlan.of(Plan.parse(plan), trial.batch), torch.device("cpu"))


class Nothing:
    def wait(self) -> None:
        pass


@contextlib.contextmanager
def no_reduction(axis: str) -> Iterator[None]:
    """Gradients are not summed over one axis."""
    all_reduce, reduce_scatter = Axis.all_reduce, Striped.reduce_scatter

    def skipping_all_reduce(self: Axis, tensor: torch.Tensor, name: str) -> Any:
        if self.name == axis and name.startswith("bucket"):
            return Nothing()
        return all_reduce(self, tensor, name)

    def skipping_reduce_scatter(self: Striped, buffer: torch.Tensor, name: str) -> Any:
        return Nothing() if self._axis.name == axis else reduce_scatter(self, buffer, name)

    with (
        patch.object(Axis, "all_reduce", skipping_all_reduce),
        patch.object(Striped, "reduce_scatter", skipping_reduce_scatter),
    ):
        yield


@contextlib.contextmanager
def sum_in_place_of_mean(axis: str) -> Iterator[None]:
    """Gradients are summed over one axis, and not divided by its size."""
    all_reduce, reduce_scatter = Axis.all_reduce, Striped.reduce_scatter

    def enlarging_all_reduce(self: Axis, tensor: torch.Tensor, name: str) -> Any:
        if self.name == axis and name.startswith("bucket"):
            tensor.mul_(self.size)
        return all_reduce(self, tensor, name)

    def enlarging_reduce_scatter(self: Striped, buffer: torch.Tensor, name: str) -> Any:
        if self._axis.name == axis:
            buffer.mul_(self._axis.size)
        return reduce_scatter(self, buffer, name)

    with (
        patch.object(Axis, "all_reduce", enlarging_all_reduce),
        patch.object(Striped, "reduce_scatter", enlarging_reduce_scatter),
    ):
        yield


@contextlib.contextmanager
def norm_of_a_shard(_: str) -> Iterator[None]:
    """The squares of the gradient are not summed over the ranks."""
    all_reduce = Axis.all_reduce

    def skipping(self: Axis, tensor: torch.Tensor, name: str) -> Any:
        return Nothing() if name == "gradient norm" else all_reduce(self, tensor, name)

    with patch.object(Axis, "all_reduce", skipping):
        yield


@contextlib.contextmanager
def other_samples(kind: str) -> Iterator[None]:
    """The first sample of each batch is trained on again in place of the last; or the data stands still."""
    indices = Loader.indices

    def wrong(self: Loader, position: int, count: int) -> Any:
        if kind == "stale":
            return indices(self, position % self.batch_size, count)
        found = indices(self, position, count)
        if count < self.batch_size and (position + count) % self.batch_size == 0:
            found[-1] = indices(self, position + count - self.batch_size, 1)[0]
        return found

    with patch.object(Loader, "indices", wrong):
        yield


@contextlib.contextmanager
def stale_weights(_: str) -> Iterator[None]:
    """What the owners' optimizers changed is not gathered."""
    with patch.object(WeightUpdate, "_gather", lambda self: None):
        yield


@contextlib.contextmanager
def a_rank_of_its_own(_: str) -> Iterator[None]:
    """The last rank spoils a part of its gradients after they were averaged."""
    measure_gradient = Parallel.measure_gradient

    def spoiling(self: Parallel) -> GradientNorm:
        norm = measure_gradient(self)
        if dist.get_rank() == dist.get_world_size() - 1:
            for owned in self.owned:
                if owned.name == "blocks.1.feed_forward.up.weight" and owned.gradient is not None:
                    owned.gradient[:1] *= 1.5
        return norm

    with patch.object(Parallel, "measure_gradient", spoiling):
        yield


@contextlib.contextmanager
def a_learning_rate_of_its_own(_: str) -> Iterator[None]:
    """The last rank's optimizer steps half as far."""
    step = torch.optim.AdamW.step

    def halving(self: torch.optim.AdamW, closure: Any = None) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            for group in self.param_groups:
                group["lr"] *= 0.5
        return step(self, closure)

    with patch.object(torch.optim.AdamW, "step", halving):
        yield


@contextlib.contextmanager
def positions_of_another_part(_: str) -> Iterator[None]:
    """Every rank of context parallelism takes its positions for those of the first."""

    def first(part: int, device: torch.device, *, axis: Axis, attention: str) -> torch.Tensor:
        return POSITIONS[attention](part * axis.size, axis.size, 0, device)

    with patch.object(context, "_positions", first):
        yield


@contextlib.contextmanager
def tokens_of_another_part(_: str) -> Iterator[None]:
    """Every rank of context parallelism takes the tokens of the first one's part."""

    def first(self: Parallel, batch: Any) -> Any:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:, POSITIONS[self.plan.context](tensor.shape[1], self.axes.cp.size, 0)]

        return map_tensors(cut, batch)

    with patch.object(Parallel, "local_sequence", first):
        yield


@contextlib.contextmanager
def a_router_of_its_own(_: str) -> Iterator[None]:
    """The routers of the last rank choose other experts than they should, but for the first block's."""
    logits = Mixture._logits

    def turned(self: Mixture, hidden: torch.Tensor) -> torch.Tensor:
        is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
        return logits(self, hidden).roll(int(is_last and not self.is_first), -1)

    call = Parallel.__call__

    def marked(self: Parallel, *inputs: Any) -> Any:
        for index, module in enumerate(each for each in self.module.modules() if isinstance(each, Mixture)):
            module.is_first = index == 0
        return call(self, *inputs)

    with (
        patch.object(Mixture, "_logits", turned),
        patch.object(Mixture, "is_first", True, create=True),
        patch.object(Parallel, "__call__", marked),
    ):
        yield


@contextlib.contextmanager
def choices_of_another_part(_: str) -> Iterator[None]:
    """A capacity counts the choices of this rank's part of a sample as if they were all."""
    with patch.object(expert, "_keep_of_whole_samples", lambda *given, **_: within_capacity(*given)):
        yield


@contextlib.contextmanager
def parts_that_are_not_summed(name: str) -> Iterator[None]:
    """All-reduces of this name are left out, such as that of what a layer's rows give."""
    all_reduce = Axis.all_reduce

    def skipping(self: Axis, tensor: torch.Tensor, called: str) -> Any:
        return Nothing() if called.startswith(name) else all_reduce(self, tensor, called)

    with patch.object(Axis, "all_reduce", skipping):
        yield


FAULTS = {
    function.__name__: function
    for function in (
        no_reduction,
        sum_in_place_of_mean,
        norm_of_a_shard,
        other_samples,
        stale_weights,
        a_rank_of_its_own,
        a_learning_rate_of_its_own,
        positions_of_another_part,
        tokens_of_another_part,
        choices_of_another_part,
        a_router_of_its_own,
        parts_that_are_not_summed,
    )
} | PIPELINE_FAULTS
