"""Prepares a stream: cuts its sources into chunks, and tokenizes only the validation data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.data.cache import default_directory
from shoal.data.chat import template_identity
from shoal.data.chunk_store import Chunk, ChunkStore, naming_directory, plan_chunks
from shoal.data.config import DataConfig
from shoal.data.corpus import Corpus, prepare, require_end
from shoal.data.labelled import class_names, require_padding
from shoal.data.sources import find_files
from shoal.data.stream_corpus import CHUNKS, Layout, StreamedCorpus, shares_aside, tokens_aside
from shoal.data.token_writer import StreamInfo, require_rows
from shoal.data.tokenizer import Tokenizer, open_tokenizer
from shoal.errors import DataError
from shoal.units import parse_bytes

_FORMAT = 2  # version of chunks and of their order; a new version makes other data
_KEPT_WINDOWS = 3  # the one that is read, the one that is made, and one for ranks that are behind


def prepare_streamed(config: DataConfig) -> StreamedCorpus:
    """Find the sources of `config` and cut them into chunks; tokenize only the validation data.

    Raises:
        DataError: A source or the tokenizer is missing, empty or unreadable.
        MissingExtraError: A format or the tokenizer needs an optional package.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    if config.label:
        require_padding(tokenizer)
    require_end(config, tokenizer)
    held_out = _given_validation(config)
    is_mixed = isinstance(config.source, dict)
    groups = [[source] for source in config.sources] if is_mixed else [list(config.sources)]
    weights = tuple(config.source.values()) if isinstance(config.source, dict) else (1.0,)
    chunks = [_chunks(group, config) for group in groups]
    shares = [
        np.zeros(len(each)) if held_out else shares_aside(len(each), config.validation_fraction)
        for each in chunks
    ]

    data = [
        _FORMAT,
        tokenizer.identity,
        [config.field, config.label, config.pair],
        [config.messages, template_identity(config.tokenizer)] if config.messages else None,
        config.dtype,
        parse_bytes(config.window),
        held_out.labels if held_out else config.validation_fraction,
        weights,
        [
            (len(each), list(dict.fromkeys((file.name, file.size) for chunk in each for file in chunk)))
            for each in chunks
        ],
    ]
    fingerprint = hashlib.sha256(json.dumps(data).encode()).hexdigest()
    files = (file for each in chunks for chunk in each for file in chunk)
    places = list(dict.fromkeys((file.place, file.modified) for file in files))
    key = hashlib.sha256(json.dumps([fingerprint, places]).encode()).hexdigest()[:32]
    directory = _directory(config) / f"stream-{key}"

    if held_out:
        validation = [held_out]
    else:
        with naming_directory(directory):
            validation = [
                _corpus(
                    config, tokenizer, *tokens_aside(directory, f"aside-{number}", *each, config, tokenizer)
                )
                for number, each in enumerate(zip(chunks, shares, strict=True))
            ]
    # A chunk that is set aside whole is not in the training data.
    trained = [np.flatnonzero(each < 1) for each in shares]
    layout = Layout(
        ends=tuple(np.cumsum([len(each) for each in trained]).tolist()),
        weights=weights,
        shares=np.concatenate([share[kept] for share, kept in zip(shares, trained, strict=True)]),
    )
    store = ChunkStore(
        directory,
        [each[number] for each, kept in zip(chunks, trained, strict=True) for number in kept],
        config,
        _KEPT_WINDOWS * CHUNKS * len(chunks),
        validation[0].labels,
    )
    return StreamedCorpus(store=store, layout=layout, held_out=tuple(validation), fingerprint=fingerprint)


def _given_validation(config: DataConfig) -> Corpus | None:
    """Return the data that is given for validation, tokenized; None if none is."""
    if not config.validation:
        return None
    only = {"source": config.validation, "validation": "", "validation_fraction": 0.0}
    return prepare(config.model_copy(update=only))


def _chunks(sources: Sequence[str], config: DataConfig) -> list[Chunk]:
    files = find_files(sources, config.suffixes)
    for key in ("label", "messages"):
        if getattr(config, key):
            for file in files:
                require_rows(file, key)
    return plan_chunks(files, max(1, parse_bytes(config.window) // CHUNKS), config.dtype)


def _directory(config: DataConfig) -> Path:
    try:
        return config.cache.expanduser() if config.cache else default_directory()
    except OSError as error:
        raise DataError(
            f"there is no folder for tokens: {error}",
            possible="a folder that this user may write",
            change="set data.cache",
        ) from error


def _corpus(
    config: DataConfig, tokenizer: Tokenizer, info: StreamInfo, tokens: NDArray[np.integer]
) -> Corpus:
    """Return tokens that were set aside as a corpus."""
    labels = tuple(info.labels)
    return Corpus(
        tokens,
        0,
        None,
        info.fingerprint,
        tokenizer,
        labels,
        class_names(labels) if labels else (),
        bool(config.messages),
        tokenizer.end_of_text if config.boundaries else None,
    )
