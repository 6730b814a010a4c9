"""The training loss of a language model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shoal.errors import ModelError

__all__ = ["IGNORED", "logits_of", "next_token_loss"]

IGNORED = -100
"""Target value, as in torch, for a position that has no target."""


def next_token_loss(output: object, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token, in fp32 for any dtype of the logits.

    It does not include the auxiliary losses of experts: `Mixture` adds their gradients in backward.

    Args:
        output: Output of the model: logits `[batch, seq, vocab]`, or an object that computes
            `token_loss(targets)` `[batch, seq]` itself, as with tensor parallelism, or an object whose
            `logits` are one of these.
        targets: Token that follows each input position, `[batch, seq]`, int64. They are not shifted here.

    Returns:
        A scalar, fp32.

    Raises:
        ModelError: The output holds no logits, or they do not match the targets.
    """
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
            change="return one row of logits for each input token",
        )
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


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
