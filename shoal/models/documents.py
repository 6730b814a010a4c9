"""Documents in packed samples: attention never crosses from one to the next."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_SHORT = 16  # tokens; shorter documents on average are masked


class Documents:
    """The document of each token of some packed samples.

    Like `Angles` it is neither a tuple nor a dataclass, so that what casts the inputs of blocks leaves it as
    it is. A kernel for sequences of variable length would take their lengths from `starts`.

    Args:
        position_ids: Position of each token in its document, `[batch, seq]`, int64; `seq` is the whole sample
            even if the tokens are a part of it.

    Attributes:
        starts: Position in the sample at which each token's document begins, `[batch, seq]`, int64.
    """

    def __init__(self, position_ids: Tensor) -> None:
        self.starts = torch.arange(position_ids.shape[1], device=position_ids.device) - position_ids
        self._mask: Tensor | None = None
        self._lengths: list[int] | None = None

    def lengths(self) -> list[int] | None:
        """Return the length of each document, sample after sample; None if attention to each costs more.

        Attention to one document after another leaves out all products between documents, and costs a call
        for each. On one core of a CPU it took 0.05 to 0.5 of the time of the mask for documents of 32 tokens
        on average, up to 1.2 for 16, and more for shorter ones, in samples of 128 to 2048 tokens. GPUs would
        wait for the lengths, and a compiled graph cannot depend on them.
        """
        starts = self.starts
        if type(starts) is not Tensor or starts.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        if self._lengths is None:
            begins = torch.ones_like(starts, dtype=torch.bool)
            begins[:, 1:] = starts[:, 1:] != starts[:, :-1]
            places = begins.flatten().nonzero().flatten().tolist()
            self._lengths = [end - begin for begin, end in pairwise([*places, starts.numel()])]
        return self._lengths if starts.numel() >= _SHORT * len(self._lengths) else None

    def mask(self) -> Tensor:
        """Return which positions see which, `[batch, 1, seq, seq]`, bool; made once."""
        if self._mask is None:
            every = torch.arange(self.starts.shape[1], device=self.starts.device)
            self._mask = sees(self.starts, every, every)
        return self._mask


def sees(starts: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return which queries see which keys: those of their own document that are not later.

    Args:
        starts: Position at which each token's document begins, `[batch, seq]`.
        queries: Positions in the sample, `[queries]`, int64.
        keys: Positions in the sample, `[keys]`, int64.

    Returns:
        `[batch, 1, queries, keys]`, bool.
    """
    are_together = starts[:, queries, None] == starts[:, None, keys]
    return (are_together & (queries[:, None] >= keys))[:, None]
