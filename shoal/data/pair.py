"""Pairs of texts: what a model expects around and between two texts, and how much of each fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class PairForm:
    """What a model of two texts expects, such as [CLS] first [SEP] second [SEP].

    Attributes:
        ids: The ids before the first text, between the texts, and after the second.
        types: The types of all tokens in their order: of the ids before, of each token of the first text, of
            the ids between, of each token of the second text, of the ids after.
    """

    ids: tuple[_Ids, _Ids, _Ids]
    types: tuple[_Ids, int, _Ids, int, _Ids]

    @property
    def added(self) -> int:
        """The number of ids that are no token of a text."""
        return sum(map(len, self.ids))


def find_pair_form(tokenizer: Any) -> PairForm:
    """Return the form in which a tokenizer of the package `tokenizers` writes two texts."""
    encoded = tokenizer.encode("a", "a", add_special_tokens=True)
    ids, types, texts = encoded.ids, encoded.type_ids, encoded.sequence_ids
    if 0 not in texts or 1 not in texts:
        return PairForm(((), (), ()), ((), 0, (), 0, ()))
    first, second = texts.index(0), texts.index(1)
    end_of_first, end_of_second = first + texts.count(0), second + texts.count(1)
    between = slice(end_of_first, second)
    return PairForm(
        (ids[:first], ids[between], ids[end_of_second:]),
        (types[:first], types[first], types[between], types[second], types[end_of_second:]),
    )


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts are kept, so that both fit.

    The longer text is cut until both are equally long; then both are cut. Where `room` is odd, the text
    that was longer keeps one more, or the second of two equally long texts: `longest_first` of the package
    `tokenizers` does this.

    Args:
        first: Tokens of the first text.
        second: Tokens of the second text.
        room: Tokens that both may have together.
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (room - shorter, shorter) if first > second else (shorter, room - shorter)
