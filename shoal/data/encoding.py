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

from shoal.data.chat_template import ChatTemplate, template_identity
from shoal.data.config import DataConfig
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
