"""The training loss of a language model, and of a classifier.

The factor on a forward's mean loss, which the auxiliary losses of that forward are multiplied by too.

A loop divides the mean loss of a micro-batch by their number, after the model's forward. Backward reaches
that mean loss before it reaches the routers, so the gradient there is their factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.errors import ModelError, TrainingError
from shoal.models.once_differentiable import once_differentiable


@final
class LossFactor:
    """The factor of one forward: the output carries it to `next_token_loss`, which notes it in backward.

    Args:
        divisor: Number that the factor is divided by.
        is_accumulating: Returns whether other backwards of the same step follow.
    """

    def __init__(self, divisor: float, is_accumulating: Callable[[], bool]) -> None:
        self._divisor = divisor
        self._is_accumulating = is_accumulating
        self._noted: Tensor | None = None

    def put_on(self, output: Any) -> Any:
        """Return a model's output that carries the factor to the loss."""
        if hasattr(output, "_replace"):  # a named tuple, such as SplitLogits
            return output._replace(loss_factor=self) if "loss_factor" in output._fields else output
        object.__setattr__(output, "loss_factor", self)  # works for a frozen object too
        return output

    def note(self, factor: Tensor) -> None:
        """Take note of the gradient of the mean loss."""
        self._noted = factor

    @property
    def value(self) -> float | Tensor:
        """The factor on the auxiliary losses.

        Raises:
            TrainingError: The loss is not `next_token_loss`, and nobody told the number of micro-batches.
        """
        if self._noted is None and self._is_accumulating():
            raise TrainingError(
                "several micro-batches of a model with routers make a step, and nothing says by which factor "
                "its auxiliary losses are multiplied: call set_micro_batches(number) of the parallelized "
                "model before, or use shoal.models.next_token_loss, whose factor they take over"
            )
        return (1.0 if self._noted is None else self._noted) / self._divisor


def noted(loss: Tensor, output: object) -> Tensor:
    """Return the mean loss of an output; its backward notes the factor, if the output carries one."""
    factor = getattr(output, "loss_factor", None)
    if factor is None or not loss.requires_grad:
        return loss
    result: Tensor = _Note.apply(loss, factor)
    return result


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: LossFactor) -> Tensor:
        ctx.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.factor.note(gradient.detach())
        return gradient, None


IGNORED = -100
"""Target value, as in torch, for a position that has no target."""

_CHUNK = 1 << 26
"""Logits that the loss makes at a time, where it makes them itself: 256 MiB in fp32."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, a scalar in fp32, of logits `[..., vocab]` and targets `[...]`."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def next_token_loss(
    output: object, targets: Tensor, *, cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy
) -> Tensor:
    """Return the mean cross-entropy in nats per token, in fp32 for any dtype of the logits.

    A classifier has one target for each sample: its logits are `[batch, classes]`, and its targets `[batch]`.

    It does not include the auxiliary losses of experts: `Mixture` adds their gradients in backward.

    Args:
        output: Output of the model: logits `[batch, seq, vocab]`, or an object that computes
            `token_loss(targets)` `[batch, seq]` itself, as with tensor parallelism, or an object whose
            `logits` are one of these.
        targets: Token that follows each input position, `[batch, seq]`, int64. They are not shifted here.
        cross_entropy: The function `cross_entropy`, such as a compiled one.

    Returns:
        A scalar, fp32.

    Raises:
        ModelError: The output holds no logits, or they do not match the targets.
    """
    return noted(_mean_loss(output, targets, cross_entropy), output)


def _mean_loss(output: object, targets: Tensor, cross_entropy: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if isinstance(output, LaterLogits):
        return output.mean_loss(targets)
    if not hasattr(output, "token_loss"):
        output = getattr(output, "logits", output)
    if hasattr(output, "token_loss"):
        total: Tensor = output.token_loss(targets).sum()
        return total / (targets != IGNORED).sum()
    logits = logits_of(output)
    if logits.shape[:-1] != targets.shape:
        raise ModelError(
            f"logits of shape {tuple(logits.shape)} do not match targets of shape {tuple(targets.shape)}",
            possible=f"logits of shape {(*targets.shape, 'vocab')}",
            change="return one row of logits for each target",
        )
    return cross_entropy(logits, targets)


@final
class LaterLogits:
    """The output of a model whose logits are made in the loss, a part at a time, and never kept.

    Args:
        hidden: The last hidden state, `[batch, seq, hidden]`.
        weight: The head's weight, `[vocab, hidden]`.
    """

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self._hidden = hidden
        self._weight = weight

    @property
    def logits(self) -> Tensor:
        """The logits, `[batch, seq, vocab]`."""
        return F.linear(self._hidden, self._weight)

    def mean_loss(self, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of targets `[batch, seq]`, a scalar in fp32."""
        loss: Tensor = _LossOfParts.apply(self._hidden.flatten(0, -2), self._weight, targets.flatten())
        return loss


class _LossOfParts(torch.autograd.Function):
    """The mean cross-entropy; forward also computes the gradients, while a part's logits are there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        count = (targets != IGNORED).sum()
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        rows = max(1, _CHUNK // len(weight))
        for first in range(0, len(hidden), rows):
            part = hidden[first : first + rows]
            logits = part.mm(weight.t()).float()
            chosen = targets[first : first + rows, None]
            counts = chosen != IGNORED
            chosen = chosen.clamp(min=0)
            sums = logits.logsumexp(-1, keepdim=True)
            total += ((sums - logits.gather(-1, chosen)) * counts).sum()
            if of_hidden is None and of_weight is None:
                continue
            gradient = logits.sub_(sums).exp_()
            gradient.scatter_add_(-1, chosen, gradient.new_full((), -1.0).expand_as(chosen))
            narrow = gradient.mul_(counts / count).to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(narrow, weight, out=of_hidden[first : first + rows])
            if of_weight is not None:
                of_weight += narrow.t().mm(part)
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # in fp32: a factor such as 1/3 that is rounded to bf16 would scale all gradients by up to 0.4 %
        of_hidden, of_weight = (
            None if each is None else (each.float() * gradient).to(each.dtype) for each in ctx.saved_tensors
        )
        return of_hidden, of_weight, None


def logits_of(output: object) -> Tensor:
    """Return the logits in a model's output: the output itself, or its `logits` for Hugging Face models.

    Logits that tensor parallelism split are gathered; then all its ranks must call this.

    Raises:
        ModelError: The output is neither.
    """
    logits = output
    while not isinstance(logits, Tensor) and hasattr(logits, "logits"):
        logits = logits.logits
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"the model returned {type(output).__name__}, which holds no logits",
            possible="a tensor [batch, seq, vocab], or an object with such a tensor in `.logits`",
            change="change what the model's forward returns",
        )
    return logits
