"""Streamed text: the order of a naive reference, on any number of ranks, with few chunks on disk."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import Corpus, DataConfig, Loader, StreamedSamples, open_tokenizer, order, prepare
from shoal.data.chunk_store import ChunkStore, plan_chunks
from shoal.data.sources import find_files
from shoal.data.stream_corpus import Layout, Mark, WindowOrder
from shoal.errors import DataError

Configure = Callable[..., DataConfig]

SUFFIXES = (".csv", ".jsonl", ".parquet", ".txt")


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small chunks would wait long for a disk with other work."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def write_texts(folder: Path, seed: int = 0) -> Path:
    """Files of all kinds, with long and short lines and an empty one."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    generator = np.random.default_rng(seed)

    def texts(count: int) -> list[str]:
        return ["abcdefgh"[int(each) % 8] * int(each) for each in generator.integers(1, 90, size=count)]

    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts(40)) + "\n\n")
    (folder / "b.txt").write_text("\n".join([*texts(30), "", "x" * 700, *texts(5)]))
    (folder / "c.csv").write_text("text\n" + "\n".join(texts(10)) + "\n")
    parquet.write_table(pyarrow.table({"text": texts(50)}), folder / "d.parquet", row_group_size=7)
    for number in range(12):
        (folder / f"e{number:02}.txt").write_text("\n".join(texts(2)))
    return folder


def naive_order(seed: int, sizes: list[int], width: int, epochs: int) -> list[tuple[int, int]]:
    """The chunk and the row at each position, written down at length."""
    found = []
    windows = -(-len(sizes) // width)
    for epoch in range(epochs):
        chunks = order(seed, epoch, len(sizes), np.arange(len(sizes)))
        for window in range(windows):
            held = [
                (int(chunk), row)
                for chunk in chunks[window * width : (window + 1) * width]
                for row in range(sizes[chunk])
            ]
            if held:
                number = epoch * windows + window
                found += [held[row] for row in order(~seed, number, len(held), np.arange(len(held)))]
    return found


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=12).filter(any),
    st.integers(1, 5),
    st.integers(0, 2**64),
    st.data(),
)
def test_the_order_is_that_of_a_naive_reference_from_any_position(
    sizes: list[int], width: int, seed: int, data: st.DataObject
) -> None:
    expected = naive_order(seed, sizes, width, epochs=3)
    assert sorted(expected[: sum(sizes)]) == [(c, r) for c, size in enumerate(sizes) for r in range(size)]

    def make(told: list[int]) -> WindowOrder:
        def of(chunks: np.ndarray) -> np.ndarray:
            told.extend(chunks.tolist())
            return np.array(sizes)[chunks]

        return WindowOrder(seed, len(sizes), width, of)

    begin = data.draw(st.integers(0, len(expected) - 1))
    count = data.draw(st.integers(0, len(expected) - begin))
    first = make([])
    chunks, rows = first.places(begin, count)
    assert list(zip(chunks.tolist(), rows.tolist(), strict=True)) == expected[begin : begin + count]

    asked: list[int] = []
    other = make(asked)
    other.take(first.mark(begin))
    chunks, rows = other.places(begin, 1)
    assert (chunks[0], rows[0]) == expected[begin]
    assert first.mark(begin) == Mark(0, 0) or len(asked) < len(sizes) * 2


@pytest.mark.parametrize("size", [50, 333, 2000, 1 << 20])
def test_chunks_hold_the_documents_of_the_whole_text_in_their_order(
    tmp_path: Path, configure: Configure, size: int
) -> None:
    folder = write_texts(tmp_path / "texts")
    config = configure(folder, suffixes=SUFFIXES)
    files = find_files(config.sources, config.suffixes)
    whole = prepare(configure(folder, suffixes=SUFFIXES, validation=str(folder))).tokens
    whole = whole[: len(whole) // 2]  # the other half is for validation
    chunks = plan_chunks(files, size)
    store = ChunkStore(tmp_path / "store", chunks, config, keep=len(chunks))
    assert np.array_equal(np.concatenate([store.tokens(each) for each in range(len(chunks))]), whole)
    if size == 333:
        assert len(chunks) > 12
        assert max(store.lengths) < 2 * 333 + 700


def test_every_number_of_ranks_and_workers_sees_the_samples_of_the_reference(
    tmp_path: Path, configure: Configure, word_tokenizer: Path
) -> None:
    lines = [" ".join(["fish"] * (each % 9 + 1) + ["swim"] * (each % 4)) for each in range(600)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    sequence, width = 6, 3
    config = configure(tmp_path / "text.jsonl", tokenizer=str(word_tokenizer))
    chunks = plan_chunks(find_files(config.sources, config.suffixes), 1500)
    tokenizer = open_tokenizer(str(word_tokenizer))
    form = Corpus(np.empty(0, dtype=np.uint8), 0, None, "", tokenizer)
    samples = []
    for workers in (0, 2):
        settings = config.model_copy(update={"workers": workers})
        store = ChunkStore(tmp_path / f"store{workers}", chunks, settings, keep=3 * width)
        layout = Layout(ends=(len(chunks),), weights=(1.0,), shares=np.zeros(len(chunks)))
        samples.append(StreamedSamples(store, layout, form, sequence, width=width))

    # Each chunk by itself, from the lines that begin in it.
    raw = (tmp_path / "text.jsonl").read_bytes()
    tokens: list[list[int]] = [[] for _ in chunks]
    begin = 0
    for line in raw.splitlines(keepends=True):
        ids = tokenizer.encode(json.loads(line)["text"]).tolist()
        tokens[begin // 1500] += [*ids, tokenizer.end_of_text]
        begin += len(line)
    sizes = [max(0, len(each) - 1) // sequence for each in tokens]
    assert len(chunks) > 4 * width
    expected = [
        tokens[chunk][row * sequence : (row + 1) * sequence + 1]
        for chunk, row in naive_order(5, sizes, width, epochs=2)
    ]
    steps = len(expected) // 8
    for each, ranks in ((samples[0], 1), (samples[0], 2), (samples[1], 4), (samples[1], 1)):
        loader = Loader(each, seed=5, batch_size=8)
        streams = [
            list(islice(loader.stream(0, rank, ranks, 2), steps * (4 // ranks))) for rank in range(ranks)
        ]
        seen = []
        for micro in range(steps * (4 // ranks)):
            for stream in streams:
                inputs, targets = stream[micro]
                seen += torch_rows(inputs, targets)
        assert seen == expected[: len(seen)]
        assert len(seen) > 8 * (steps - 1)
    assert len(samples[0]) == sum(sizes)
    for each in ("store0", "store2"):
        # Threads still make chunks ahead: each is there for a moment before the oldest one is deleted.
        end = time.monotonic() + 120
        while len(kept := list((tmp_path / each).glob("chunk-*.tokens"))) > 3 * width:
            assert time.monotonic() < end, kept
            time.sleep(0.01)


def torch_rows(inputs, targets) -> list[list[int]]:
    return [[*one.tolist(), int(two[-1])] for one, two in zip(inputs, targets, strict=True)]


def test_a_run_goes_on_elsewhere_without_the_chunks_before(tmp_path: Path, configure: Configure) -> None:
    folder = write_texts(tmp_path / "texts")
    fields = {"suffixes": SUFFIXES, "validation": str(folder / "c.csv"), "streaming": True, "window": "1KiB"}

    def samples(cache: str) -> StreamedSamples:
        return prepare(configure(folder, cache=tmp_path / cache, **fields)).samples("train", 8)

    first = Loader(samples("here"), seed=3, batch_size=4)
    whole = first.indices(0, 900)
    chunks = len(np.unique(whole >> 32))
    assert chunks > 4 * 16
    state = json.loads(json.dumps(first.state(600)))
    there = samples("there")
    second = Loader(there, seed=3, batch_size=4)
    second.take(state)
    assert second.indices(600, 4).tolist() == whole[600:604].tolist()
    assert (there._store.lengths >= 0).sum() <= 1 + 2 * 16
    for one, two in zip(first.fetch(600, 40), second.fetch(600, 40), strict=True):
        assert one.equal(two)


def test_streamed_documents_are_kept_apart(tmp_path: Path, configure: Configure) -> None:
    folder = write_texts(tmp_path / "texts")
    corpus = prepare(
        configure(folder, suffixes=SUFFIXES, validation=str(folder), streaming=True, boundaries=True)
    )
    inputs, targets = Loader(corpus.samples("train", 16), seed=0, batch_size=4).fetch(0, 64)
    for tokens, positions, wanted in zip(*inputs, targets, strict=True):
        place = 0
        for token, position, target in zip(tokens, positions, wanted, strict=True):
            assert position == place
            assert (target == -100) == (token == 0)
            place = 0 if token == 0 else place + 1


def test_errors_of_a_stream_say_what_was_wrong(tmp_path: Path, configure: Configure) -> None:
    folder = write_texts(tmp_path / "texts")
    given = {"suffixes": SUFFIXES, "validation": str(folder / "c.csv"), "streaming": True}
    with pytest.raises(DataError, match="no chunk of the text has the 1001 tokens"):
        prepare(configure(folder, **given, window="4KiB")).samples("train", 1000)
    (folder / "a.jsonl").write_text('{"text": "fine"}\n' * 90 + "wrong\n")
    corpus = prepare(configure(folder, **given, window="4KiB"))
    with pytest.raises(DataError, match=r"the line at byte 1530 of '.*a.jsonl' is not JSON"):
        Loader(corpus.samples("train", 8), seed=0, batch_size=4).indices(0, 2000)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("not a folder")
    with pytest.raises(DataError, match="tokens cannot be kept in"):
        prepare(configure(folder, **given))
