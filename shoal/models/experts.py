"""A mixture of experts in the place of a block's feed-forward layer.

A router gives every token a probability for each expert; the token goes to the `experts_per_token` likeliest,
and gets back the sum of what they make of it, each weighted with its probability. One pair of a token and an
expert that it goes to is a *choice*. Choices are sorted by expert, so that each expert multiplies one run of
rows.

Everything that couples tokens is defined over one sample: the balance loss counts a sample's choices, and a
capacity limits how many of a sample's choices an expert takes. So training does not depend on how a batch is
cut into micro-batches and over ranks; only ranks that hold parts of the same sample have to share anything.

Papers: sparsely gated experts (Shazeer et al. 2017, arXiv:1701.06538); groups, capacity and top-2 (GShard:
Lepikhin et al. 2020, arXiv:2006.16668); balance loss (Switch: Fedus et al. 2021, arXiv:2101.03961); balance
by sample (DeepSeek-V3: 2024, arXiv:2412.19437); z-loss (ST-MoE: Zoph et al. 2022, arXiv:2202.08906);
dropless (MegaBlocks: Gale et al. 2022, arXiv:2211.15841).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.attention import without_autocast
from shoal.models.config import TransformerConfig
from shoal.models.grouped_matmul import Multiply, Runs, multiply_by_experts
from shoal.models.loss import LossFactor


class Mixture(nn.Module):
    """SwiGLU experts, `down(silu(gate(x)) * up(x))`, and the router that chooses among them.

    In training the gradients of the balance loss and of the z-loss join the backward of whatever loss is
    made of the output: `_AddLoss` hands them to the router. The loss that is reported stays the
    cross-entropy alone, and a loss function of the user's own needs no change. They count as a mean over
    the tokens of one forward does. Who divides such a mean by the number of micro-batches, or scales the
    loss otherwise, says so with `set_auxiliary_scale`.

    Five attributes are functions that a layout over ranks replaces; see each one's default.

    Attributes:
        gate, up: Weights `[experts, expert_ffn, hidden]`.
        down: Weight `[experts, hidden, expert_ffn]`.
        score: Function from hidden states and the router's matrix, both in fp32 or wider, to logits. Default:
            `F.linear`.
        arrange: Function from the counts `[experts]` of the choices to `Runs`; it begins what `compute` needs
            of other ranks. Default: `Runs`.
        compute: Function that runs the experts on the choices' rows. Default: `run_experts`.
        keep: Function that says which choices the capacity keeps. Default: `within_capacity`.
        share_statistics: Function from the counts `[batch, experts]` of the choices in this part of each
            sample, in fp32, to those of the whole samples. Default: the identity.
        auxiliary_scale: Factor on the gradients of the auxiliary losses.
        balance_loss, z_loss: Losses of the last forward, unweighted scalars; None before it.
        load: Share of the last forward's choices that fell to each expert, `[experts]`; None before it.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.expert_ffn or config.ffn
        self.experts = config.experts
        self.per_token = config.experts_per_token
        self.renormalize = config.renormalize
        self.capacity = config.capacity
        self.balance_weight = config.balance_weight
        self.z_weight = config.z_weight
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.gate = _stacked(config.experts, width, config.hidden)
        self.up = _stacked(config.experts, width, config.hidden)
        self.down = _stacked(config.experts, config.hidden, width)
        self.score: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.arrange: Callable[[Tensor], Runs] = Runs
        self.compute: Callable[[Tensor, Runs, Tensor, Tensor, Tensor], Tensor] = run_experts
        self.keep: Callable[[Tensor, int, float], Tensor] = within_capacity
        self.share_statistics: Callable[[Tensor], Tensor] = _unchanged
        self.auxiliary_scale: float | Tensor | LossFactor = 1.0
        self.balance_loss: Tensor | None = None
        self.z_loss: Tensor | None = None
        self.load: Tensor | None = None

    @torch.compiler.disable  # the numbers of rows change from call to call
    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[batch, seq, hidden]` to the same shape; a token whose choices are all dropped gets zeros.

        The counts of choices go to other ranks and to the host as early as possible: the device computes the
        losses, and copies the rows, while the host waits for the counts.
        """
        logits = self._logits(hidden)
        probabilities = logits.softmax(-1)
        shares, chosen = probabilities.topk(self.per_token)
        if self.renormalize:
            shares = shares / shares.sum(-1, keepdim=True)
        taken = chosen  # the choice `experts` is a dropped choice
        if self.capacity is not None:
            taken = chosen.masked_fill(~self.keep(chosen, self.experts, self.capacity), self.experts)
        runs = self.arrange(_count(taken.flatten(), self.experts))
        shares = self._with_auxiliary_losses(shares, chosen, logits, probabilities)
        return self._exchange(hidden, taken, runs, shares)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return the router's logits `[batch, seq, experts]`, in fp32 or wider for exact choices."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with without_autocast(hidden):
            return self.score(hidden.to(wide), self.router.weight.to(wide))

    def _with_auxiliary_losses(
        self, shares: Tensor, chosen: Tensor, logits: Tensor, probabilities: Tensor
    ) -> Tensor:
        """Return the shares unchanged; their backward adds the gradients of the auxiliary losses.

        The balance loss of a sample is `experts * sum_e(fraction_e * probability_e)`: the fraction of its
        choices that go to expert e, times e's mean probability over its tokens. It is 1 when both are even,
        and only the probability has a gradient. The z-loss is the mean of `logsumexp(logits) ** 2`.
        """
        counts = self.share_statistics(_count(chosen.flatten(1), self.experts).float())
        fractions = counts / counts.sum(-1, keepdim=True)
        balance = self.experts * (fractions * probabilities.mean(1)).sum(-1).mean()
        z = logits.logsumexp(-1).square().mean()
        self.load = fractions.mean(0)
        self.balance_loss, self.z_loss = balance.detach(), z.detach()
        if not self.training:
            return shares
        weighted = self.balance_weight * balance + self.z_weight * z
        with_losses: Tensor = _AddLoss.apply(shares, weighted, self.auxiliary_scale)
        return with_losses

    def _exchange(self, hidden: Tensor, chosen: Tensor, runs: Runs, shares: Tensor) -> Tensor:
        """Give rows to experts and add up their results; the choice `experts` is a dropped choice."""
        choices = chosen.flatten()
        order = choices.argsort(stable=True)
        if self.capacity is not None:
            order = order[: sum(runs.lengths)]  # the dropped choices are the last
        rows = _Spread.apply(hidden.flatten(0, 1), order, self.per_token)
        results = self.compute(rows, runs, self.gate, self.up, self.down)
        by_choice = results.new_zeros(len(choices), results.shape[-1]).index_copy(0, order, results)
        weighted = by_choice.view(*chosen.shape, -1) * shares.to(results.dtype).unsqueeze(-1)
        return weighted.sum(-2)


def run_experts(
    rows: Tensor,
    runs: Runs,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    multiply: Multiply = multiply_by_experts,
) -> Tensor:
    """Run each expert on its own run of rows.

    Args:
        rows: Rows `[rows, hidden]`, sorted by expert.
        runs: How many rows each expert has.
        gate: Weight `[experts, ffn, hidden]`.
        up: Weight `[experts, ffn, hidden]`.
        down: Weight `[experts, hidden, ffn]`.
        multiply: Function that computes the products, such as `multiply_by_experts`.

    Returns:
        `[rows, hidden]`, in the order of `rows`.
    """
    gated, upped = multiply(rows, runs, (gate, up))
    (results,) = multiply(F.silu(gated) * upped, runs, (down,))
    return results


def within_capacity(chosen: Tensor, experts: int, capacity: float) -> Tensor:
    """Return which choices experts keep: each takes at most `capacity` times an even share of a sample's.

    The even share of a sample is `seq * experts_per_token / experts`; the limit is rounded up. An expert
    keeps the choices of the earliest positions, and at one position the likeliest first. So no token changes
    the result of earlier tokens.

    Args:
        chosen: Experts of each token, `[batch, seq, experts_per_token]`, int64.
        experts: Number of experts.
        capacity: Factor on the even share.

    Returns:
        A mask of the shape of `chosen`.
    """
    choices = chosen.flatten(1)
    limit = math.ceil(capacity * choices.shape[1] / experts)
    ordered, order = choices.sort(stable=True, dim=-1)
    begin = torch.searchsorted(ordered, ordered)  # start of the run of choices of the same expert
    place = torch.arange(choices.shape[1], device=chosen.device) - begin
    return torch.empty_like(choices, dtype=torch.bool).scatter_(1, order, place < limit).view_as(chosen)


def auxiliary_loss(model: nn.Module) -> Tensor | None:
    """Return the weighted sum of the auxiliary losses of a model's last forward; None if it has none.

    It is a scalar without a gradient, for a report: backward adds the gradients by itself.
    """
    losses = [
        module.balance_weight * module.balance_loss + module.z_weight * module.z_loss
        for module in model.modules()
        if isinstance(module, Mixture) and module.balance_loss is not None and module.z_loss is not None
    ]
    return torch.stack(losses).sum() if losses else None


def mixtures_of(model: nn.Module) -> list[Mixture]:
    """Return the layers of experts of a model."""
    return [module for module in model.modules() if isinstance(module, Mixture)]


def set_auxiliary_scale(model: nn.Module, scale: float | Tensor | LossFactor) -> None:
    """Set the factor by which a forward's mean loss is multiplied before its backward, until the next call.

    Args:
        model: A model that may hold `Mixture`s.
        scale: The factor, such as `1 / micro_batches` if gradients of micro-batches are added up; or a
            `LossFactor`, for the next forward.
    """
    for mixture in mixtures_of(model):
        mixture.auxiliary_scale = scale


class _AddLoss(torch.autograd.Function):
    """Returns a tensor unchanged; its backward also starts a loss's (as Megatron's MoEAuxLossAutoScaler)."""

    @staticmethod
    def forward(context: Any, passed: Tensor, loss: Tensor, scale: float | Tensor | LossFactor) -> Tensor:
        context.scale = scale
        return passed.view_as(passed)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = context.scale.value if isinstance(context.scale, LossFactor) else context.scale
        return gradient, gradient.new_ones(()) * scale, None


class _Spread(torch.autograd.Function):
    """Returns the row of each choice's token; backward adds a token's rows in the order of its choices.

    The backward of `index_select` adds them in any order on a GPU, and one by one on a CPU.
    """

    @staticmethod
    def forward(context: Any, tokens: Tensor, order: Tensor, per_token: int) -> Tensor:
        context.save_for_backward(order)
        context.choices = (len(tokens), per_token)
        return tokens.index_select(0, order // per_token)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = context.saved_tensors
        tokens, per_token = context.choices
        by_choice = gradient.new_zeros(tokens * per_token, gradient.shape[-1]).index_copy_(0, order, gradient)
        return by_choice.view(tokens, per_token, -1).sum(1), None, None


def _count(choices: Tensor, experts: int) -> Tensor:
    """Count how often each of `experts` is in `[..., choices]`: `[..., experts]`, int64."""
    ordered = choices.sort(-1).values
    each = torch.arange(experts, device=choices.device).expand(*choices.shape[:-1], experts).contiguous()
    up_to = torch.searchsorted(ordered, each, right=True)
    return up_to.diff(dim=-1, prepend=torch.zeros_like(up_to[..., :1]))


def _stacked(*shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.normal_(torch.empty(shape), std=0.02))


def _unchanged(counts: Tensor) -> Tensor:
    return counts
