"""Labelled texts, or pairs of texts: the samples of sequence classification.

A stream of labelled texts holds the ids of each text, then one id that stands for its label: the size of the
tokenizer's vocabulary plus 1 plus the label's place among the labels, in the order in which they appear. The
size of the vocabulary itself stands between the two texts of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.bounds import text_bounds
from shoal.data.pair import longest_first
from shoal.data.permutation import order
from shoal.data.tokenizer import Tokenizer
from shoal.errors import ConfigError, DataError


@final
class LabelledSamples:
    """Texts, or pairs, of one length and their classes: short ones are padded, and long ones cut.

    Args:
        tokens: A stream of labelled texts, `[length]`.
        numbers: Number of the class of each label, in the order of the stream's labels.
        tokenizer: The tokenizer that made the stream.
        sequence: Tokens of a sample.
        seed: Seed of another order of the texts; None for that of the stream.
        has_types: Whether the model takes `token_type_ids`, which tell the texts of a pair apart.

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
        *,
        has_types: bool = False,
    ) -> None:
        self._around, self._pair = tokenizer.around, tokenizer.pair
        self._padding = require_padding(tokenizer)
        self._tokens = np.asarray(tokens)
        self._separator = tokenizer.vocab_size
        self.sequence = sequence
        starts, ends = text_bounds(self._tokens, self._separator + 1)
        is_pair = self._separator in self._tokens[: ends[0]]
        self._has_types = has_types and is_pair
        added = self._pair.added if is_pair else sum(map(len, self._around))
        self._room = sequence - added
        if self._room < 1 + is_pair:
            raise ConfigError(
                f"the sequence length {sequence} has no room for a {'pair of texts' if is_pair else 'text'}",
                possible=f"{added + 1 + is_pair} tokens or more: {added} are around each "
                f"{'pair' if is_pair else 'text'}",
                change="set a larger sequence length",
            )
        classes = numbers[self._tokens[ends].astype(np.int64) - self._separator - 1]
        texts = np.stack((starts, ends, classes))
        if seed is not None:
            texts = texts[:, order(seed, 0, len(ends), np.arange(len(ends)))]
        self._starts, self._ends, self._classes = texts

    def __len__(self) -> int:
        return len(self._ends)

    def batch(self, indices: NDArray[np.int64]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return the samples at `indices`.

        Returns:
            The inputs of a model, `input_ids` and `attention_mask`, which is 0 for padding, and for pairs
            `token_type_ids` if the model takes them, int64 `[batch, sequence]` each; and the classes, int64
            `[batch]`.

        Raises:
            IndexError: An index is not in `range(len(self))`.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"sample indices must lie in range({len(self)})")
        ids = np.full((len(indices), self.sequence), self._padding, dtype=np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        for row, (start, end) in enumerate(zip(self._starts[indices], self._ends[indices], strict=True)):
            whole, kinds = self._sample(self._tokens[start:end].astype(np.int64))
            ids[row, : len(whole)] = whole
            mask[row, : len(whole)] = 1
            types[row, : len(kinds)] = kinds
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._has_types:
            inputs["token_type_ids"] = types
        tensors = {name: torch.from_numpy(values) for name, values in inputs.items()}
        return tensors, torch.from_numpy(self._classes[indices])

    def _sample(self, text: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ids and the types of one text, or of one pair, with the ids around it."""
        middles = np.flatnonzero(text == self._separator)
        if not len(middles):
            before, after = self._around
            whole = _joined(before, text[: self._room], after)
            return whole, np.zeros_like(whole)
        first, second = text[: middles[0]], text[middles[0] + 1 :]
        kept = longest_first(len(first), len(second), self._room)
        before, between, after = self._pair.ids
        start, of_first, middle, of_second, end = self._pair.types
        types = _joined(start, np.full(kept[0], of_first), middle, np.full(kept[1], of_second), end)
        return _joined(before, first[: kept[0]], between, second[: kept[1]], after), types


def _joined(*parts: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


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
