"""One collective, as a rank calls it, before an algorithm is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.collectives.stripes import Stripes


@dataclass(slots=True)
class Operation:
    """One collective of flat buffers.

    Attributes:
        collective: One of `COLLECTIVE_NUMBERS`.
        input: Contiguous input tensor; None if this rank gives nothing.
        output: Contiguous output tensor; None if this rank gets nothing.
        result: Tensors that the Work returns.
        nbytes: Bytes of the tensor, or of one rank's part where each has a part.
        whole: Bytes of the whole buffer, by which the algorithm is chosen.
        slot: Bytes that one-shot would put into a rank's slot.
        root: Rank of the root in the group.
        reduces: The type that is reduced; None if bytes are moved.
        splits: For all-to-all, bytes to and from every rank.
        stripes: Positions of several tensors in one buffer, for an all-gather or a reduce-scatter in place;
            the ranks are on one host.
        finish: Function that is called once it is complete.
    """

    collective: str
    input: torch.Tensor | None
    output: torch.Tensor | None
    result: Sequence[Any]
    nbytes: int
    whole: int
    slot: int
    root: int = 0
    reduces: torch.dtype | None = None
    splits: tuple[Sequence[int], Sequence[int]] | None = None
    stripes: Stripes | None = None
    finish: Callable[[], None] | None = None
