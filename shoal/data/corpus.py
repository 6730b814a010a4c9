"""A Corpus: all tokens as one stream, cut into train and validation, with labels or without."""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from shoal.data.cache import default_directory, read_or_write_entry
from shoal.data.chat import ChatSamples, template_identity
from shoal.data.config import DataConfig
from shoal.data.encoding import holds_ids
from shoal.data.labelled import LabelledSamples, class_names, numbers_of, require_padding
from shoal.data.packed import PackedSamples
from shoal.data.samples import JoinedIds, TokenSamples
from shoal.data.sources import SourceFile, find_files
from shoal.data.token_writer import StreamInfo, id_parts, write_stream
from shoal.data.tokenizer import Tokenizer, open_tokenizer
from shoal.errors import ConfigError, DataError, nearest

Split = Literal["train", "validation"]

_FORMAT = 4  # version of cache entries; a new version replaces all entries


@dataclass(frozen=True, eq=False)
class Corpus:
    """All tokens as one stream: the training documents, then the validation documents."""

    tokens: NDArray[np.integer] | JoinedIds
    """The stream, `[length]`, usually memory-mapped; if all sources hold ids, from their own files."""
    documents_end: int
    """Where the training documents end and the validation documents begin."""
    validation_fraction: float | None
    """The share of the stream for validation if documents cannot be separated; None if files are for it."""
    fingerprint: str
    """Equal for equal tokens and documents: tells whether a run resumes on the data it began with."""
    tokenizer: Tokenizer
    """The tokenizer that made the tokens."""
    labels: tuple[str, ...] = ()
    """The labels in the order in which they appear in the stream; empty if documents have none."""
    classes: tuple[str, ...] = ()
    """The classes that labels name, in the order of their numbers."""
    has_conversations: bool = False
    """Whether documents are conversations."""
    end: int | None = None
    """The id that ends each document, if samples keep documents apart."""
    has_types: bool = False
    """Whether the model takes `token_type_ids`, which tell the two texts of a pair apart."""

    def samples(
        self, split: Split, sequence: int
    ) -> TokenSamples | PackedSamples | LabelledSamples | ChatSamples:
        """Return the samples of a split.

        Args:
            split: "train" or "validation".
            sequence: Tokens that the model sees at once.

        Raises:
            ConfigError: There is no such split, or `sequence` is not positive.
            DataError: The split is shorter than one sample, or a label is no class.
        """
        require_split(split)
        if self.labels or self.has_conversations:
            return self._rows(split, sequence)
        if len(self.tokens) < 2 * (sequence + 1):
            raise DataError(
                f"the corpus has {len(self.tokens)} tokens; train and validation need a sample each, and "
                f"one sample takes {sequence + 1}",
                possible=f"at least {2 * (sequence + 1)} tokens",
                change="give more data, or a shorter sequence length",
            )
        boundary = self.boundary(sequence)
        return self.samples_of(
            self.tokens[:boundary] if split == "train" else self.tokens[boundary:], sequence
        )

    def samples_of(
        self, tokens: NDArray[np.integer] | JoinedIds, sequence: int, seed: int | None = None
    ) -> TokenSamples | PackedSamples | LabelledSamples | ChatSamples:
        """Return the samples of a part of the stream, or of another stream of this form.

        Args:
            tokens: The tokens, `[length]`.
            sequence: Tokens that the model sees at once.
            seed: Seed of another order of labelled texts; None for that of the tokens.

        Raises:
            ConfigError: `sequence` is not positive.
            DataError: The tokens are shorter than one sample, or a label is no class.
        """
        if self.labels:
            assert isinstance(tokens, np.ndarray)  # files of ids have no rows
            numbers = numbers_of(self.labels, self.classes)
            return LabelledSamples(tokens, numbers, self.tokenizer, sequence, seed, has_types=self.has_types)
        if self.has_conversations:
            assert isinstance(tokens, np.ndarray)
            return ChatSamples(tokens, self.tokenizer, sequence)
        samples = TokenSamples(tokens, sequence)
        return samples if self.end is None else PackedSamples(samples, self.end)

    def with_classes(self, classes: tuple[str, ...]) -> Corpus:
        """Return the corpus with its classes in this order."""
        return replace(self, classes=classes)

    def with_types(self, has_types: bool) -> Corpus:
        """Return the corpus for a model that takes `token_type_ids`, or for one that takes none."""
        return replace(self, has_types=has_types)

    def boundary(self, sequence: int) -> int:
        """Return the position in the stream where train ends and validation begins.

        It depends on the sequence length. It is the start of the validation documents, unless they are
        shorter than one sample or more than half of the stream, which happens with few documents. Then
        validation is the tail of the stream, at least one sample long. Files for validation are kept as they
        are.
        """
        length = len(self.tokens)
        if self.validation_fraction is None:
            return self.documents_end
        if sequence + 1 <= length - self.documents_end <= length / 2:
            return self.documents_end
        return length - max(sequence + 1, round(self.validation_fraction * length))

    def _rows(
        self, split: Split, sequence: int
    ) -> TokenSamples | PackedSamples | LabelledSamples | ChatSamples:
        """Return rows; labelled ones of validation are shuffled, since files may be sorted by label."""
        is_train = split == "train"
        part = self.tokens[: self.documents_end] if is_train else self.tokens[self.documents_end :]
        samples = self.samples_of(part, sequence, None if is_train else 0)
        if isinstance(samples, ChatSamples):
            samples.require_answers()
        return samples


def prepare(config: DataConfig) -> Corpus:
    """Tokenize the sources of `config`, or find the tokens in the cache.

    Tokens are kept in the cache directory under a key made of the files' paths, sizes and times, the
    tokenizer and the configuration. If all sources hold ids, these are checked once, and mapped from
    their files. Several processes may call this at the same moment; one does the work. Where the cache
    cannot be written, the tokens are kept in memory, with a warning.

    Raises:
        DataError: A source or the tokenizer is missing, empty or unreadable.
        MissingExtraError: A format or the tokenizer needs an optional package.
    """
    tokenizer = open_tokenizer(config.tokenizer)
    if config.label:
        require_padding(tokenizer)
    require_end(config, tokenizer)
    files = find_files(config.sources, config.suffixes)
    held_out = find_files([config.validation], config.suffixes) if config.validation else []

    def write(output: BinaryIO, validation_output: BinaryIO) -> StreamInfo:
        if is_mapped:
            with open(os.devnull, "r+b") as nowhere:
                info = write_stream(files, config, tokenizer, nowhere, nowhere, held_out)
            return replace(info, is_mapped=True)
        return write_stream(files, config, tokenizer, output, validation_output, held_out)

    every = [*files, *held_out]
    is_mapped = not (config.label or config.messages) and all(
        holds_ids(each) and not each.url for each in every
    )
    tokens: NDArray[np.integer] | JoinedIds
    try:
        directory = config.cache.expanduser() if config.cache else default_directory()
        info, tokens = read_or_write_entry(directory, _cache_key(files, held_out, config, tokenizer), write)
    except OSError as error:
        what = "ids are checked at each start" if is_mapped else "tokens are kept in memory"
        warnings.warn(f"{what}, because they cannot be cached: {error}", stacklevel=2)
        memory = io.BytesIO()
        info = write(memory, io.BytesIO())
        tokens = JoinedIds([]) if is_mapped else np.frombuffer(memory.getbuffer(), dtype=info.dtype)
    if is_mapped:
        parts = id_parts(files, config, held_out)
        tokens = parts[0] if len(parts) == 1 else JoinedIds(parts)
    labels = tuple(info.labels)  # a list if they were read from the cache
    return Corpus(
        tokens,
        info.boundary,
        None if held_out else config.validation_fraction,
        info.fingerprint,
        tokenizer,
        labels,
        class_names(labels) if labels else (),
        bool(config.messages),
        tokenizer.end_of_text if config.boundaries else None,
    )


def require_split(split: str) -> None:
    """Refuse a split that does not exist.

    Raises:
        ConfigError: There is no such split.
    """
    if split not in get_args(Split):
        raise ConfigError(
            f"there is no split {split!r}{nearest(split, get_args(Split))}",
            possible="train, validation",
            change="give one of these",
        )


def require_end(config: DataConfig, tokenizer: Tokenizer) -> None:
    """Refuse `boundaries` where no token ends a document.

    Raises:
        DataError: The tokenizer has none.
    """
    if config.boundaries and tokenizer.end_of_text is None:
        raise DataError(
            f"data.boundaries=true was given, and the tokenizer {tokenizer.name!r} has no token that ends a "
            "document",
            possible="'bytes', or a tokenizer file that names such a token",
            change="set data.tokenizer to the tokenizer that made the ids, or leave out data.boundaries",
        )


def _cache_key(
    files: Sequence[SourceFile], held_out: Sequence[SourceFile], config: DataConfig, tokenizer: Tokenizer
) -> str:
    """Return a key that differs whenever the tokens may differ."""
    content = {
        "format": _FORMAT,
        "tokenizer": tokenizer.identity,
        "field": config.field,
        "label": config.label,
        "pair": config.pair,
        "messages": [config.messages, template_identity(config.tokenizer)] if config.messages else None,
        "dtype": config.dtype,
        "validation_fraction": config.validation_fraction,
        "files": [
            [(file.place, file.name, file.size, file.modified) for file in some] for some in (files, held_out)
        ],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
