"""The logits of routers, for the auxiliary loss that models of transformers compute of all layers together.

With `output_router_logits` such a model collects the logits of its routers, and computes one loss of them:
the fraction of choices that fall to each expert, over all tokens and layers, times its mean probability. So
it needs the logits of whole samples, of which tensor and context parallelism give a rank a part, and of all
layers, of which a pipeline gives a rank some. Here they are brought together, before the model's own code
computes its loss.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from shoal.errors import ModelError, PlanError
from shoal.models.once_differentiable import once_differentiable
from shoal.parallel.axes import Axes
from shoal.parallel.communication import Axis
from shoal.parallel.tensor.vocabulary import cut, joined, start_gather, start_reduce_scatter

_KEY = "router_logits"


def gather_router_logits(model: Any, axes: Axes) -> None:
    """Make a model compute its auxiliary loss of whole samples on each rank, in place.

    Ranks of context parallelism average their gradients, so that each of their parts gets the sum over the
    ranks' losses. Those of tensor parallelism add them up, and have equal losses.

    Args:
        model: A model of transformers.
        axes: The Plan's axes.
    """
    if axes.sequence.size > 1:
        tp = axes.tp if axes.sequence.size > axes.cp.size else None
        model.base_model.register_forward_hook(partial(_gathered, tp=tp, cp=axes.cp))


@final
class RouterLogits:
    """Send the logits of routers from stage to stage: features beside the hidden state's, in one message.

    Args:
        hidden: Features of the hidden state.
        experts: Number of experts of a router.
        dtype: Type of the hidden state. A message has the logits' type if that is wider.
    """

    def __init__(self, hidden: int, experts: int, dtype: torch.dtype) -> None:
        self._hidden = hidden
        self._dtype = dtype
        self._experts = experts
        self._received: list[Tensor] = []

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype) -> RouterLogits | None:
        """Return it for a model of transformers that collects these logits, all modules of which are there.

        Raises:
            PlanError: The model does not collect them in transformers' way.
        """
        config = getattr(model, "config", None)
        if not getattr(config, "output_router_logits", False) or not hasattr(model, "base_model"):
            return None
        if "aux_loss" not in inspect.unwrap(type(model).forward).__code__.co_varnames:
            return None  # it returns the logits, and makes no loss of them
        try:
            from transformers.utils.output_capturing import maybe_install_capturing_hooks
        except ImportError:
            raise _not_collected(model) from None
        text = getattr(config, "text_config", config)
        hidden, experts = getattr(text, "hidden_size", None), getattr(model, "num_experts", None)
        if hidden is None or experts is None:
            raise _not_collected(model)
        maybe_install_capturing_hooks(model.base_model)  # before some of the modules are gone
        return cls(hidden, experts, dtype)

    def enter(self, message: Tensor) -> Tensor:
        """Return the hidden state `[batch, seq, hidden]` of what a stage received."""
        self._received = list(message[..., self._hidden :].split(self._experts, -1))
        return message[..., : self._hidden].to(self._dtype)

    def begin(self) -> None:
        """Put what was received before the logits of the stage's own routers, in a forward that runs."""
        collected = _collected()
        if collected is not None:
            collected[:0] = [each.flatten(0, -2) for each in self._received if each.numel()]
        self._received = []

    def leave(self, hidden: Tensor) -> Tensor:
        """Return what a stage sends: its hidden state, and the logits of all routers until now."""
        collected = _collected()
        if not collected:
            return hidden
        for each in collected:
            if each.shape[-1] != self._experts or each.numel() != hidden[..., 0].numel() * self._experts:
                raise ModelError(
                    f"a router gives logits {list(each.shape)} for a hidden state {list(hidden.shape)}, and "
                    f"stages send {self._experts} for each token",
                    possible="routers that score each expert for each token",
                    change="set output_router_logits=False, or use pp=1",
                )
        return torch.cat([hidden, *(each.view(*hidden.shape[:-1], -1) for each in collected)], -1)


def _collected() -> list[Tensor] | None:
    """Return the list in which transformers collects logits in the forward that runs; None if it does not."""
    from transformers.utils.output_capturing import _active_collector

    collected: list[Tensor] | None = (_active_collector.get() or {}).get(_KEY)
    return collected


def _not_collected(model: nn.Module) -> PlanError:
    return PlanError(
        f"{type(model).__name__} has output_router_logits, and the stages of a pipeline cannot send what its "
        "routers give",
        possible="models whose routers transformers>=5.5 records, or no auxiliary loss",
        change="set output_router_logits=False, or use pp=1",
    )


def _gathered(module: Any, args: tuple[Any, ...], output: Any, *, tp: Axis | None, cp: Axis) -> Any:
    """Replace the logits of routers by those of whole samples, as on one device."""
    logits = output.get(_KEY) if isinstance(output, dict) else None
    if not logits:
        return output
    batch, length = output.last_hidden_state.shape[:2]
    if any(each.numel() != batch * length * each.shape[-1] for each in logits):
        raise ModelError(
            f"a router of {type(module).__name__} gives logits {list(logits[0].shape)} for {batch} samples "
            f"of {length} tokens, and ranks have parts of their sequences",
            possible="routers that score each expert for each token; tensor=plain",
            change="set output_router_logits=False, or use tensor=plain and no cp",
        )
    widths = [each.shape[-1] for each in logits]
    whole = torch.cat([each.reshape(batch, length, -1) for each in logits], -1)
    if tp is not None:
        whole = _Gather.apply(whole, tp, False)
    if cp.size > 1:
        whole = _Gather.apply(whole, cp, True)
    output[_KEY] = tuple(each.flatten(0, 1) for each in whole.split(widths, -1))
    return output


class _Gather(torch.autograd.Function):
    """`[batch, part, ...]` of each rank as `[batch, seq, ...]`; backward may sum gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: Axis, is_summed: bool) -> Tensor:
        ctx.axis, ctx.is_summed = axis, is_summed
        parts, pending = start_gather(part, axis, _KEY)
        pending.wait()
        return joined(parts).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        parts = cut(gradient, ctx.axis)
        if not ctx.is_summed:
            return parts[ctx.axis.index].contiguous(), None, None
        part, pending = start_reduce_scatter(parts.contiguous(), ctx.axis, _KEY)
        pending.wait()
        return part, None, None
