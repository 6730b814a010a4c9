"""Labelled texts, or pairs of texts: the samples of sequence classification.

A stream of labelled texts holds the ids of each text, then one id that stands for its label: the size of the
tokenizer's vocabulary plus 1 plus the label's place among the labels, in the order in which they appear. The
size of the vocabulary itself stands between the two texts of a pair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.bounds import text_bounds
from shoal.data.permutation import order
from shoal.data.rows import Row
from shoal.data.tokenizer import Tokenizer, longest_first
from shoal.errors import ConfigError, DataError, nearest


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


MOST_CLASSES = 1 << 14
"""A column with more labels than this is refused."""

_NUMBER = re.compile(r"(-?\d{1,18})(\.\d*)?", re.ASCII)


def label_of(value: Any) -> str | None:
    """Return the label that a value stands for: a name, or a whole number from 0; None if it is none."""
    if isinstance(value, bool | int | np.integer):
        value = str(int(value))
    elif isinstance(value, float):
        value = repr(value)
    text = value.strip() if isinstance(value, str) else ""
    if (number := _NUMBER.fullmatch(text)) is None:
        return None if isinstance(value, float) else text or None
    whole, rest = number.groups()
    is_class = int(whole) in range(MOST_CLASSES) and not (rest or "").strip(".0")
    return str(int(whole)) if is_class else None


def are_numbers(labels: Sequence[str]) -> bool:
    """Return whether labels are the numbers of classes, not names."""
    return all(_NUMBER.fullmatch(label) for label in labels)


def class_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of labels, in the order of their numbers: sorted names, or all numbers from 0 on."""
    if are_numbers(labels):
        return tuple(map(str, range(max(map(int, labels)) + 1)))
    return tuple(sorted(labels))


def numbers_of(labels: Sequence[str], classes: Sequence[str]) -> NDArray[np.int64]:
    """Return the number of each label's class, `[labels]`. Names are compared without regard to case.

    Raises:
        DataError: A label is none of the classes.
    """
    known = tuple(map(str, range(len(classes)))) if are_numbers(labels) else classes
    places = {name.casefold(): number for number, name in enumerate(known)}
    for label in labels:
        if label.casefold() not in places:
            raise DataError(
                f"the data has the label {label!r}, which is no class{nearest(label, known)}",
                possible=f"{len(known)} classes: " + ", ".join(known[:20]) + ", ..." * (len(known) > 20),
                change="correct the labels, or give a model with these classes",
            )
    return np.array([places[label.casefold()] for label in labels], dtype=np.int64)


class Labels:
    """The labels that are found in rows, one after another.

    Args:
        column: The column of the labels.
        known: The labels in their order, if no others may come.

    Attributes:
        places: Place of each label, in the order in which they appear.
        trained: The labels of training documents.
    """

    def __init__(self, column: str, known: Sequence[str] = ()) -> None:
        self._column = column
        self._is_closed = bool(known)
        self.places: dict[str, int] = {label: place for place, label in enumerate(known)}
        self.trained: set[str] = set()

    def place(self, row: Row) -> tuple[str, int]:
        """Return a row's label and its place.

        Raises:
            DataError: The row has no label that stands for a class, or there are too many.
        """
        label = label_of(row.label)
        if label is None:
            raise DataError(
                f"{row.place} has {row.label!r} in the column {self._column!r}, which is no class",
                possible=f"names, or whole numbers from 0 to {MOST_CLASSES - 1}",
                change="correct or remove the row, or name the column of the labels in data.label",
            )
        if self._is_closed and label not in self.places:
            raise DataError(
                f"{row.place} has the label {label!r}, which no text for validation has",
                possible=f"the labels there, the only ones of a stream: {', '.join(list(self.places)[:20])}",
                change="name a file in data.validation that has each label, or leave out data.streaming",
            )
        place = self.places.setdefault(label, len(self.places))
        if place == MOST_CLASSES:
            raise DataError(
                f"the column {self._column!r} has more than {MOST_CLASSES} different values",
                possible="the names or numbers of classes",
                change="name the column of the labels in data.label",
            )
        return label, place

    def require_classes(self) -> None:
        """Refuse labels that no model can be trained on.

        Raises:
            DataError: A class is in validation only, or there is a single one.
        """
        missing = [label for label in self.places if label not in self.trained]
        if missing:
            raise DataError(
                f"validation has the class {missing[0]!r}, and no text to train on has it",
                possible=f"the classes of training: {', '.join(sorted(self.trained)[:20]) or 'none'}",
                change="add texts of this class to data.source, or correct the label",
            )
        if len(self.places) < 2:
            raise DataError(
                f"all texts have the label {next(iter(self.places))!r}",
                possible="labels of two classes or more",
                change="give data with more classes, or name the column of the labels in data.label",
            )
