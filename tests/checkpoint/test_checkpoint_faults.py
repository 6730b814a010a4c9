"""What the system refuses is named, costs nothing that was saved, and does not stop what comes after."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_stand_ins import (
    StoppingFiles,
    loaded,
    names,
    rewrite_manifest,
    same_bits,
    share,
    tensors,
    wholes,
)
from permission_stand_ins import unprivileged
from rank_stand_ins import on_ranks

from shoal.checkpoint import (
    REAL_FILES,
    Background,
    Coordinator,
    Manifest,
    Piece,
    Saver,
    SingleProcess,
    Staging,
    checkpoints,
    latest,
    load,
    resolve,
    retain,
    save,
    verify,
)
from shoal.cli.main import main
from shoal.errors import CheckpointError, CorruptCheckpointError

MEGA = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "shoal-test", str(place)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def in_the_step(
    saver: Saver, directory: Path, step: int, pieces: Sequence[Piece], ranks: Coordinator
) -> Path:
    return saver.save(directory, step, pieces, {}, ranks)


def beside_the_training(
    saver: Saver, directory: Path, step: int, pieces: Sequence[Piece], ranks: Coordinator
) -> Path:
    staging, background = Staging(), Background(saver, ranks)
    staging.reserve(pieces)
    background.begin(directory, step, staging.copy(pieces), {})
    background.wait()
    ended = background.take()
    assert ended is not None
    if ended.error is not None:
        raise ended.error
    assert ended.path is not None
    return ended.path


@pytest.mark.parametrize("save_one", [in_the_step, beside_the_training])
def test_a_disk_that_is_full_in_the_middle_of_a_file_costs_that_checkpoint_alone(
    save_one: Callable[..., Path], small_disk: Path
) -> None:
    saved, other = small_disk / "saved", small_disk / "other"
    other.write_bytes(bytes(8 * MEGA))
    savers = Saver(), Saver()

    def attempt(step: int) -> list[Path | CheckpointError]:
        state = {"model/large": torch.full((6 * MEGA // 4,), float(step))}
        return on_ranks(
            2, lambda ranks: save_one(savers[ranks.rank], saved, step, share(state, ranks.rank, 2), ranks)
        )

    assert attempt(1) == [saved / "step-00000001"] * 2
    one, other_one = attempt(2)  # of its 6 MiB, 2 are free
    assert str(one) == str(other_one)
    assert re.fullmatch(rf"cannot save step 2 in {saved}: rank [01]: No space left on device", str(one))
    assert names(saved) == ["step-00000001"]
    verify(saved / "step-00000001")
    other.unlink()
    assert attempt(3) == [saved / "step-00000003"] * 2
    for path in checkpoints(saved):
        verify(path)
    for saver in savers:
        saver.close()


def test_a_folder_without_permission_to_write_is_named_on_all_ranks(public_path: Path) -> None:
    public_path.chmod(0o555)
    with unprivileged():
        errors = on_ranks(2, lambda ranks: save(public_path, 1, share(tensors(1), ranks.rank, 2), {}, ranks))
    assert {str(error) for error in errors} == {
        f"cannot save step 1 in {public_path}: rank 0: Permission denied: {public_path}/.writer-00000001"
    }


def test_what_may_not_be_read_is_named_and_passed_over(public_path: Path) -> None:
    older, newest = (save(public_path, step, wholes(tensors(step)), {}, SingleProcess()) for step in (1, 2))
    shard = newest / "rank-00000.safetensors"
    shard.chmod(0)
    said: list[str] = []
    with unprivileged():
        for read in (verify, lambda path: load(path, wholes(tensors(0)), SingleProcess())):
            with pytest.raises(CorruptCheckpointError, match=rf"{shard} cannot be read: .*Permission denied"):
                read(newest)
        assert latest(public_path, SingleProcess(), said.append) == older
        assert same_bits(loaded(older), tensors(1))
    assert len(said) == 1
    public_path.chmod(0)
    with unprivileged():
        for find in (resolve, checkpoints, lambda path: latest(path, SingleProcess(), print)):
            with pytest.raises(CheckpointError, match=rf"{public_path} cannot be read: Permission denied"):
                find(public_path)


def test_the_program_names_a_folder_that_may_not_be_read(
    public_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = public_path / "run"
    save(run / "checkpoints", 1, wholes(tensors(1)), {}, SingleProcess())
    for words in (["checkpoint", "ls", str(run / "checkpoints")], ["checkpoint", "verify", str(run)]):
        assert main(words) == 0
        run.chmod(0)
        with unprivileged():
            assert main(words) in (1, 2)
        run.chmod(0o755)
        assert re.match(rf"shoal: {run}.*(denied|may not be read)", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.float32, torch.int64),
        (torch.bfloat16, torch.bool),
        (torch.int64, torch.int32),
        (torch.int32, torch.bool),
        (torch.uint8, torch.int8),
    ],
)
def test_a_type_that_does_not_convert_is_named_and_nothing_is_read(
    saved: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    path = save(tmp_path, 1, [Piece.whole("model/a", torch.ones(4).to(saved))], {}, SingleProcess())
    into = torch.zeros(4, dtype=wanted)
    titles = [str(dtype).removeprefix("torch.") for dtype in (saved, wanted)]
    with pytest.raises(
        CheckpointError, match=f"'model/a' is {titles[0]} in the checkpoint, and {titles[1]} is"
    ):
        load(path, [Piece.whole("model/a", into)], SingleProcess())
    assert not into.any()


def test_a_type_of_a_later_version_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [Piece.whole("model/a", torch.ones(4))], {}, SingleProcess())

    def change(manifest: Manifest) -> Manifest:
        record = manifest.tensors["model/a"]
        return replace(manifest, tensors={"model/a": replace(record, dtype="F4")})

    rewrite_manifest(path, change)
    with pytest.raises(
        CheckpointError, match="type 'F4', which this version cannot read; possible types: BF"
    ):
        load(path, [Piece.whole("model/a", torch.ones(4))], SingleProcess())


def saved_steps(directory: Path, *steps: int) -> list[Path]:
    return [save(directory, step, wholes(tensors(step)), {}, SingleProcess()) for step in steps]


def test_a_checkpoint_that_was_moved_and_linked_is_no_leftover(tmp_path: Path) -> None:
    """One is on another disk, and a link is in its place: it is read, and never deleted through the link."""
    saved, disk = tmp_path / "saved", tmp_path / "disk"
    (old,) = saved_steps(saved, 1)
    shutil.move(old, disk / old.name)
    old.symlink_to(disk / old.name)
    saved_steps(saved, 2, 3)
    assert retain(saved, 1, SingleProcess()) == [saved / "step-00000002"]
    assert checkpoints(saved) == [saved / "step-00000003", old]
    verify(old)
    assert saved_steps(saved, 1) == [saved / "step-00000001.1"]  # replaces the link, and not what it leads to
    assert not old.is_symlink()
    verify(disk / old.name)


def test_a_link_does_not_count_as_a_checkpoint_that_stays(tmp_path: Path) -> None:
    saved_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000009").symlink_to("step-00000003")
    retain(tmp_path, 2, SingleProcess())
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000009"]


@pytest.mark.parametrize("name", ["step-00000000.1.tmp", "step-00000000.deleted"])
def test_what_is_called_like_a_leftover_and_is_no_directory_goes(name: str, tmp_path: Path) -> None:
    saved, elsewhere = tmp_path / "saved", tmp_path / "elsewhere"
    for folder in (saved, elsewhere):
        folder.mkdir()
    (elsewhere / "file").touch()
    (saved / name).symlink_to(elsewhere)
    saved_steps(saved, 1)
    (saved / name).touch()
    saved_steps(saved, 2)
    assert names(saved) == ["step-00000001", "step-00000002"]
    assert names(elsewhere) == ["file"]


class BusyFiles(StoppingFiles):
    """A file system on which another host has a file open, as NFS keeps it."""

    def remove_file(self, path: Path) -> None:
        if path.name.startswith(".nfs"):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        REAL_FILES.remove_file(path)


@pytest.mark.parametrize("name", ["step-00000000.1.tmp", "step-00000000.1.deleted"])
def test_a_leftover_that_cannot_be_removed_stops_no_save(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / ".nfs0001").touch()
    for step in (1, 2):
        with pytest.warns(UserWarning, match=r"step-00000000.1.deleted is left .*resource busy"):
            save(tmp_path, step, wholes(tensors(step)), {}, SingleProcess(), BusyFiles(grain=1 << 20))
    # A process that had begun it does not find it under the name that it would make complete.
    assert names(tmp_path) == ["step-00000000.1.deleted", "step-00000001", "step-00000002"]
    with pytest.warns(UserWarning, match="resource busy"):
        assert retain(tmp_path, 1, SingleProcess(), files=BusyFiles()) == [tmp_path / "step-00000001"]


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("gone")])
def test_a_step_whose_name_is_taken_is_saved_as_a_revision(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "step-00000001")
    assert saved_steps(tmp_path, 1) == [tmp_path / "step-00000001.1"]
    verify(tmp_path / "step-00000001.1")


@pytest.mark.parametrize("action", ["ls", "verify"])
def test_a_path_that_the_system_refuses_is_named(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (circle := tmp_path / "circle").symlink_to(circle)
    for path, refusal in ((circle, "symbolic links|does not exist"), (tmp_path / ("a" * 300), "too long")):
        assert main(["checkpoint", action, str(path)]) in (1, 2)
        assert re.search(refusal, capsys.readouterr().err)
