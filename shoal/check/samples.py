"""The samples of a comparison on tokens: random tokens, masked tokens, and packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.data.packed import kept_apart
from shoal.errors import ModelError
from shoal.models.loss import IGNORED

_SPECIAL = ("_token_id", "_token_index")


@final
class RandomTokens:
    """Samples of random tokens; records which samples were asked for.

    Args:
        tokens: The tokens to draw from.
        count: Number of samples.
        sequence: Number of tokens that the model sees of each sample.
        seed: Seed of the tokens.
        masked: Whether a token of four is hidden by another, and only those have a target, at their place.
        boundaries: Whether samples are packed documents. The last of `tokens` ends each.

    Attributes:
        asked: The indices of every batch that was asked for, in order.
    """

    deterministic = True

    def __init__(
        self,
        tokens: Sequence[int],
        count: int,
        sequence: int,
        seed: int,
        *,
        masked: bool = False,
        boundaries: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        *others, self._mask, self._end = tokens
        drawn = torch.tensor(others if masked or boundaries else tokens)
        self._tokens = drawn[torch.randint(len(drawn), (count, sequence + 1), generator=generator)]
        self._masked, self._boundaries = masked, boundaries
        self.all_targets_count = not (masked or boundaries)
        if boundaries:
            ends = torch.rand(count, sequence - 1, generator=generator).argsort(1)[:, : 1 + sequence // 32]
            self._tokens.scatter_(1, ends, self._end)
        self._hidden = torch.rand(count, sequence, generator=generator) < 0.25
        self._hidden[:, 0] = True  # each sample has a target
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Any, Tensor]:
        """Return inputs and targets of the samples at `indices`, int64 `[batch, seq]` each.

        A target of -100 does not count. The inputs of packed samples are `Packed`.
        """
        self.asked.append(indices.tolist())
        places = torch.from_numpy(indices)
        windows = self._tokens[places]
        inputs, following = windows[:, :-1], windows[:, 1:]
        if self._boundaries:
            packed, following = kept_apart(inputs, following, self._end)
        if self._masked:
            hidden = self._hidden[places]
            inputs, following = inputs.masked_fill(hidden, self._mask), inputs.masked_fill(~hidden, IGNORED)
        return (packed._replace(tokens=inputs) if self._boundaries else inputs), following


def tokens_of(model: nn.Module) -> list[int]:
    """Return the tokens that a model takes, without those to which its configuration gives a meaning.

    Raises:
        ModelError: It does not say how many there are.
    """
    config: Any = getattr(model, "config", None)
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int) and hasattr(config, "get_text_config"):
        size = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(size, int):
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        if not embeddings:
            raise ModelError(
                f"{type(model).__name__} does not say how many different tokens it takes",
                possible="a model with `config.vocab_size`, or with an nn.Embedding",
                change="give the model one of these",
            )
        size = embeddings[0].num_embeddings
    described = config.to_dict() if hasattr(config, "to_dict") else {}
    special = {
        value for name, value in described.items() if name.endswith(_SPECIAL) and isinstance(value, int)
    }
    return [token for token in range(size) if token not in special]
