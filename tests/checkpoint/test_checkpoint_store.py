"""Checkpoints in an object store: whole or not there, and equal to what was on disk."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from checkpoint_stand_ins import flip, share, tensors
from rank_stand_ins import on_ranks
from run_stand_ins import train

from shoal.checkpoint import Store, checkpoints, save, verify
from shoal.checkpoint.files import write_file
from shoal.cli.main import main
from shoal.errors import CheckpointError, ConfigError, CorruptCheckpointError, RunError
from shoal.spec.run.writer import claim_path, newest_claim


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


def test_one_of_a_lower_step_stays_once_it_is_copied(run: Path, url: str) -> None:
    newest, older = checkpoints(run / "checkpoints")
    store = Store(url)
    store.put(newest, keep=1)
    store.put(older, keep=1)
    assert store.steps() == [newest.name, older.name]


def test_a_store_and_a_directory_take_no_second_run(run: Path, url: str, tmp_path: Path) -> None:
    newest, older = checkpoints(run / "checkpoints")
    (run / "run.json").write_text('{"created": "2026-01-01", "name": "one"}')
    store = Store(url)
    store.require_free_for(None)
    store.put(newest)
    (tmp_path / "two").mkdir()
    (run / "checkpoints").rename(tmp_path / "two" / "checkpoints")
    (tmp_path / "two" / "run.json").write_text('{"created": "2026-01-02", "name": "two"}')
    for refused in (
        lambda: store.require_free_for(None),
        lambda: store.require_free_for(tmp_path / "two"),
        lambda: store.put(tmp_path / "two" / "checkpoints" / older.name, keep=1),
        lambda: store.put(tmp_path / "two" / "checkpoints" / newest.name),
    ):
        with pytest.raises(RunError, match=f"{url} holds {newest.name} of another run, 'one' of 2026-01-01"):
            refused()
    with pytest.raises(RunError, match=f"two holds another run than {url}, 'one' of 2026-01-01"):
        store.get(tmp_path / "two")
    assert store.steps() == [newest.name]
    store.require_free_for(run)
    assert store.get(tmp_path / "back").parent.parent == tmp_path / "back"
    assert (tmp_path / "back" / "run.json").read_text() == (run / "run.json").read_text()


def test_a_copy_that_was_cut_off_before_the_description_is_made_whole_by_the_next(
    run: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(url)
    store.put(checkpoints(run / "checkpoints")[0])

    with monkeypatch.context() as patch:
        patch.setattr("shoal.checkpoint.store.write_file", write_all_but("run.json"))
        with pytest.raises(KeyboardInterrupt):
            store.get(tmp_path / "back")
    assert not (tmp_path / "back" / "run.json").exists()
    store.get(tmp_path / "back")
    assert (tmp_path / "back" / "run.json").read_text() == "{}"


def test_a_copy_is_not_completed_in_a_directory_that_another_process_has_taken_over(
    run: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, directory = Store(url), tmp_path / "back" / "checkpoints"
    store.put(checkpoints(run / "checkpoints")[0])

    def write(path: Path, blocks, files):
        claim = newest_claim(directory)
        if claim is not None and claim.number == 1:
            other = replace(claim, number=2, host="elsewhere")
            claim_path(directory, 2).write_bytes(other.to_bytes())
        return write_file(path, blocks, files)

    monkeypatch.setattr("shoal.checkpoint.store.write_file", write)
    with pytest.raises(RunError, match="on elsewhere writes"):
        store.get(tmp_path / "back")
    assert [path.name for path in directory.iterdir() if path.name.startswith("step")] == []


def write_all_but(name: str):
    """Return `write_file`, cut off half way in files whose names begin so."""

    def write(path: Path, blocks, files):
        if path.name.startswith(name):
            path.write_bytes(b"")
            raise KeyboardInterrupt
        return write_file(path, blocks, files)

    return write


def test_a_second_run_with_the_store_of_another_is_refused_before_it_starts(
    ranks, tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path / 'store'}"
    words = [*tiny_run, "--set", "steps=2", "--set", f"checkpoint.store={url}"]
    train(ranks, [*words, "--run", "one"], tmp_path)
    before = Store(url).steps()
    assert main(["train", *words, "--run", "two"]) == 2
    told = capsys.readouterr().err
    assert f"{url} holds step-00000002 of another run, 'one' of" in told
    assert not (tmp_path / "two").exists()
    assert Store(url).steps() == before
    train(ranks, ["--resume", "one", "--set", "steps=4"], tmp_path)
    assert Store(url).steps()[0] == "step-00000004"


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
