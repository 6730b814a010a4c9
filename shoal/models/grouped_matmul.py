"""Products of rows with the matrices of experts, and the two halves of their backward.

Rows are sorted by expert, so that each expert has one *run* of them, which may be empty. Of a weight
`[experts, out, in]` each expert multiplies its run by its own matrix. A backward is products as well: of the
gradients' runs with the same matrices, for the rows, and of the two kinds of runs with each other, for the
weights. Nothing else needs the latter, so they are a method of their own, for who computes them later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.attention import autocast_dtype
from shoal.models.once_differentiable import once_differentiable


@final
class HostCopy:
    """A copy of a tensor that goes to the host while the device works on; the host waits only to read it."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> list[Any]:
        """Return the numbers, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.tolist()


class Runs:
    """How many rows each expert has: on the device, and on the host where it has to know.

    The host waits for its device to know. It does so once for all that are made of the same rows.

    Args:
        counts: Number of rows of each expert, `[experts]`, int64; they add up to all rows.
        read: Function that returns the same numbers on the host.

    Attributes:
        counts: As given.
    """

    def __init__(self, counts: Tensor, read: Callable[[], list[int]] | None = None) -> None:
        self.counts = counts
        self._read = read or counts.tolist

    @cached_property
    def lengths(self) -> list[int]:
        """The numbers of rows, on the host, which waits for them."""
        return self._read()


Multiply = Callable[[Tensor, Runs, Sequence[Tensor]], tuple[Tensor, ...]]
"""Function from rows, their runs and weights to results, such as `multiply_by_experts`."""


def multiply_by_experts(rows: Tensor, runs: Runs, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Multiply each expert's run of rows by its matrices; under autocast in autocast's type.

    Args:
        rows: Rows `[rows, in]`, sorted by expert.
        runs: How many rows each expert has.
        weights: Weights, `[experts, out_i, in]` each.

    Returns:
        `[rows, out_i]` for each weight.
    """
    dtype = autocast_dtype(rows)
    if dtype is not None:
        rows, weights = rows.to(dtype), [weight.to(dtype) for weight in weights]
    results: tuple[Tensor, ...] = _Multiply.apply(expert_products(rows, runs, weights), rows, *weights)
    return results


def expert_products(rows: Tensor, runs: Runs, weights: Sequence[Tensor]) -> ExpertProducts:
    """Return the fastest ExpertProducts for these arguments, which are those of `multiply_by_experts`."""
    total = rows.shape[0]
    if isinstance(total, int) and total == 0:  # an export has a symbol, which may be any number
        return NoProducts(len(runs.counts))
    if _can_group(rows, weights[0]):
        return GroupedProducts(runs.counts)
    return LoopedProducts(runs.lengths)


class ExpertProducts(ABC):
    """A way to multiply runs of rows."""

    @abstractmethod
    def results(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply rows `[rows, in]` by weights `[experts, out, in]`, to `[rows, out]`."""

    @abstractmethod
    def rows_gradient(self, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the rows, `[rows, in]`, from those of the results, `[rows, out_i]`."""

    @abstractmethod
    def weight_gradient(self, gradient: Tensor, rows: Tensor) -> Tensor:
        """Return the weight's gradient `[experts, out, in]`, with zeros for an expert without rows."""


@final
class GroupedProducts(ExpertProducts):
    """One kernel for all experts; the host need not know how many rows each has."""

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts
        self._ends = counts.cumsum(0).int()

    def results(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        return F.grouped_mm(rows, weight.mT, offs=self._ends)

    def rows_gradient(self, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """See `ExpertProducts`."""
        total, *others = (
            F.grouped_mm(gradient, weight, offs=self._ends)
            for gradient, weight in zip(gradients, weights, strict=True)
        )
        for other in others:
            total += other
        return total

    def weight_gradient(self, gradient: Tensor, rows: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        result = F.grouped_mm(gradient.t(), rows, offs=self._ends)
        if _skips_empty_sums(rows.device):
            result.masked_fill_((self._counts == 0)[:, None, None], 0.0)
        return result


@final
class LoopedProducts(ExpertProducts):
    """One product for each expert, written into a common result.

    Autograd's own backward would copy the gradients of the runs, and of the experts' matrices, from separate
    tensors.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def results(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        runs = rows.split(self._lengths)
        return torch.cat([run.mm(matrix.t()) for run, matrix in zip(runs, weight, strict=True)])

    def rows_gradient(self, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """See `ExpertProducts`."""
        total = gradients[0].new_zeros(len(gradients[0]), weights[0].shape[-1])
        sums = total.split(self._lengths)
        for gradient, weight in zip(gradients, weights, strict=True):
            runs = gradient.split(self._lengths)
            for run_sums, run, matrix in zip(sums, runs, weight, strict=True):
                torch.addmm(run_sums, run, matrix, out=run_sums)
        return total

    def weight_gradient(self, gradient: Tensor, rows: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        result = gradient.new_empty(len(self._lengths), gradient.shape[-1], rows.shape[-1])
        runs = zip(gradient.split(self._lengths), rows.split(self._lengths), strict=True)
        for matrix, (run_gradient, run) in zip(result, runs, strict=True):
            torch.mm(run_gradient.t(), run, out=matrix)
        return result


@final
class NoProducts(ExpertProducts):
    """No expert has a row: a rank may get none from any other. Kernels need not take that."""

    def __init__(self, experts: int) -> None:
        self._experts = experts

    def results(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        return rows.new_zeros(0, weight.shape[1])

    def rows_gradient(self, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """See `ExpertProducts`."""
        return gradients[0].new_zeros(0, weights[0].shape[-1])

    def weight_gradient(self, gradient: Tensor, rows: Tensor) -> Tensor:
        """See `ExpertProducts`."""
        return gradient.new_zeros(self._experts, gradient.shape[-1], rows.shape[-1])


def _skips_empty_sums(device: torch.device) -> bool:
    """Return whether torch's grouped product leaves the sum over no rows as its memory was.

    It does on Blackwell (https://github.com/pytorch/pytorch/issues/172439). On Hopper it writes zeros.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def _can_group(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped product takes these and is faster; on a CPU it is a loop too."""
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    return rows.is_cuda and rows.dtype == weight.dtype == torch.bfloat16 and aligned


class _Multiply(torch.autograd.Function):
    """The product with both halves of backward at once."""

    @staticmethod
    def forward(context: Any, products: ExpertProducts, rows: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        context.products = products
        context.save_for_backward(rows, *weights)
        return tuple(products.results(rows, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        products: ExpertProducts = context.products
        rows, *weights = context.saved_tensors
        _, needs_rows, *needs_weight = context.needs_input_grad
        of_weights = [
            products.weight_gradient(gradient, rows) if needed else None
            for gradient, needed in zip(gradients, needs_weight, strict=True)
        ]
        return None, products.rows_gradient(gradients, weights) if needs_rows else None, *of_weights
