"""A vocabulary split over the ranks of an axis: the embedding and the loss (Megatron-LM, arXiv:1909.08053).

A rank has the rows `[first_row, first_row + n)` of the embedding, and so the logits of these tokens. A
look-up gives zero on all ranks but one, and the sum over ranks is the embedding. The cross-entropy needs two
numbers for each position from each rank, the logarithm of its sum of exponentials and the target's logit. All
ranks get all of these, `[size, 2, batch * seq]`, in one small all-gather, so that logits are never gathered.

Parts of a sequence, one for each rank of an axis: their order in memory, gather and reduction.

A hidden state is `[batch, seq, width]`. Part i holds the positions `[i * seq / size, (i + 1) * seq / size)`
of every sample, which are not contiguous in memory for more than one sample. So tensors are communicated in
part order, `[size, batch, seq / size, width]`, in which a part is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import Tensor

from shoal.errors import PlanError
from shoal.models.loss import IGNORED, LossFactor
from shoal.models.once_differentiable import once_differentiable
from shoal.parallel.communication import Axis, Pending, new_buffer


def cut(whole: Tensor, axis: Axis) -> Tensor:
    """Return `[batch, seq, ...]` in part order, `[size, batch, seq / size, ...]`, as a view.

    Raises:
        PlanError: The sequence does not divide by the ranks of the axis.
    """
    seq = whole.shape[1]
    if seq % axis.size:
        lower = max(seq - seq % axis.size, axis.size)
        raise PlanError(
            f"a sequence of {seq} tokens cannot be cut into equal parts for {axis.size} ranks of {axis.name}",
            possible=f"multiples of {axis.size}, such as {lower} or {lower + axis.size}",
            change=f"change the sequence's length, or `{axis.name}`",
        )
    parts: Tensor = whole.unflatten(1, (axis.size, -1)).transpose(0, 1)
    return parts


def joined(parts: Tensor) -> Tensor:
    """Return `[size, batch, part, ...]` as `[batch, size * part, ...]`: a view for one sample, or a copy."""
    return parts.transpose(0, 1).flatten(1, 2)


def new_parts(axis: Axis, part: torch.Size, like: Tensor) -> Tensor:
    """Return an undefined `[size, *part]` to communicate from, with dtype and device of `like`."""
    shape = (axis.size, *part)
    return new_buffer(axis.size * part.numel(), dtype=like.dtype, device=like.device).view(shape)


def start_gather(part: Tensor, axis: Axis, name: str) -> tuple[Tensor, Pending]:
    """Begin to gather every rank's `part`; return the tensor that will hold them, `[size, *part.shape]`."""
    parts = new_parts(axis, part.shape, part)
    parts[axis.index].copy_(part)
    return parts, axis.all_gather(parts.view(-1), name)


def start_reduce_scatter(parts: Tensor, axis: Axis, name: str) -> tuple[Tensor, Pending]:
    """Begin to sum `[size, ...]` over the ranks; return the tensor that will hold this rank's part.

    The part has memory of its own, so that keeping it does not keep all parts. `parts` must stay unchanged
    until the reduction is complete.
    """
    part = parts[0] if axis.size == 1 else torch.empty_like(parts[0])
    return part, axis.reduce_scatter(part.view(-1), parts.view(-1), name)


# Elements that the loss converts at a time, so that logits in bf16 have no whole copy in fp32. For
# logits [1024, 16384] in bf16, 64 Ki to 1 Mi elements take 48 to 52 ms of a CPU's time, and 4 Mi take 144 ms.
# On other devices it only bounds the memory; its speed there is not measured.
_CHUNK_ELEMENTS = 1 << 20
_CHUNK_ELEMENTS_ON_ACCELERATORS = 1 << 26


@final
@dataclass(frozen=True, eq=False)
class SplitLogits:
    """Logits of a part of the vocabulary, as a rank of tensor parallelism computes them.

    Functions of torch, tensor methods, indices and operators use the whole `logits`, so that any loss works;
    `token_loss` gathers nothing.

    Attributes:
        local: This rank's logits, `[batch, seq, rows]`.
        axis: The ranks that have the other parts.
        first_row: The first token of the part.
        vocabulary: Number of tokens in all.
        loss_factor: The factor on the loss, for auxiliary losses; None if nobody needs it.
    """

    local: Tensor
    axis: Axis
    first_row: int
    vocabulary: int
    loss_factor: LossFactor | None = None

    def token_loss(self, targets: Tensor) -> Tensor:
        """Return the cross-entropy of each target in nats `[batch, seq]`, fp32; nothing is gathered."""
        return vocabulary_cross_entropy(self.local, targets, self.axis, self.first_row)

    @cached_property
    def logits(self) -> Tensor:
        """All logits `[batch, seq, vocab]`, gathered; every rank of the axis has to use them alike."""
        whole: Tensor = _GatherLogits.apply(self.local, self.axis, self.first_row, self.vocabulary)
        return whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"SplitLogits has no attribute {name!r}")
        return getattr(self.logits, name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with the whole logits."""
        whole = partial(_with_whole, cls)
        return function(*map(whole, args), **{name: whole(each) for name, each in (kwargs or {}).items()})

    def __getitem__(self, index: Any) -> Tensor:
        return self.logits[index]

    def __len__(self) -> int:
        return len(self.local)


def embed_rows(
    tokens: Tensor, weight: Tensor, axis: Axis, first_row: int, *, sequence: bool, name: str = "embed"
) -> Tensor:
    """Look tokens up in an embedding of which each rank has some rows.

    Args:
        tokens: `[batch, seq]`, int64, equal on all ranks.
        weight: This rank's rows, `[n, width]`; n is at least 1, and may differ between ranks.
        axis: The ranks that the rows are split over.
        first_row: The token whose row is this rank's first.
        sequence: Whether the result is a part of the sequence.
        name: Name of the communication in the Timeline.

    Returns:
        `[batch, seq, width]`, equal on all ranks; with `sequence` this rank's `[batch, seq/size, width]`. A
        token in no rank's rows gives zeros.

    Raises:
        PlanError: With `sequence`, the sequence does not divide by the ranks.
    """
    result: Tensor = _EmbedRows.apply(tokens, weight, axis, first_row, sequence, name)
    return result


def vocabulary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    first_row: int,
    *,
    rows: int | None = None,
    overwrite: bool = False,
    name: str = "loss",
) -> Tensor:
    """Compute the cross-entropy of every position; each rank has some logits, and none are gathered.

    Args:
        logits: This rank's `[batch, seq, n]`, for the tokens from `first_row` on.
        targets: `[batch, seq]`, int64, equal on all ranks; `IGNORED` where there is no target.
        axis: The ranks that the vocabulary is split over.
        first_row: The token of this rank's first logit.
        rows: Number of the n logits that belong to tokens; those after them are padding. None for all.
        overwrite: Whether backward may write the logits' gradient over the logits.
        name: Name of the communication in the Timeline.

    Returns:
        `[batch, seq]` in nats, fp32, equal on all ranks; 0 where the target is `IGNORED`.
    """
    rows = logits.shape[-1] if rows is None else rows
    losses: Tensor = _CrossEntropy.apply(logits, targets, axis, first_row, rows, overwrite, name)
    return losses


def _with_whole(kind: type, value: Any) -> Any:
    if isinstance(value, kind):
        return value.logits  # type: ignore[attr-defined]
    return type(value)(_with_whole(kind, each) for each in value) if type(value) in (list, tuple) else value


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: SplitLogits, *others: Any) -> Any:
        return getattr(self.logits, name)(*(_with_whole(SplitLogits, other) for other in others))

    return operate


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    setattr(SplitLogits, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(SplitLogits, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("neg", "abs", "lt", "le", "gt", "ge"):
    setattr(SplitLogits, f"__{_name}__", _operator(f"__{_name}__"))


class _GatherLogits(torch.autograd.Function):
    """Gather logits; each rank computes the whole loss, so its part of the gradient is already complete."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: Axis, first_row: int, vocabulary: int) -> Tensor:
        ctx.first_row, ctx.held = first_row, local.shape[-1]
        rows = -(-vocabulary // axis.size)
        gathered = local.new_zeros(axis.size, *local.shape[:-1], rows)
        gathered[axis.index, ..., : ctx.held] = local
        axis.all_gather(gathered, "logits").wait()
        return gathered.movedim(0, -2).flatten(-2)[..., :vocabulary]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.narrow(-1, ctx.first_row, ctx.held), None, None, None


class _EmbedRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, axis: Axis, first_row: int, sequence: bool, name: str
    ) -> Tensor:
        if sequence:
            tokens = cut(tokens, axis)
        count, width = weight.shape
        local = tokens - first_row
        outside = (local < 0) | (local >= count)
        if sequence:
            found = new_parts(axis, torch.Size((*tokens.shape[1:], width)), weight)
        else:
            found = new_buffer(tokens.numel() * width, dtype=weight.dtype, device=weight.device)
        flat = found.view(-1, width)
        torch.index_select(weight, 0, local.clamp(0, count - 1).flatten(), out=flat)
        flat.masked_fill_(outside.reshape(-1, 1), 0)
        ctx.axis, ctx.sequence, ctx.name, ctx.count = axis, sequence, name, count
        # A token of another rank counts as the row after the last.
        ctx.save_for_backward(local.masked_fill_(outside, count).flatten())
        if sequence:
            result, pending = start_reduce_scatter(found, axis, name)
        else:
            result, pending = found.view(*tokens.shape, width), axis.all_reduce(found, name)
        pending.wait()
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (local,) = ctx.saved_tensors
        if ctx.sequence:
            gradient, pending = start_gather(gradient, ctx.axis, ctx.name)
            pending.wait()
        weight_gradient = torch.ops.aten.embedding_dense_backward(
            gradient.reshape(local.numel(), -1), local, ctx.count + 1, ctx.count, False
        )
        return None, weight_gradient[: ctx.count], None, None, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        axis: Axis,
        first_row: int,
        rows: int,
        overwrite: bool,
        name: str,
    ) -> Tensor:
        local = targets.flatten() - first_row
        here = (local >= 0) & (local < rows)
        local = local.clamp(0, logits.shape[-1] - 1).unsqueeze(1)
        gathered = new_buffer(axis.size * 2 * targets.numel(), dtype=torch.float32, device=logits.device)
        everyone = gathered.view(axis.size, 2, -1)
        normalizer, target_logit = everyone[axis.index]
        flat = logits.flatten(0, -2)
        for chunk in _chunks(flat):
            torch.logsumexp(flat[chunk, :rows].float(), -1, out=normalizer[chunk])
        torch.mul(flat.gather(1, local).squeeze(1), here, out=target_logit)
        axis.all_gather(gathered, name).wait()
        normalizer = everyone[:, 0].logsumexp(0)
        ignored = targets == IGNORED
        ctx.rows, ctx.overwrite = rows, overwrite
        ctx.save_for_backward(logits, normalizer, local, here, ignored)
        return (normalizer - everyone[:, 1].sum(0)).view(targets.shape).masked_fill_(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, normalizer, local, here, ignored = ctx.saved_tensors
        # softmax minus one-hot, times the incoming gradient
        factor = gradient.masked_fill(ignored, 0.0).flatten().unsqueeze(1)
        at_target = -factor * here.unsqueeze(1)
        result = logits if ctx.overwrite else torch.empty_like(logits, memory_format=torch.contiguous_format)
        flat, written = logits.flatten(0, -2), result.view(-1, logits.shape[-1])
        for chunk in _chunks(flat):
            out = written[chunk, : ctx.rows]
            wide = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
            torch.sub(flat[chunk, : ctx.rows], normalizer[chunk].unsqueeze(1), out=wide)
            wide.exp_().mul_(factor[chunk])
            if ctx.rows:
                wide.scatter_add_(1, local[chunk].clamp(max=ctx.rows - 1), at_target[chunk])
            if wide is not out:
                out.copy_(wide)
        written[:, ctx.rows :] = 0.0
        return result, None, None, None, None, None, None


def _chunks(rows: Tensor) -> Iterator[slice]:
    """Yield slices of `[rows, n]`, each of at least one row."""
    elements = _CHUNK_ELEMENTS if rows.device.type == "cpu" else _CHUNK_ELEMENTS_ON_ACCELERATORS
    height = max(1, elements // rows.shape[1])
    for start in range(0, rows.shape[0], height):
        yield slice(start, start + height)
