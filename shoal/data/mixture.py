"""Several corpora with weights: each gives its share of the samples.

An epoch is just long enough to hold each sample once: the source with the most samples for its weight gives
each of them once, and the others repeat theirs, all of them equally often. A fixed permutation spreads the
sources over the epoch, so that its beginning has about the same shares; the Loader permutes it anew in each
epoch. So a position alone says which sample stands there, and a run goes on from any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.config import DataConfig
from shoal.data.corpus import Corpus, Split
from shoal.data.corpus import prepare as prepare_one
from shoal.data.packed import Packed, PackedSamples
from shoal.data.permutation import order
from shoal.data.samples import TokenSamples
from shoal.data.streamed import StreamedCorpus, prepare_streamed
from shoal.data.tokenizer import Tokenizer
from shoal.errors import ConfigError, DataError

__all__ = ["AnyCorpus", "MixedCorpus", "MixedSamples", "prepare"]

AnyCorpus: TypeAlias = "Corpus | MixedCorpus | StreamedCorpus"
"""What `prepare` returns."""

_Samples = TokenSamples | PackedSamples


def prepare(config: DataConfig) -> AnyCorpus:
    """Tokenize the sources of `config`, or find the tokens in the cache; with weights each source by itself.

    With `streaming` only the validation data is tokenized.

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
    if config.streaming:
        _require_streamable(config)
        return prepare_streamed(config)
    if not isinstance(config.source, dict):
        return prepare_one(config)
    if config.label or config.messages:
        raise DataError(
            "data.source was given as a table of weights, and its rows are labelled or conversations",
            possible="weights for texts of language models; one file, or several, for rows",
            change="give data.source as a list, or leave out data.label and data.messages",
        )
    corpora = {source: prepare_one(config.model_copy(update={"source": source})) for source in config.source}
    return MixedCorpus(corpora, config.source)


def _require_streamable(config: DataConfig) -> None:
    others = [f"data.{name}" for name in ("label", "messages") if getattr(config, name)]
    if isinstance(config.source, dict):
        others.append("weights")
    if others:
        raise ConfigError(
            f"data.streaming=true was given with {' and '.join(others)}",
            possible="streaming for texts of language models, without weights",
            change="leave out data.streaming, or the others",
        )
    if not config.validation:
        raise ConfigError(
            "data.streaming=true was given without data.validation, and a stream sets no documents aside",
            possible="a file, folder or dataset that is for validation only",
            change="name it in data.validation",
        )


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
        parts: list[_Samples] = []
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


@final
class MixedSamples:
    """Samples of several sources in the shares that weights give.

    Args:
        parts: The samples of each source.
        weights: The weight of each, positive.
    """

    deterministic = True

    def __init__(self, parts: Sequence[_Samples], weights: Sequence[float]) -> None:
        self._parts = parts
        self.all_targets_count = all(part.all_targets_count for part in parts)
        once = max(len(part) / weight for part, weight in zip(parts, weights, strict=True))
        self.counts = tuple(
            max(len(part), round(once * weight)) for part, weight in zip(parts, weights, strict=True)
        )
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor | Packed, Tensor]:
        """Return inputs and targets of the samples at `indices`, joined.

        Raises:
            IndexError: An index is not in `range(len(self))`.
        """
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"sample indices must lie in range({len(self)})")
        spread = order(0, 0, len(self), indices)
        sources = np.searchsorted(self._ends, spread, side="right")
        places, inputs, targets = [], [], []
        for source in np.unique(sources):
            rows = np.flatnonzero(sources == source)
            begin = self._ends[source] - self.counts[source]
            given, wanted = self._parts[source].batch((spread[rows] - begin) % len(self._parts[source]))
            places.append(rows)
            inputs.append(given)
            targets.append(wanted)
        back = torch.from_numpy(np.concatenate(places).argsort())
        return _joined(inputs, back), torch.cat(targets)[back]


def _joined(inputs: Sequence[Tensor | Packed], back: Tensor) -> Tensor | Packed:
    """Return the rows of all inputs as one, in their places."""
    packed = [each for each in inputs if isinstance(each, Packed)]
    if packed:
        tokens, positions = (torch.cat(each)[back] for each in zip(*packed, strict=True))
        return Packed(tokens, positions)
    return torch.cat([each for each in inputs if isinstance(each, Tensor)])[back]
