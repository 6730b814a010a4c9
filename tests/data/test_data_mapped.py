"""Files of ids are mapped where they are: nothing is copied, and the stream is as if they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import DataConfig, Loader, TokenSamples, prepare
from shoal.data.samples import JoinedIds

Configure = Callable[..., DataConfig]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.data())
def test_joined_arrays_read_like_one(lengths: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(lengths))
    parts = np.split(whole, np.cumsum(lengths)[:-1])
    ids = JoinedIds([part.astype(kind) for part, kind in zip(parts, ["u1", "<u2", ">i4", "i8"] * 2)])  # noqa: B905
    first, last = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=2, max_size=2)))
    part = ids[first:last]
    assert (len(ids), len(part)) == (len(whole), last - first)
    places = data.draw(st.lists(st.integers(0, max(0, last - first - 1)), max_size=9)) if last > first else []
    asked = np.array(places, dtype=np.int64)
    assert part[asked].tolist() == whole[first:last][asked].tolist()


def test_the_cache_holds_no_ids_and_samples_are_those_of_a_copy(tmp_path: Path, configure: Configure) -> None:
    generator = np.random.default_rng(0)
    folder = tmp_path / "ids"
    folder.mkdir()
    arrays = [generator.integers(60_000, size=size, dtype=np.uint16) for size in (2_000_000, 700_001, 30_000)]
    for number, ids in enumerate(arrays):
        ids.tofile(folder / f"{number}.bin")
    given = {"suffixes": (".bin",), "tokenizer": "ids:60000"}
    for _ in range(2):
        corpus = prepare(configure(folder, **given))
    on_disk = sum(file.stat().st_blocks * 512 for file in (tmp_path / "cache").iterdir())
    assert on_disk < 100_000 < sum(ids.nbytes for ids in arrays) / 50

    parts = [
        (ids[: len(ids) - round(0.05 * len(ids))], ids[len(ids) - round(0.05 * len(ids)) :]) for ids in arrays
    ]
    train, validation = (np.concatenate(each) for each in zip(*parts, strict=True))
    for split, tokens in (("train", train), ("validation", validation)):
        found = Loader(corpus.samples(split, 100), seed=1, batch_size=8).fetch(0, 500)
        expected = Loader(TokenSamples(tokens, 100), seed=1, batch_size=8).fetch(0, 500)
        assert all(one.equal(two) for one, two in zip(found, expected, strict=True))

    corpus = prepare(configure(folder / "0.bin", validation=str(folder / "2.bin"), **given))
    assert corpus.boundary(100) == 2_000_000
    assert len(corpus.samples("validation", 100)) == 299
    alone = prepare(configure(folder / "0.bin", **given))
    assert isinstance(alone.tokens, np.memmap)
    assert Path(alone.tokens.filename) == folder / "0.bin"
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(UserWarning, match="ids are checked at each start"):
        uncached = prepare(configure(folder / "0.bin", cache=tmp_path / "file", **given))
    assert isinstance(uncached.tokens, np.memmap)
