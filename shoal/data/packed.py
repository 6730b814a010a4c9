"""Packed samples that keep their documents apart.

A sample is a window of the token stream, and holds the ends and beginnings of documents. Each position is
counted from the beginning of its document, or of the sample if the document began before. The token that
ends a document has no target: it would be the first token of the next document.
"""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.samples import TokenSamples

_NO_TARGET = -100


class Packed(NamedTuple):
    """The input of a model: tokens, and their positions.

    Attributes:
        tokens: `[batch, seq]`, int64.
        position_ids: Position of each token in its document, `[batch, seq]`, int64.
    """

    tokens: Tensor
    position_ids: Tensor


@final
class PackedSamples:
    """Windows of a token stream whose documents are kept apart.

    Args:
        samples: The windows.
        end: The id that ends each document.
    """

    deterministic = True
    all_targets_count = False
    is_packed = True

    def __init__(self, samples: TokenSamples, end: int) -> None:
        self._samples = samples
        self._end = end

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Packed, Tensor]:
        """Return inputs and targets of one sample, int64 `[seq]` each."""
        inputs, targets = self.batch(np.array([index], dtype=np.int64))
        return Packed(inputs.tokens[0], inputs.position_ids[0]), targets[0]

    def batch(self, indices: NDArray[np.int64]) -> tuple[Packed, Tensor]:
        """Return inputs and targets of the samples at `indices`; a target of -100 does not count.

        Raises:
            IndexError: An index is not in `range(len(self))`.
        """
        return kept_apart(*self._samples.batch(indices), self._end)


def kept_apart(tokens: Tensor, targets: Tensor, end: int) -> tuple[Packed, Tensor]:
    """Return inputs with the positions in their documents, and targets, of which `end` tokens have none.

    Args:
        tokens: Windows of a token stream, `[batch, seq]`.
        targets: The tokens that follow, `[batch, seq]`.
        end: The id that ends each document.
    """
    ends = tokens == end
    every = torch.arange(tokens.shape[1])
    begins = torch.zeros_like(tokens)
    begins[:, 1:] = torch.where(ends[:, :-1], every[1:], 0)
    starts = begins.cummax(1).values
    return Packed(tokens, every - starts), targets.masked_fill(ends, _NO_TARGET)
