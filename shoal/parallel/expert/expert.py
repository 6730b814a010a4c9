"""Expert parallelism: each rank of an axis keeps a part of every block's experts (GShard: arXiv:2006.16668).

Rank i of an axis of size n keeps experts `[i * experts / n, (i + 1) * experts / n)`. Its tokens are its own,
as in data parallelism. In every forward an all-to-all takes the rows of its tokens' choices to the ranks that
keep the experts, which multiply them, and a second one brings the results back; backward runs this pair in
reverse. The sum over a token's choices is computed on the token's rank, in the order it has on one device.

The number of rows per destination varies, and only the sending rank knows it, so counts are sent first. The
host needs them, because lengths are arguments of the collective. A layer's choices depend on the results of
the layers before it: the host waits for its device once in every layer, and cannot wait once for all of them.

The router is replicated. A sample's tokens may lie on several ranks (context parallelism, or the sequence
parallelism of tensor parallelism). Then its choices are counted over these ranks, for the balance loss and
for a capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.errors import ModelError, PlanError
from shoal.models import Mixture, mixtures_of
from shoal.models.experts import run_experts, within_capacity
from shoal.models.grouped_matmul import HostCopy, Multiply, Runs, multiply_by_experts
from shoal.models.once_differentiable import once_differentiable
from shoal.parallel.communication import Axis, new_buffer
from shoal.parallel.local_shards import Cut
from shoal.spec.plan import divisors

Positions = Callable[[int, torch.device], Tensor]
"""From a number of local positions and a device, gives their places in the sample, `[seq]`, int64."""


def expert_parallel(
    model: nn.Module, axis: Axis, sequence_axis: Axis | None = None, positions: Positions | None = None
) -> None:
    """Make every `Mixture` of a model give its rows to experts on all ranks of an axis.

    The caller cuts the parameters: at each forward `gate`, `up` and `down` of a `Mixture` hold only the
    experts of this rank, as `cut_experts` says. All ranks of the axes run the same forwards in the same
    order.

    The experts' gradients are means over the computation of all ranks of the axis, each from the loss of its
    own tokens. So a term of the loss on the experts' weights themselves, such as a penalty, keeps its factor.

    Args:
        model: A model with at least one `Mixture`, or any if the axis has one rank.
        axis: The ranks that together keep all experts; of size 1 if each keeps all.
        sequence_axis: The ranks that hold parts, of equal length, of the same samples; None if each holds
            whole samples.
        positions: Positions of this rank's part of a sample; by default the i-th part is rank i's.

    Raises:
        ModelError: The axis has several ranks, and the model has no `Mixture`.
        PlanError: The axis does not divide the number of experts.
    """
    require_experts(model, axis.size)
    for mixture in mixtures_of(model):
        if axis.size > 1:
            mixture.arrange = partial(ExchangedRuns, axis=axis)
            mixture.compute = partial(exchange_with_experts, axis=axis)
        if sequence_axis is not None and sequence_axis.size > 1:
            mixture.share_statistics = partial(_sum_counts, axis=sequence_axis)
            mixture.keep = partial(
                _keep_of_whole_samples, axis=sequence_axis, positions=positions or _in_order(sequence_axis)
            )


def require_experts(model: nn.Module, size: int) -> None:
    """Check that a model's experts can be laid over this many ranks.

    Raises:
        ModelError: The model has no `Mixture`.
        PlanError: The experts do not divide over the ranks.
    """
    mixtures = mixtures_of(model)
    if not mixtures and size > 1:
        raise ModelError(
            f"{type(model).__name__} has no experts to divide over {size} ranks",
            possible="a model with shoal.models.Mixture layers, such as the preset tiny-experts",
            change="leave out ep, or give the model experts",
        )
    for mixture in mixtures:
        if mixture.experts % size:
            raise PlanError(
                f"{mixture.experts} experts do not divide over ep={size} ranks",
                possible=f"ep of {', '.join(map(str, divisors(mixture.experts)))}",
                change="change ep, or the model's `experts`",
            )


def cut_experts(model: nn.Module, axis: Axis) -> dict[str, Cut]:
    """Return this rank's block of every expert parameter, by name; the experts must divide evenly."""
    cuts = {}
    for name, module in model.named_modules():
        if not isinstance(module, Mixture):
            continue
        held = module.experts // axis.size
        for kind in ("gate", "up", "down"):
            shape = tuple(getattr(module, kind).shape)
            cuts[f"{name}.{kind}"] = Cut(shape, 0, axis.index * held, held)
    return cuts


@final
class ExchangedRuns(Runs):
    """How many of this rank's rows go to each expert of any rank, and how many rows come to its own experts.

    Args:
        counts: Number of this rank's rows for each expert, `[experts]`, int64.
        axis: The ranks that together keep all experts.

    Attributes:
        arriving: Number of rows that come from each rank for each of this rank's experts,
            `[ranks, experts / ranks]`.
    """

    def __init__(self, counts: Tensor, axis: Axis) -> None:
        super().__init__(counts, lambda: [count for counts in self.on_host[0] for count in counts])
        arriving = torch.empty_like(counts)
        axis.all_to_all(arriving, counts, "expert counts").wait()
        self.arriving = arriving.view(axis.size, -1)
        self._copy = HostCopy(torch.stack((counts.view(axis.size, -1), self.arriving)))

    @cached_property
    def on_host(self) -> tuple[list[list[int]], list[list[int]]]:
        """The counts by rank and the rank's expert: of leaving rows, and of arriving ones."""
        leaving, arriving = self._copy.tolist()
        return leaving, arriving


def exchange_with_experts(
    rows: Tensor,
    runs: Runs,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    axis: Axis,
    multiply: Multiply = multiply_by_experts,
) -> Tensor:
    """Compute `run_experts` for rows of all experts, with the weights of this rank's experts only.

    Args:
        rows: `[rows, hidden]`, sorted by expert.
        runs: `ExchangedRuns` of the rows.
        gate: `[experts / size, ffn, hidden]`.
        up: `[experts / size, ffn, hidden]`.
        down: `[experts / size, hidden, ffn]`.
        axis: The ranks that together keep all experts.
        multiply: See `run_experts`.

    Returns:
        `[rows, hidden]`, in the order of `rows`.
    """
    assert isinstance(runs, ExchangedRuns)
    leaving, arriving = runs.on_host
    sent, received = (list(map(sum, each)) for each in (leaving, arriving))
    way = _Way(axis, sent, received, _by_expert(runs.arriving, sum(received)))
    arrived = _ToExperts.apply(rows, way)
    lengths = list(map(sum, zip(*arriving, strict=True)))
    own = Runs(runs.arriving.sum(0), lambda: lengths)
    results = run_experts(arrived, own, gate, up, down, multiply=multiply)
    back: Tensor = _FromExperts.apply(results, way)
    return back


@dataclass(frozen=True, slots=True)
class _Way:
    """The route of rows between ranks.

    Attributes:
        axis: The ranks that send each other rows.
        sent: Number of rows that go to each rank, in the order in which they lie.
        received: Number of rows that come from each rank.
        order: `[rows]`: for each place in the order by expert, the index of the received row.
    """

    axis: Axis
    sent: list[int]
    received: list[int]
    order: Tensor

    def go(self, rows: Tensor, name: str) -> Tensor:
        """Send the rows to their experts; return the rows for this rank's experts, sorted by expert."""
        arrived = _new_rows(len(self.order), rows)
        self.axis.all_to_all(
            arrived, rows.contiguous(), name, received_rows=self.received, sent_rows=self.sent
        ).wait()
        return arrived.index_select(0, self.order)

    def come_back(self, rows: Tensor, name: str) -> Tensor:
        """Send rows back to their ranks: the inverse of `go`."""
        returning = _new_rows(len(self.order), rows).index_copy_(0, self.order, rows)
        back = _new_rows(sum(self.sent), rows)
        self.axis.all_to_all(back, returning, name, received_rows=self.sent, sent_rows=self.received).wait()
        return back


class _ToExperts(torch.autograd.Function):
    """Send rows to experts; in backward return their gradients, without the factor of `_FromExperts`."""

    @staticmethod
    def forward(context: Any, rows: Tensor, way: _Way) -> Tensor:
        context.way = way
        return way.go(rows, "rows to experts")

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        way = context.way
        return way.come_back(gradient, "gradients from experts").mul_(way.axis.size), None


class _FromExperts(torch.autograd.Function):
    """Return results from experts; in backward send their gradients, divided by the number of ranks.

    Experts sum over the rows of all ranks, so their weights get the mean of the ranks' gradients.
    """

    @staticmethod
    def forward(context: Any, results: Tensor, way: _Way) -> Tensor:
        context.way = way
        return way.come_back(results, "rows from experts")

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        way = context.way
        return way.go(gradient, "gradients to experts").div_(way.axis.size), None


def _by_expert(arriving: Tensor, rows: int) -> Tensor:
    """Return the order `[rows]` by expert, from counts `[rank, local expert]` of rows sorted by these."""
    experts = torch.arange(arriving.shape[1], device=arriving.device).repeat(arriving.shape[0])
    return experts.repeat_interleave(arriving.flatten(), output_size=rows).argsort(stable=True)


def _new_rows(rows: int, like: Tensor) -> Tensor:
    width = like.shape[1]
    return new_buffer(rows * width, dtype=like.dtype, device=like.device).view(rows, width)


def _sum_counts(counts: Tensor, *, axis: Axis) -> Tensor:
    total = counts.clone()
    axis.all_reduce(total, "choices of samples").wait()
    return total


def _keep_of_whole_samples(
    chosen: Tensor, experts: int, capacity: float, *, axis: Axis, positions: Positions
) -> Tensor:
    """Apply `within_capacity` to parts of samples: every rank decides over all choices, takes its part."""
    batch, seq, per_token = chosen.shape
    parts = chosen.new_empty(axis.size, batch + 1, seq, per_token)
    # A row of positions is sent with the choices.
    parts[axis.index, :batch] = chosen
    parts[axis.index, batch] = positions(seq, chosen.device)[:, None]
    axis.all_gather(parts.view(-1), "choices of samples").wait()
    gathered = parts.transpose(0, 1).flatten(1, 2)
    order = gathered[batch, :, 0].argsort()
    kept = within_capacity(gathered[:batch, order], experts, capacity)
    mine = order.argsort().view(axis.size, seq)[axis.index]
    return kept[:, mine]


def _in_order(axis: Axis) -> Positions:
    return lambda seq, device: torch.arange(axis.index * seq, (axis.index + 1) * seq, device=device)
