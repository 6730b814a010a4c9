"""Tokenizers: text to ids and back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError, MissingExtraError, nearest

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


_PADDING_NAMES = ("[PAD]", "<pad>", "<|pad|>", "<|finetune_right_pad_id|>")
"""The first of these that a tokenizer file holds is its padding token, if nothing else says which."""

_END_OF_TEXT_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eos|>",
    "<eos>",
    "</s>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001  (DeepSeek's own spelling)
    "[EOS]",
    "[SEP]",
)
"""The first of these that a tokenizer file holds ends a document."""


class Tokenizer(Protocol):
    """Turns text into ids, and ids into text."""

    @property
    def name(self) -> str:
        """Name in the configuration."""
        ...

    @property
    def identity(self) -> str:
        """Text that differs between tokenizers that give different ids."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number that is above every id."""
        ...

    @property
    def end_of_text(self) -> int | None:
        """The id that ends each document; None if documents cannot be separated."""
        ...

    @property
    def padding(self) -> int | None:
        """The id that fills up short texts; None if there is none."""
        ...

    @property
    def around(self) -> tuple[Sequence[int], Sequence[int]]:
        """The ids that models of single texts expect before a text and after it, such as [CLS] and [SEP]."""
        ...

    @property
    def pair(self) -> PairForm:
        """The ids that models of two texts expect around and between them."""
        ...

    def encode(self, text: str | bytes) -> NDArray[np.integer]:
        """Return the ids of `text`, `[length]`; bytes that are not UTF-8 are replaced if necessary."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        ...


@final
class ByteTokenizer:
    """Each byte of the UTF-8 text is an id; byte 0, which text does not use, ends a document, and pads."""

    name = "bytes"
    identity = "bytes"
    vocab_size = 256
    end_of_text = padding = 0
    around: tuple[Sequence[int], Sequence[int]] = (), ()
    pair = PairForm(((), (0,), ()), ((), 0, (0,), 1, ()))

    def encode(self, text: str | bytes) -> NDArray[np.uint8]:
        """Return the bytes, `[length]`, UTF-8 or not; lone surrogates in a str become "?"."""
        return np.frombuffer(_to_bytes(text), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these bytes; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: An id is not in `range(256)`.
        """
        return bytes(ids).decode("utf-8", errors="replace")


@final
class IdTokenizer:
    """Ids that were made elsewhere, written as decimal numbers: for .npy and .bin files without a tokenizer.

    Args:
        vocab_size: Number of ids: every id is below it.
    """

    end_of_text = padding = None
    around: tuple[Sequence[int], Sequence[int]] = (), ()
    pair = PairForm(((), (), ()), ((), 0, (), 1, ()))

    def __init__(self, vocab_size: int) -> None:
        self.name = self.identity = f"ids:{vocab_size}"
        self.vocab_size = vocab_size

    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """Return the numbers in `text`, `[length]`, which spaces separate.

        Raises:
            DataError: The text holds something else, or a number that is not an id.
        """
        words = _to_bytes(text).decode("utf-8", errors="replace").split()
        for word in words:
            if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size):
                raise DataError(
                    f"{word!r} is not an id of the tokenizer {self.name!r}",
                    possible=f"numbers from 0 to {self.vocab_size - 1}, separated by spaces",
                    change="write ids, or give the tokenizer that reads text",
                )
        return np.array([int(word) for word in words], dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the numbers, separated by spaces."""
        return " ".join(str(int(one)) for one in ids)


@final
class FileTokenizer:
    """A Hugging Face `tokenizers` file.

    Args:
        path: The file, or a folder that holds a `tokenizer.json`.

    Raises:
        DataError: The file is missing, is not a tokenizer, or has no token that ends a text.
        MissingExtraError: The package `tokenizers` is not installed.
    """

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = file.read_bytes()
        except OSError as error:
            hint = nearest(str(path), ["bytes"])
            raise DataError(
                f"the tokenizer {str(file)!r} cannot be read: {error.strerror}{hint}",
                possible="'bytes', 'ids:N', or the path of a tokenizer.json",
                change="correct the path, or use 'bytes'",
            ) from error
        self.name = str(path)
        self.identity = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self._tokenizer = _load(content, file)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        self.end_of_text = _find_end_of_text(vocabulary, file)
        self.padding = _find_padding(content, vocabulary, file)
        self.around = _find_around(self._tokenizer)
        self.pair = find_pair_form(self._tokenizer)

    def encode(self, text: str | bytes) -> NDArray[np.uint32]:
        """Return the ids of `text`, `[length]`, without the tokens that some tokenizers add around it."""
        clean = _to_bytes(text).decode("utf-8", errors="replace")
        return np.array(self._tokenizer.encode(clean, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` with special tokens; an id that the file does not have gives no text."""
        text: str = self._tokenizer.decode([int(one) for one in ids], skip_special_tokens=False)
        return text


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer that a configuration names.

    Args:
        name: "bytes", "ids:N", or the path of a Hugging Face `tokenizers` file.

    Raises:
        DataError: There is no such tokenizer, or it cannot be used.
        MissingExtraError: A tokenizer file needs the package `tokenizers`.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("ids:"):
        size = name.removeprefix("ids:")
        if not (size.isascii() and size.isdigit() and 1 <= int(size) <= 1 << 32):
            raise DataError(
                f"the tokenizer {name!r} has no vocabulary size",
                possible="'ids:N', with N from 1 to 2**32",
                change="write the size of the vocabulary, as in 'ids:50257'",
            )
        return IdTokenizer(int(size))
    return FileTokenizer(Path(os.path.expanduser(name)))


def _to_bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", errors="replace") if isinstance(text, str) else text


def _load(content: bytes, file: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("a tokenizer file", package="tokenizers", extra="hf") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(
            f"{str(file)!r} is not a tokenizer: {error}",
            possible="a tokenizer.json as the package `tokenizers` writes it",
            change="give the tokenizer.json of a model, or use 'bytes'",
        ) from error
    # These settings are for sentence models: they would truncate or pad documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _find_padding(content: bytes, vocabulary: dict[str, int], file: Path) -> int | None:
    """Return the padding id: as the file tells, or the tokenizer_config.json beside it, or by its name."""
    told = [(json.loads(content).get("padding") or {}).get("pad_token")]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        beside = json.loads(file.with_name("tokenizer_config.json").read_text(encoding="utf-8"))
        token = beside.get("pad_token")
        told.append(token.get("content") if isinstance(token, dict) else token)
    return next((vocabulary[name] for name in (*told, *_PADDING_NAMES) if name in vocabulary), None)


def _find_around(tokenizer: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ids that the tokenizer adds before a text and after it."""
    encoded = tokenizer.encode("a", add_special_tokens=True)
    own = [place for place, is_added in enumerate(encoded.special_tokens_mask) if not is_added]
    if not own:
        return (), ()
    return encoded.ids[: own[0]], encoded.ids[own[-1] + 1 :]


def _find_end_of_text(vocabulary: dict[str, int], file: Path) -> int:
    for token in _END_OF_TEXT_NAMES:
        if token in vocabulary:
            return vocabulary[token]
    raise DataError(
        f"the tokenizer {str(file)!r} has no token that ends a text, so documents cannot be separated",
        possible="one of the tokens " + ", ".join(_END_OF_TEXT_NAMES),
        change="add one to the file with Tokenizer.add_special_tokens, and save it",
    )
