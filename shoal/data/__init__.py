"""Resumable input for language models, and for sequence classification.

A Tokenizer turns text into ids. `prepare` turns the sources of a DataConfig (files, folders, the standard
library) into a Corpus: one memory-mapped stream of ids, cut into train and validation. A sample is a
fixed-length window of a split, one labelled text or one conversation. A Loader deals samples out: one global
order, a function of seed and epoch only, whose whole state is the global position, so that a run continues
on any number of ranks. A StreamedCorpus is tokenized in chunks while a model trains. A Feed makes the next
micro-batches ahead where that changes nothing. `train/` and users' own loops call this.
"""

from shoal.data.chat import ChatSamples
from shoal.data.config import DataConfig
from shoal.data.corpus import Corpus, Split
from shoal.data.labelled import LabelledSamples, are_numbers, numbers_of, require_padding
from shoal.data.loader import Feed, Loader, Prefetcher, open_feed
from shoal.data.mixture import AnyCorpus, MixedCorpus, prepare
from shoal.data.packed import MixedSamples, Packed, PackedSamples
from shoal.data.permutation import key_of, order, seed_generators
from shoal.data.samples import (
    MapSamples,
    Samples,
    TokenSamples,
    all_targets_count,
    are_packed,
    as_samples,
    fetch,
)
from shoal.data.stream_corpus import StreamedCorpus, StreamedSamples
from shoal.data.tokenizer import Tokenizer, open_tokenizer

__all__ = [
    "AnyCorpus",
    "ChatSamples",
    "Corpus",
    "DataConfig",
    "Feed",
    "LabelledSamples",
    "Loader",
    "MapSamples",
    "MixedCorpus",
    "MixedSamples",
    "Packed",
    "PackedSamples",
    "Prefetcher",
    "Samples",
    "Split",
    "StreamedCorpus",
    "StreamedSamples",
    "TokenSamples",
    "Tokenizer",
    "all_targets_count",
    "are_numbers",
    "are_packed",
    "as_samples",
    "fetch",
    "key_of",
    "numbers_of",
    "open_feed",
    "open_tokenizer",
    "order",
    "prepare",
    "require_padding",
    "seed_generators",
]
