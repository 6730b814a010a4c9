"""Damage is found and named, and what is damaged is passed over and never the last to stay."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_stand_ins import flip, names, rewrite_manifest, share, tensors, wholes
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_stand_ins import on_ranks

from shoal.checkpoint import (
    Manifest,
    SingleProcess,
    checkpoints,
    latest,
    load,
    newest_verified,
    read_manifest,
    resolve,
    retain,
    save,
    verify,
)
from shoal.errors import CheckpointError, ConfigError, CorruptCheckpointError

SHARD = "rank-00001.safetensors"
STEPS = (100, 200, 300, 400, 500)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of five steps, newest last, each saved by two ranks."""
    directory = tmp_path_factory.mktemp("template") / "checkpoints"
    for step in STEPS:
        on_ranks(
            2, lambda ranks, step=step: save(directory, step, share(tensors(step), ranks.rank, 2), {}, ranks)
        )
    return directory


@pytest.fixture
def directory(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "checkpoints")


def drop_a_piece(manifest: Manifest) -> Manifest:
    name = "model/embedding.weight"
    record = manifest.tensors[name]
    return replace(manifest, tensors={**manifest.tensors, name: replace(record, pieces=record.pieces[1:])})


def drop_a_file(manifest: Manifest) -> Manifest:
    return replace(manifest, files={name: each for name, each in manifest.files.items() if name != SHARD})


def with_format(path: Path, version: str) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format":1', f'"format":{version}'))


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (lambda path: flip(path / SHARD, -1), f"{SHARD} was changed after it was written"),
    "flipped header": (lambda path: flip(path / SHARD, 3), f"{SHARD} was changed after it was written"),
    "truncation": (lambda path: truncate(path / SHARD, 50), f"{SHARD} has 50 bytes"),
    "appended byte": (lambda path: (path / SHARD).open("ab").write(b"x"), f"{SHARD} has .* bytes"),
    "missing file": (lambda path: (path / SHARD).unlink(), f"{SHARD} cannot be read: No such file"),
    "missing manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read"),
    "empty manifest": (lambda path: truncate(path / "manifest.json", 0), "manifest.json is not JSON"),
    "torn manifest": (lambda path: truncate(path / "manifest.json", 90), "manifest.json is not JSON"),
    "other JSON": (lambda path: (path / "manifest.json").write_text("[1]"), "manifest.json has format None"),
    "newer format": (lambda path: with_format(path, "2"), "manifest.json has format 2; this .* format 1"),
    "edited manifest": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"step":500', '"step":501')
        ),
        "manifest.json was changed after it was written",
    ),
    "piece in a file that is not listed": (
        lambda path: rewrite_manifest(path, drop_a_file),
        f"manifest.json has a piece of tensor .* in '{SHARD}', which is not one of its files",
    ),
    "uncovered tensor": (
        lambda path: rewrite_manifest(path, drop_a_piece),
        r"manifest.json elements \[0, 18\) of tensor 'model/embedding.weight' are in no piece",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_by_verify_on_all_ranks_and_passed_over_by_latest(
    damage: str, directory: Path
) -> None:
    inflict, reason = DAMAGE[damage]
    newest, before, *_ = checkpoints(directory)
    inflict(newest)

    with pytest.raises(CorruptCheckpointError, match=reason):
        verify(newest)
    errors = on_ranks(3, lambda ranks: verify(newest, ranks))
    assert len({str(error) for error in errors}) == 1
    assert all(type(error) is CorruptCheckpointError for error in errors)

    said: list[str] = []
    assert on_ranks(2, lambda ranks: latest(directory, ranks, said.append)) == [before] * 2
    [line] = said
    assert line.startswith("checkpoint step-00000500 is corrupt and is skipped: ")
    assert str(errors[0]) in line


@settings(max_examples=60, deadline=None)
@given(
    file=st.sampled_from(["manifest.json", "rank-00000.safetensors", SHARD]), position=st.integers(0, 4000)
)
def test_a_flip_of_any_byte_is_found(template: Path, file: str, position: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = shutil.copytree(template / "step-00000500", Path(scratch) / "step-00000500")
        flip(path / file, position)
        with pytest.raises(CorruptCheckpointError, match=file):
            verify(path)


@pytest.mark.long
def test_each_of_500_flipped_bytes_is_found_and_its_file_named(directory: Path) -> None:
    path, generator = directory / "step-00000500", random.Random(3)
    sizes = {each: each.stat().st_size for each in sorted(path.iterdir())}
    for _ in range(500):
        file = generator.choice(list(sizes))
        position = generator.randrange(sizes[file])
        flip(file, position)
        with pytest.raises(CorruptCheckpointError, match=file.name):
            verify(path)
        flip(file, position)
    verify(path)


def test_what_was_saved_verifies_on_any_number_of_ranks(directory: Path) -> None:
    for path in checkpoints(directory):
        verify(path)
        assert on_ranks(3, lambda ranks, path=path: verify(path, ranks)) == [None] * 3


def test_a_manifest_survives_its_text_form(template: Path) -> None:
    manifest = read_manifest(template / "step-00000300")
    assert Manifest.from_json(manifest.to_json()) == manifest


def rename_a_file(manifest: Manifest, name: str) -> Manifest:
    """The manifest as somebody would forge it who wants another file read: with a sound hash."""
    files = {name if file == SHARD else file: record for file, record in manifest.files.items()}
    moved = {
        tensor: replace(
            record,
            pieces=tuple(
                replace(piece, file=name) if piece.file == SHARD else piece for piece in record.pieces
            ),
        )
        for tensor, record in manifest.tensors.items()
    }
    return replace(manifest, files=files, tensors=moved)


@given(
    name=st.one_of(
        st.text(max_size=12),
        st.lists(st.sampled_from(["..", ".", "", "a", "b..", "...", "\0"]), max_size=5).map("/".join),
    )
)
def test_a_manifest_names_files_within_its_own_directory_alone(template: Path, name: str) -> None:
    forged = rename_a_file(read_manifest(template / "step-00000500"), name).to_json()
    lands = os.path.normpath(os.path.join("/checkpoint", name))
    if lands.startswith("/checkpoint/") and ".." not in name.split("/") and "\0" not in name:
        assert name in Manifest.from_json(forged).files
    else:
        with pytest.raises(CorruptCheckpointError, match="in its own directory"):
            Manifest.from_json(forged)


@pytest.mark.parametrize("place", ["../secret", "{directory}/secret", "step/../../secret"])
def test_a_file_outside_of_the_checkpoint_is_not_opened(directory: Path, place: str) -> None:
    path = directory / "step-00000500"
    (path / "step").mkdir()
    (path / SHARD).rename(directory / "secret")
    rewrite_manifest(path, lambda manifest: rename_a_file(manifest, place.format(directory=directory)))
    (directory / "secret").chmod(0)
    wanted = wholes(tensors(500))
    for read in (verify, lambda path: load(path, wanted, SingleProcess())):
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json names the file .*secret"):
            read(path)


def test_a_member_that_a_later_version_adds_is_ignored(directory: Path) -> None:
    path = directory / "step-00000500"
    before = read_manifest(path)
    body = json.loads((path / "manifest.json").read_text())
    body["writer"] = "a later version"
    for tensor in body["tensors"].values():
        tensor["placement"] = ["shard"]
        for piece in tensor["pieces"]:
            piece["box"] = [[0, 1]]
    # The hash as the format defines it: of all other members, compact, keys sorted.
    del body["sha256"]
    text = json.dumps(body, separators=(",", ":"), sort_keys=True)
    body["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(body, indent=2))

    verify(path)
    assert read_manifest(path) == before


def test_without_a_checkpoint_there_is_no_latest(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent", SingleProcess(), pytest.fail) is None
    assert latest(tmp_path, SingleProcess(), pytest.fail) is None


def test_with_every_checkpoint_corrupt_each_is_named_and_there_is_no_latest(directory: Path) -> None:
    for path in checkpoints(directory):
        flip(path / SHARD, -1)
    said: list[str] = []
    assert latest(directory, SingleProcess(), said.append) is None
    assert [line.split()[1] for line in said] == [path.name for path in checkpoints(directory)]


def test_the_candidates_of_rank_zero_count(directory: Path) -> None:
    # A rank on another node may see a directory listing that is a moment old.
    seen = [checkpoints(directory), checkpoints(directory)[2:]]
    found = on_ranks(2, lambda ranks: newest_verified(seen[ranks.rank], ranks, pytest.fail))
    assert found == [directory / "step-00000500"] * 2


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.integers(0, 10**12), unique=True, max_size=8), padding=st.integers(1, 9))
def test_checkpoints_are_listed_by_step_whatever_the_padding(steps: list[int], padding: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for step in steps:
            (Path(scratch) / f"step-{step:0{padding}d}").mkdir()
        found = checkpoints(Path(scratch))
        assert [int(path.name.removeprefix("step-")) for path in found] == sorted(steps, reverse=True)


def test_what_is_half_written_half_deleted_or_foreign_is_not_listed(directory: Path) -> None:
    for foreign in ("step-00000600.tmp", "step-00000050.deleted", "step-x", "step-", "notes", "step-7.x"):
        (directory / foreign).mkdir()
    (directory / "step-00000700").write_text("a file")
    assert [path.name for path in checkpoints(directory)] == [f"step-{step:08d}" for step in reversed(STEPS)]


def test_a_path_means_the_checkpoint_the_directory_or_the_run(directory: Path) -> None:
    newest = directory / "step-00000500"
    assert resolve(newest) == [newest]
    assert resolve(directory) == resolve(directory.parent) == checkpoints(directory)


@pytest.mark.parametrize(("path", "reason"), [("absent", "does not exist"), (".", "holds no checkpoint")])
def test_a_path_without_a_checkpoint_is_refused(path: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        resolve(tmp_path / path)


def sound(path: Path) -> bool:
    try:
        verify(path)
    except CorruptCheckpointError:
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(corrupt=st.sets(st.sampled_from(STEPS)), keep=st.integers(1, 6))
def test_retention_keeps_the_newest_and_never_deletes_the_last_that_verifies(
    template: Path, corrupt: set[int], keep: int
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = shutil.copytree(template, Path(scratch) / "checkpoints")
        before = checkpoints(directory)
        for path in before:
            if int(path.name[5:]) in corrupt:
                flip(path / SHARD, -1)
        sound_before = [path for path in before if sound(path)]

        deleted = on_ranks(2, lambda ranks: retain(directory, keep, ranks))
        after = checkpoints(directory)

        assert deleted[0] == deleted[1] == [path for path in before if path not in after]
        assert before[:keep] == after[:keep]
        if set(sound_before) & set(before[:keep]):
            assert after == before[:keep]
        elif sound_before:
            assert after == [*before[:keep], sound_before[0]]
        else:
            assert after == before
        assert names(directory) == sorted(path.name for path in after)


def test_retention_cleans_up_what_a_crash_left_over_but_nothing_foreign(directory: Path) -> None:
    for left_over in ("step-00000600.tmp", "step-00000050.1.deleted"):
        (directory / left_over / "nested").mkdir(parents=True)
        (directory / left_over / "file").write_text("x")
    (directory / "notes.tmp").mkdir()
    assert retain(directory, 9, SingleProcess()) == []
    assert names(directory) == ["notes.tmp", *(f"step-{step:08d}" for step in STEPS)]


def test_retention_of_nothing_deletes_nothing(tmp_path: Path) -> None:
    assert retain(tmp_path / "absent", 1, SingleProcess()) == []


def test_retention_names_the_corrupt_ones_that_it_finds(directory: Path) -> None:
    flip(directory / "step-00000500" / SHARD, -1)
    said: list[str] = []
    retain(directory, 2, SingleProcess(), said.append)
    assert [line.split()[1] for line in said] == ["step-00000500"]


def test_retention_reads_nothing_if_one_that_stays_is_known_to_be_sound(tmp_path: Path) -> None:
    first, second, third = (
        save(tmp_path, step, wholes(tensors(1)), {}, SingleProcess()) for step in (1, 2, 3)
    )
    (third / "manifest.json").unlink()  # whoever reads it says so
    assert retain(tmp_path, 2, SingleProcess(), pytest.fail, sound=third) == [first]
    # It stays also where others have higher steps.
    assert retain(tmp_path, 1, SingleProcess(), pytest.fail, sound=second) == []
    assert names(tmp_path) == [second.name, third.name]


def test_keeping_none_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="keep=0"):
        retain(directory, 0, SingleProcess())


def test_the_same_step_saved_again_is_the_newest_of_it(directory: Path) -> None:
    again = save(directory, 500, wholes(tensors(9)), {}, SingleProcess())
    shutil.copytree(directory / "step-00000400", directory / "step-00000500")  # as if its deletion had failed
    assert checkpoints(directory)[:2] == [again, directory / "step-00000500"]
