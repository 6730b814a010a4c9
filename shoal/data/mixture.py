"""Prepares the data that a configuration names: one corpus, several with weights, or a stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TypeAlias, final

from shoal.data.config import DataConfig
from shoal.data.corpus import Corpus, Split
from shoal.data.corpus import prepare as prepare_one
from shoal.data.packed import MixedSamples, PackedSamples
from shoal.data.samples import TokenSamples
from shoal.data.stream_corpus import StreamedCorpus
from shoal.data.stream_setup import prepare_streamed
from shoal.data.tokenizer import Tokenizer
from shoal.errors import ConfigError, DataError

AnyCorpus: TypeAlias = "Corpus | MixedCorpus | StreamedCorpus"
"""What `prepare` returns."""


def prepare(config: DataConfig) -> AnyCorpus:
    """Tokenize the sources of `config`, or find the tokens in the cache; with weights each source by itself.

    With `streaming` only the validation data is tokenized; the rest follows while the model trains.

    Raises:
        ConfigError: Keys do not go together.
        DataError: A source or the tokenizer is missing, empty or unreadable, or rows were given weights.
        MissingExtraError: A format or the tokenizer needs an optional package.
    """
    if config.pair and not config.label:
        raise ConfigError(
            f"data.pair={config.pair} was given without data.label",
            possible="pairs of texts with labels",
            change="name the column of the labels in data.label, or leave out data.pair",
        )
    if isinstance(config.source, dict) and (config.label or config.messages):
        raise DataError(
            "data.source was given as a table of weights, and its rows are labelled or conversations",
            possible="weights for texts of language models; one file, or several, for rows",
            change="give data.source as a list, or leave out data.label and data.messages",
        )
    if config.streaming:
        return prepare_streamed(config)
    if not isinstance(config.source, dict):
        return prepare_one(config)
    corpora = {source: prepare_one(config.model_copy(update={"source": source})) for source in config.source}
    return MixedCorpus(corpora, config.source)


@final
class MixedCorpus:
    """Corpora with weights.

    Args:
        corpora: The corpora by the names of their sources, all with one tokenizer.
        weights: The weight of each.
    """

    labels: tuple[str, ...] = ()
    """Texts with weights have no labels."""

    def __init__(self, corpora: Mapping[str, Corpus], weights: Mapping[str, float]) -> None:
        self._corpora = corpora
        self._weights = [weights[source] for source in corpora]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens."""
        return next(iter(self._corpora.values())).tokenizer

    @property
    def fingerprint(self) -> str:
        """Equal for equal corpora with equal weights, in one order."""
        held = [corpus.fingerprint for corpus in self._corpora.values()]
        return hashlib.sha256(json.dumps([held, self._weights]).encode()).hexdigest()

    def samples(self, split: Split, sequence: int) -> MixedSamples:
        """Return the samples of a split.

        Args:
            split: "train" or "validation".
            sequence: Tokens that the model sees at once.

        Raises:
            ConfigError: There is no such split, or `sequence` is not positive.
            DataError: A source has too few tokens.
        """
        parts: list[TokenSamples | PackedSamples] = []
        for source, corpus in self._corpora.items():
            try:
                samples = corpus.samples(split, sequence)
            except DataError as error:
                raise DataError(
                    f"of the source {source!r}: {error.given}", possible=error.possible, change=error.change
                ) from None
            assert isinstance(samples, TokenSamples | PackedSamples)
            parts.append(samples)
        return MixedSamples(parts, self._weights)
