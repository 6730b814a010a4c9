"""Labels and classes: the values in a column of labels, and the numbers that a model predicts for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.rows import Row
from shoal.errors import DataError, nearest

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
