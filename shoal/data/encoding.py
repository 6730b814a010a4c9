"""Encodes texts and conversations in order, in this process or in workers.

An item is a context and a payload. A payload is a text, a conversation with its place, or ids or None, which
are passed through. The context stays in this process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from shoal.data.chat import ChatTemplate, template_identity
from shoal.data.config import DataConfig
from shoal.data.remote import RemoteIds, naming_remote, open_remote
from shoal.data.rows import holds_rows, naming, opened, read_rows
from shoal.data.sources import SourceFile
from shoal.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from shoal.data.workers import Workers
from shoal.errors import DataError

_BATCH_BYTES = 1 << 18
_OTHER_BYTES = 1 << 12  # counted for a conversation, whose length nothing tells

Context = TypeVar("Context")
Ids = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation, and the place of its row for errors."""

    messages: Any
    place: str


Payload = str | bytes | Conversation | Ids | None


def encoded(
    items: Iterator[tuple[Context, Payload]], config: DataConfig, tokenizer: Tokenizer, workers: int = 0
) -> Iterator[tuple[Context, Ids | None]]:
    """Yield the context and the ids of each item, in order.

    Args:
        items: The items. Texts are encoded by the tokenizer, and conversations by its chat template.
        config: The configuration, which names the tokenizer.
        tokenizer: The tokenizer.
        workers: Number of processes that encode; 0 for none beside this one.

    Raises:
        DataError: A text or a conversation cannot be encoded, or a worker ended.
    """
    batches = _batches(items)
    if not workers or not (config.messages or isinstance(tokenizer, FileTokenizer)):
        encode = _Encoder(tokenizer, _template(config.tokenizer) if config.messages else None)
        for batch in batches:
            encoded_batch = encode([payload for _, payload in batch])
            yield from zip((context for context, _ in batch), encoded_batch, strict=True)
        return
    sent: deque[list[tuple[Context, Payload]]] = deque()

    def payloads() -> Iterator[list[Payload]]:
        for batch in batches:
            sent.append(batch)
            yield [None if isinstance(payload, np.ndarray) else payload for _, payload in batch]

    make = partial(_open_encoder, config.tokenizer, bool(config.messages))
    with Workers[list[Payload], list[Ids | None]](workers, make) as pool:
        for results in pool.map(payloads()):
            for (context, payload), ids in zip(sent.popleft(), results, strict=True):
                yield context, payload if isinstance(payload, np.ndarray) else ids


def _batches(items: Iterator[tuple[Context, Payload]]) -> Iterator[list[tuple[Context, Payload]]]:
    """Yield the items in lists that hold enough text to be worth a message to a worker."""
    batch: list[tuple[Context, Payload]] = []
    size = 0
    for context, payload in items:
        batch.append((context, payload))
        size += len(payload) if isinstance(payload, str | bytes) else _OTHER_BYTES
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _open_encoder(tokenizer: str, has_conversations: bool) -> _Encoder:
    return _Encoder(open_tokenizer(tokenizer), _template(tokenizer) if has_conversations else None)


def _template(tokenizer: str) -> ChatTemplate:
    return _open_template(tokenizer, template_identity(tokenizer))


@lru_cache(maxsize=1)  # loading it takes longer than to encode a chunk of a stream
def _open_template(tokenizer: str, _: str) -> ChatTemplate:
    return ChatTemplate(tokenizer)


@final
class _Encoder:
    """Encodes a list of payloads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def __call__(self, payloads: Sequence[Payload]) -> list[Ids | None]:
        return [self._encode(payload) for payload in payloads]

    def _encode(self, payload: Payload) -> Ids | None:
        if isinstance(payload, str | bytes):
            return self._tokenizer.encode(payload)
        if not isinstance(payload, Conversation):
            return payload
        assert self._template is not None
        ids, is_answer = self._template.encode(payload.messages, payload.place)
        size = self._tokenizer.vocab_size
        if ids.max(initial=0) >= size:
            raise DataError(
                f"{payload.place} has the id {ids.max()} under the chat template, and the tokenizer.json of "
                f"{self._tokenizer.name!r} has ids from 0 to {size - 1}",
                possible="a tokenizer.json with all tokens that tokenizer_config.json adds",
                change="load the tokenizer with transformers, and save it again",
            )
        marked: Ids = ids + size * is_answer
        return marked


_PROSE = ".txt", ".md", ".json"  # suffixes of files whose bytes have to be UTF-8
_COMPRESSED = ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".tgz", ".tar"
PIECE_BYTES = 1 << 20
"""Longer files of text are read in pieces of about this size, each ending with a line."""


@dataclass(slots=True)
class Document:
    """One text: a file, or a row of one."""

    name: str
    """Name, equal whenever the data is read; it decides between train and validation."""
    pieces: Iterator[str | bytes]
    """The text, cut at line ends; its bytes where the file is plain text, so that none are lost."""
    ends: bool = True
    """Whether the document ends here, once the pieces were read; False for a part of a file that goes on."""


def holds_ids(file: SourceFile) -> bool:
    """Return whether this is a file of ids (.npy, .bin), to read with `open_ids`."""
    return file.table is None and file.path.suffix in (".npy", ".bin")


def open_ids(file: SourceFile, dtype: str) -> NDArray[np.integer] | RemoteIds:
    """Return the ids of a .npy or .bin file, `[length]`, memory-mapped if it is on this machine.

    Args:
        file: The file.
        dtype: Type of the ids in a .bin file, which does not state it.

    Raises:
        DataError: The file is not a one-dimensional array of integers.
    """
    if file.url:
        return _open_remote_ids(file, dtype)
    if file.path.suffix == ".npy":
        with naming(file):
            try:
                ids: NDArray[Any] = np.lib.format.open_memmap(file.path, mode="r")
            except ValueError as error:
                raise _wrong_ids(file, f"is not a .npy file: {error}") from error
        _require_flat(file, ids.dtype, ids.shape)
        return ids
    item = _item(file, dtype)
    with naming(file):
        return np.memmap(file.path, dtype=item, mode="r")


def _open_remote_ids(file: SourceFile, dtype: str) -> RemoteIds:
    if file.path.suffix == ".bin":
        item = _item(file, dtype)
        return RemoteIds(file.url, item, 0, file.size // item.itemsize)
    with naming_remote(file.url), open_remote(file.url) as source:
        try:
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, item = read[np.lib.format.read_magic(source)](source)
        except (ValueError, KeyError) as error:
            raise _wrong_ids(file, f"is not a .npy file: {error}") from error
        _require_flat(file, item, shape)
        return RemoteIds(file.url, item, source.tell(), shape[0])


def _item(file: SourceFile, dtype: str) -> np.dtype[Any]:
    """Return the type of the ids of a .bin file."""
    item = np.dtype(dtype).newbyteorder("<")
    if file.size % item.itemsize:
        raise _wrong_ids(file, f"is {file.size} bytes long, which is not a whole number of {dtype} values")
    return item


def _require_flat(file: SourceFile, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if len(shape) != 1 or dtype.kind not in "iu":
        raise _wrong_ids(file, f"holds {dtype} of shape {list(shape)}")


def read_documents(file: SourceFile, field: str) -> Iterator[Document]:
    """Yield the documents of a file: one per row of a file or dataset of rows, else the whole file.

    Read the pieces of a document before you ask for the next document.

    Args:
        file: The file.
        field: The column, or the field of a .jsonl line, that holds the text.

    Raises:
        DataError: The file cannot be read, does not hold text in `field`, is compressed, or is a .txt, .md or
            .json file in another encoding than UTF-8.
        MissingExtraError: Parquet needs the package `pyarrow`.
    """
    if not holds_rows(file):
        _require_plain(file)
        document = Document(file.name, iter(()))
        document.pieces = _read_text(file, document)
        yield document
        return
    for row in read_rows(file, field):
        yield Document(f"{file.name}#{row.number}", iter((row.text,)))


def _read_text(file: SourceFile, document: Document) -> Iterator[bytes]:
    with opened(file) as (source, end):
        while end is None or source.tell() < end:
            piece = source.read(PIECE_BYTES if end is None else min(PIECE_BYTES, end - source.tell()))
            if not piece:
                break
            piece = piece if piece.endswith(b"\n") else piece + source.readline()
            if file.path.suffix.lower() in _PROSE:
                _require_utf8(file, piece, source.tell() - len(piece))
            yield piece
        document.ends = source.tell() >= file.size


def _require_plain(file: SourceFile) -> None:
    """Check that a file is no archive, whose bytes are not those of the text."""
    if file.path.suffix.lower() in _COMPRESSED:
        raise DataError(
            f"{file.place!r} is compressed or an archive, and its bytes would be read as text",
            possible="files of text, and rows in .jsonl, .csv, .tsv and .parquet files",
            change="unpack it first; or give it another suffix, so that its bytes are read as they are",
        )


def _require_utf8(file: SourceFile, piece: bytes, begin: int) -> None:
    """Check that a piece of a file, of whole lines, is text in UTF-8 without zero bytes."""
    try:
        piece.decode("utf-8")
        place = piece.find(b"\0")  # as in UTF-16 without a mark at its beginning
    except UnicodeDecodeError as error:
        place = error.start
    if place >= 0:
        raise DataError(
            f"{file.place!r} is no text in UTF-8: its byte {begin + place} is {piece[place]:#04x}",
            possible=f"text in UTF-8 in files that end in {', '.join(_PROSE)}",
            change="convert it, such as by iconv -f LATIN1 -t UTF-8; or give it another suffix, so that its "
            "bytes are read as they are",
        )


def _wrong_ids(file: SourceFile, reason: str) -> DataError:
    return DataError(
        f"{file.place!r} {reason}",
        possible="a one-dimensional .npy array of integers, or a raw .bin file of data.dtype",
        change="write the ids as one flat array, or correct data.dtype",
    )
