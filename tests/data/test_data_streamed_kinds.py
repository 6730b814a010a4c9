"""Streams of each kind of data: the samples of the whole corpus, each once, when the ranks change midway."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_stand_ins import conversations, write_jsonl
from chat_stand_ins import write_tokenizer as write_chat_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from labelled_stand_ins import texts, write_tokenizer, write_tsv
from test_data_streamed import SUFFIXES, write_texts

from shoal.data import Corpus, DataConfig, Loader, prepare
from shoal.data.stream_corpus import StreamedCorpus, length_aside, shares_aside
from shoal.errors import ConfigError, DataError

Configure = Callable[..., DataConfig]


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def rows_of(batch: Any) -> Iterator[bytes]:
    """Each sample of a batch as bytes."""
    inputs, targets = batch
    tensors = [*inputs.values(), targets] if isinstance(inputs, dict) else [inputs, targets]
    for row in zip(*tensors, strict=True):
        yield b"|".join(each.numpy().tobytes() for each in row)


def all_rows(samples: Any) -> Iterator[bytes]:
    return rows_of(samples.batch(np.arange(len(samples))))


def dealt(loader: Loader[Any], position: int, ranks: int, batches: int) -> list[bytes]:
    """The samples that all ranks take, batch by batch."""
    found = []
    streams = [loader.stream(position, rank, ranks, 1) for rank in range(ranks)]
    for _ in range(batches * loader.batch_size // ranks):
        for stream in streams:
            for batch in islice(stream, 1):
                found += rows_of(batch)
    return found


def epoch_with_a_change(
    open_corpus: Callable[[str], StreamedCorpus], sequence: int, count: int, stop: int, ranks: list[int]
) -> list[bytes]:
    """One epoch of `count` samples: on some ranks here, then from the state of the data on others there."""
    first = Loader(open_corpus("here").samples("train", sequence), seed=7, batch_size=4)
    seen = dealt(first, 0, ranks[0], stop)
    state = json.loads(json.dumps(first.state(stop * 4)))
    second = Loader(open_corpus("there").samples("train", sequence), seed=7, batch_size=4)
    second.take(state)
    seen += dealt(second, stop * 4, ranks[1], count // 4 - stop)
    if count % 4:
        seen += rows_of(second.fetch(count // 4 * 4, count % 4))
    assert len(seen) == count
    return seen


def write_pairs(path: Path, count: int) -> Path:
    rows = [{"one": f"{text} ?", "two": f"{text} !", "label": label} for text, label in texts(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("kind", ["labels", "pairs", "conversations"])
def test_rows_come_once_and_those_for_validation_not_at_all(
    tmp_path: Path, configure: Configure, kind: str
) -> None:
    pytest.importorskip("transformers")
    if kind == "conversations":
        tokenizer = write_chat_tokenizer(tmp_path / "tokenizer")
        source = write_jsonl(tmp_path / "rows.jsonl", conversations(203))
        fields: dict[str, object] = {"messages": "messages"}
    elif kind == "pairs":
        tokenizer = write_tokenizer(tmp_path / "tokenizer")
        source = write_pairs(tmp_path / "rows.jsonl", 203)
        fields = {"field": "one", "pair": "two", "label": "label"}
    else:
        tokenizer = write_tokenizer(tmp_path / "tokenizer")
        source = write_tsv(tmp_path / "rows.tsv", texts(203))
        fields = {"field": "sentence", "label": "label"}
    fields["tokenizer"] = str(tokenizer)
    whole = prepare(configure(source, **fields))
    assert isinstance(whole, Corpus)
    expected = Counter(row for split in ("train", "validation") for row in all_rows(whole.samples(split, 24)))

    def open_corpus(cache: str, **more: object) -> StreamedCorpus:
        given = {"streaming": True, "window": "6KiB", "validation_fraction": 0.2, **fields, **more}
        corpus = prepare(configure(source, cache=tmp_path / cache, **given))
        assert isinstance(corpus, StreamedCorpus)
        assert set(corpus.labels) == set(whole.labels)
        return corpus.with_classes(whole.classes)

    held_out = open_corpus("first").samples("validation", 24)
    aside = Counter(all_rows(held_out))
    assert 0.1 < aside.total() / expected.total() < 0.3
    trained = expected - aside
    assert trained.total() + aside.total() == expected.total() == 203
    seen = epoch_with_a_change(open_corpus, 24, trained.total(), stop=17, ranks=[2, 4])
    assert Counter(seen) == trained

    # Data of its own for validation leaves all rows to train on; workers change nothing.
    more = {"validation": str(source), "workers": 0 if kind == "conversations" else 2}
    again = epoch_with_a_change(lambda cache: open_corpus(cache, **more), 24, 203, stop=20, ranks=[4, 1])
    assert Counter(again) == expected


def test_ids_and_text_take_turns_and_each_source_gives_every_sample_once_an_epoch(
    tmp_path: Path, configure: Configure
) -> None:
    folder = write_texts(tmp_path / "texts")
    ids = np.random.default_rng(0).integers(1, 256, size=9000, dtype=np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    weights = {str(folder): 3.0, str(tmp_path / "ids.npy"): 1.0}
    given = {"suffixes": SUFFIXES, "streaming": True, "window": "8KiB", "validation": str(folder / "a.jsonl")}

    def open_corpus(cache: str) -> StreamedCorpus:
        return prepare(DataConfig(source=weights, cache=tmp_path / cache, **given))

    corpus = open_corpus("here")
    chunks = [corpus.store.tokens(number) for number in range(len(corpus.store))]
    ends = corpus.layout.ends
    assert np.array_equal(np.concatenate(chunks[ends[0] :]), ids)
    samples = [
        [
            chunk[row * 8 : row * 8 + 8].astype(np.int64).tobytes()
            + b"|"
            + chunk[row * 8 + 1 : row * 8 + 9].astype(np.int64).tobytes()
            for chunk in part
            for row in range((len(chunk) - 1) // 8)
        ]
        for part in (chunks[: ends[0]], chunks[ends[0] :])
    ]
    count = 4 * max(4 * len(samples[0]) // 3, 4 * len(samples[1])) // 4 + 8
    seen = epoch_with_a_change(open_corpus, 8, count, stop=count // 9, ranks=[4, 2])
    numbers = Loader(corpus.samples("train", 8), seed=7, batch_size=4).indices(0, count) >> 32
    for source, expected in enumerate(samples):
        mine = [row for row, number in zip(seen, numbers, strict=True) if (number >= ends[0]) == source]
        share = [0.75, 0.25][source]
        assert abs(len(mine) - share * count) <= 1024 * min(share, 1 - share)
        for begin in range(0, len(mine) - len(expected) + 1, len(expected)):
            assert Counter(mine[begin : begin + len(expected)]) == Counter(expected)


@settings(max_examples=100)
@given(st.integers(1, 300), st.floats(0.001, 0.999), st.integers(0, 10_000))
def test_the_share_of_all_data_is_set_aside_if_16_chunks_hold_as_much(
    chunks: int, fraction: float, length: int
) -> None:
    shares = shares_aside(chunks, fraction)
    assert np.count_nonzero(shares) == min(16, chunks)
    assert shares.sum() == pytest.approx(min(16, chunks, fraction * chunks))
    aside = length_aside(np.full(chunks, length), shares)
    assert np.array_equal(aside > 0, (shares > 0) & (length > (shares < 1)))
    assert (np.abs(aside - shares * length) <= 1).all()
    assert (aside[shares < 1] < max(1, length)).all()


@pytest.mark.parametrize("chunks", [1, 10, 100, 400])
def test_what_is_set_aside_is_not_trained_on(tmp_path: Path, configure: Configure, chunks: int) -> None:
    ids = np.arange(40_000, dtype=np.uint16)  # each once
    np.save(tmp_path / "ids.npy", ids)
    size = 16 * (ids.nbytes + 128) // chunks
    given = {"tokenizer": "ids:40000", "window": f"{size + 16}B", "validation_fraction": 0.08}
    corpus = prepare(configure(tmp_path / "ids.npy", streaming=True, **given))
    aside = set(corpus.held_out[0].tokens.tolist())
    assert len(aside) == pytest.approx(40_000 * min(0.08, 16 / chunks), rel=0.02)
    samples = corpus.samples("train", 9)
    loader = Loader(samples, seed=0, batch_size=1)
    loader.indices(0, 40_000 // 10)
    inputs, targets = loader.fetch(0, len(samples))
    seen = {*inputs.flatten().tolist(), *targets.flatten().tolist()}
    assert not seen & aside
    assert len(seen) + len(aside) >= 40_000 - 9 * chunks
    assert len(corpus.samples("validation", 9)) == (len(aside) - 1) // 9


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1000))
def test_remote_data_is_streamed_as_local_data(tmp_path: Path, configure: Configure, seed: int) -> None:
    fsspec = pytest.importorskip("fsspec")
    folder = tmp_path / f"texts{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    write_texts(folder, seed)
    np.save(folder / "f.npy", np.arange(1, 250))
    np.arange(3, 240, dtype="<u2").tofile(folder / "g.bin")
    remote = fsspec.filesystem("memory")
    remote.store.clear()
    remote.put(str(folder), f"/texts{seed}", recursive=True)
    given = {"suffixes": (*SUFFIXES, ".npy", ".bin"), "streaming": True, "window": "16KiB"}
    here, there = (
        prepare(configure(source, cache=tmp_path / f"cache-{name}-{seed}", **given))
        for name, source in (("here", folder), ("there", f"memory://texts{seed}"))
    )
    assert here.fingerprint == there.fingerprint
    assert len(here.store) == len(there.store) > 10
    for number in range(len(here.store)):
        assert np.array_equal(here.store.tokens(number), there.store.tokens(number))
    assert np.array_equal(here.held_out[0].tokens, there.held_out[0].tokens)
    whole = [
        prepare(configure(source, suffixes=given["suffixes"], cache=tmp_path / f"cache-{name}-{seed}"))
        for name, source in (("here", folder), ("there", f"memory://texts{seed}"))
    ]
    assert whole[0].fingerprint == whole[1].fingerprint


@pytest.mark.long
def test_data_in_a_bucket_is_streamed_as_local_data(
    tmp_path: Path, configure: Configure, bucket: str
) -> None:
    import s3fs

    folder = tmp_path / "texts"
    write_texts(folder, 3)
    s3fs.S3FileSystem().put(str(folder), f"{bucket}/texts", recursive=True)
    here, there = (
        prepare(configure(source, cache=tmp_path / name, streaming=True, window="16KiB", workers=2))
        for name, source in (("here", folder), ("there", f"{bucket}/texts"))
    )
    assert here.fingerprint == there.fingerprint
    batches = [Loader(each.samples("train", 32), seed=0, batch_size=16) for each in (here, there)]
    for ours, theirs in zip(*(each.fetch(0, 64) for each in batches), strict=True):
        assert torch.equal(ours, theirs)
    for each in (here, there):
        each.store.close()


def test_what_cannot_be_streamed_is_refused(tmp_path: Path, configure: Configure) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    few = write_tsv(tmp_path / "few.tsv", [("a fish", 0), ("a shoal", 1)] * 9)
    more = write_tsv(tmp_path / "more.tsv", [("a fish", 0), ("a shoal", 2)] * 9)
    labelled = {"tokenizer": tokenizer, "field": "sentence", "label": "label", "streaming": True}
    corpus = prepare(configure(more, **labelled, validation=str(few)))
    with pytest.raises(DataError, match=r"of '.*more.tsv' has the label '2', which no text for validation"):
        Loader(corpus.samples("train", 8), seed=0, batch_size=4).fetch(0, 18)
    with pytest.raises(DataError, match="all texts have the label '0'"):
        prepare(configure(write_tsv(tmp_path / "one.tsv", [("a fish", 0)] * 40), **labelled))
    (tmp_path / "text.txt").write_text("one shoal")
    with pytest.raises(DataError, match=r"has no columns, and data\.label names one"):
        prepare(configure([more, tmp_path / "text.txt"], **labelled))
    with pytest.raises(DataError, match="table of weights, and its rows are labelled"):
        prepare(DataConfig(source={str(few): 1, str(more): 2}, cache=tmp_path / "cache", **labelled))
    with pytest.raises(ConfigError, match="no room for a text"):
        prepare(configure(more, **labelled)).samples("validation", 2)
    with pytest.raises(DataError, match=r"of the data for validation: .*") as caught:
        prepare(configure(tmp_path / "text.txt", streaming=True)).samples("validation", 8)
    assert "data.validation" in caught.value.change


def test_errors_of_remote_data_name_the_url(configure: Configure) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").store.clear()
    for url, message in (
        ("memory://none", "'memory://none' does not exist, or holds no file with text"),
        ("nothing://texts", "'nothing://texts' is no file system that is known"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(configure(url))
