"""Checkpoints in an object store: whole or not there, and equal to what was on disk."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import fsspec
import pytest
from checkpoint_stand_ins import flip, share, tensors
from rank_stand_ins import on_ranks
from run_stand_ins import train

from shoal.checkpoint import Store, checkpoints, save, verify
from shoal.cli.main import main
from shoal.errors import CheckpointError, ConfigError, CorruptCheckpointError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints of two ranks."""
    path = tmp_path / "run"
    for step in (100, 200):
        on_ranks(
            2,
            lambda ranks, step=step: save(
                path / "checkpoints", step, share(tensors(step), ranks.rank, 2), {}, ranks
            ),
        )
    (path / "run.json").write_text("{}")
    return path


@pytest.fixture
def url() -> str:
    """A store of its own, in memory."""
    return f"memory://{uuid.uuid4().hex}/run"


def contents(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


def test_what_comes_back_is_what_was_put(run: Path, url: str, tmp_path: Path) -> None:
    newest, older = checkpoints(run / "checkpoints")
    store = Store(url)
    assert store.steps() == []
    for each in (older, newest):
        store.put(each)
    assert store.steps() == [newest.name, older.name]
    found = store.get(tmp_path / "back")
    assert found == tmp_path / "back" / "checkpoints" / newest.name
    assert contents(found) == contents(newest)
    assert (tmp_path / "back" / "run.json").read_text() == "{}"
    verify(found)
    assert store.get(tmp_path / "back") == found  # it is there already
    assert len(checkpoints(tmp_path / "back" / "checkpoints")) == 1


def test_older_ones_go_once_the_new_one_is_there(run: Path, url: str) -> None:
    newest, older = checkpoints(run / "checkpoints")
    store = Store(url)
    store.put(older, keep=1)
    store.put(newest, keep=1)
    assert store.steps() == [newest.name]
    files, root = fsspec.core.url_to_fs(url)
    assert [path.rpartition("/")[2] for path in files.ls(f"{root}/checkpoints", detail=False)] == [
        newest.name
    ]


@pytest.mark.parametrize("written", range(4))
def test_a_writer_that_dies_leaves_the_earlier_checkpoint(
    run: Path, url: str, written: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    newest, older = checkpoints(run / "checkpoints")
    Store(url).put(older)
    store, made = Store(url), 0
    open_file, pipe_file = store._files.open, store._files.pipe_file

    def count() -> None:
        nonlocal made
        made += 1
        if made > written:
            raise OSError("the store is gone")

    def opened(path: str, mode: str = "rb", **named):
        if mode == "wb":
            count()
        return open_file(path, mode, **named)

    def piped(path: str, value: bytes, **named):
        count()
        return pipe_file(path, value, **named)

    monkeypatch.setattr(store._files, "open", opened)
    monkeypatch.setattr(store._files, "pipe_file", piped)
    with pytest.raises(CheckpointError, match=f"{url} cannot take {newest.name}: OSError: the store is gone"):
        store.put(newest)
    monkeypatch.undo()
    assert Store(url).steps() == [older.name]
    assert contents(Store(url).get(tmp_path / "back")) == contents(older)
    Store(url).put(newest)  # what was left half written is no obstacle
    assert Store(url).steps() == [newest.name, older.name]


def test_damage_on_disk_and_in_the_store_is_named(run: Path, url: str, tmp_path: Path) -> None:
    newest, older = checkpoints(run / "checkpoints")
    store = Store(url)
    flip(newest / "rank-00001.safetensors", 100)
    with pytest.raises(CorruptCheckpointError, match=r"rank-00001\.safetensors was changed"):
        store.put(newest)
    assert store.steps() == []
    store.put(older)
    files, root = fsspec.core.url_to_fs(url)
    place = f"{root}/checkpoints/{older.name}/rank-00000.safetensors"
    damaged = bytearray(files.cat_file(place))
    damaged[-1] ^= 1
    files.pipe_file(place, bytes(damaged))
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors is not what was written"):
        store.get(tmp_path / "back")
    assert checkpoints(tmp_path / "back" / "checkpoints") == []


def test_a_store_without_checkpoints_and_unknown_ones_are_named(url: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{url} holds no complete checkpoint"):
        Store(url).get(tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(ConfigError, match="nowhere://a is no object store"):
        Store("nowhere://a")


def test_a_run_copies_its_checkpoints_and_goes_on_elsewhere(ranks, tiny_run, tmp_path: Path, capsys) -> None:
    url = f"file://{tmp_path / 'store'}"
    words = [*tiny_run, "--set", "steps=4", "--set", "checkpoint.every=2", "--run", "one"]
    train(ranks, [*words, "--set", f"checkpoint.store={url}"], tmp_path)
    here = checkpoints(tmp_path / "one" / "checkpoints")
    assert Store(url).steps() == [path.name for path in here]
    assert main(["checkpoint", "copy", url, str(tmp_path / "two")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "two" / "checkpoints" / here[0].name)
    train(ranks, ["--resume", str(tmp_path / "two"), "--set", "steps=6"], tmp_path)
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sorted(set(steps)) == [5, 6]


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("memory://a", "memory://b")])
def test_a_copy_needs_one_url_and_one_path(source: str, target: str, capsys) -> None:
    assert main(["checkpoint", "copy", source, target]) == 2
    assert "give one URL and one path" in capsys.readouterr().err


def test_a_checkpoint_that_is_being_replaced_is_not_taken_for_complete(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, older = checkpoints(run / "checkpoints")
    store = Store(url)
    store.put(older)
    store.put(newest)
    open_file = store._files.open

    def opened(path: str, mode: str = "rb", **named):
        if mode == "wb" and path.endswith("rank-00001.safetensors"):
            raise OSError("the store is gone")
        return open_file(path, mode, **named)

    monkeypatch.setattr(store._files, "open", opened)
    with pytest.raises(CheckpointError, match="the store is gone"):
        store.put(newest)
    assert Store(url).steps() == [older.name]
