"""Labelled texts: the samples of sequence classification.

A stream of labelled texts holds the ids of each text, then one id that stands for its label: the size of the
tokenizer's vocabulary plus the label's place among the labels, in the order in which they appear. So a text
ends where an id is not below the size of the vocabulary.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.bounds import text_bounds
from shoal.data.permutation import order
from shoal.data.tokenizer import Tokenizer
from shoal.errors import ConfigError, DataError

__all__ = ["LabelledSamples", "require_padding"]


@final
class LabelledSamples:
    """Texts of one length and their classes: short texts are padded, and long ones cut.

    Args:
        tokens: A stream of labelled texts, `[length]`.
        numbers: Number of the class of each label, in the order of the stream's labels.
        tokenizer: The tokenizer that made the stream.
        sequence: Tokens of a sample.
        seed: Seed of another order of the texts; None for that of the stream.

    Raises:
        ConfigError: `sequence` leaves no room for a text.
        DataError: The stream holds no text, or the tokenizer has no padding token.
    """

    deterministic = True
    all_targets_count = True

    def __init__(
        self,
        tokens: NDArray[np.integer],
        numbers: NDArray[np.int64],
        tokenizer: Tokenizer,
        sequence: int,
        seed: int | None = None,
    ) -> None:
        self._before, self._after = (np.asarray(ids, dtype=np.int64) for ids in tokenizer.around)
        added = len(self._before) + len(self._after)
        self._room = sequence - added
        if self._room < 1:
            raise ConfigError(
                f"the sequence length {sequence} has no room for a text",
                possible=f"{added + 1} tokens or more: {added} are around each text",
                change="set a larger sequence length",
            )
        self._padding = require_padding(tokenizer)
        self._tokens = np.asarray(tokens)
        self.sequence = sequence
        starts, ends = text_bounds(self._tokens, tokenizer.vocab_size)
        classes = numbers[self._tokens[ends].astype(np.int64) - tokenizer.vocab_size]
        texts = np.stack((starts, ends, classes))
        if seed is not None:
            texts = texts[:, order(seed, 0, len(ends), np.arange(len(ends)))]
        self._starts, self._ends, self._classes = texts

    def __len__(self) -> int:
        return len(self._ends)

    def batch(self, indices: NDArray[np.int64]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the samples at `indices`.

        Returns:
            The inputs of a model, `input_ids` and `attention_mask`, which is 0 for padding, int64
            `[batch, sequence]` each; and the classes, int64 `[batch]`.

        Raises:
            IndexError: An index is not in `range(len(self))`.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"sample indices must lie in range({len(self)})")
        ids = np.full((len(indices), self.sequence), self._padding, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, (start, end) in enumerate(zip(self._starts[indices], self._ends[indices], strict=True)):
            text = self._tokens[start : min(end, start + self._room)]
            whole = np.concatenate((self._before, text, self._after))
            ids[row, : len(whole)] = whole
            mask[row, : len(whole)] = 1
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        return inputs, torch.from_numpy(self._classes[indices])


def require_padding(tokenizer: Tokenizer) -> int:
    """Return the padding id of a tokenizer.

    Raises:
        DataError: It has none.
    """
    if tokenizer.padding is None:
        raise DataError(
            f"the tokenizer {tokenizer.name!r} has no padding token, and labelled texts are padded",
            possible="a tokenizer.json with a token such as [PAD] or <pad>, or with pad_token in the "
            "tokenizer_config.json beside it; or 'bytes'",
            change="add one with Tokenizer.add_special_tokens and enable_padding, and save the file",
        )
    return tokenizer.padding
