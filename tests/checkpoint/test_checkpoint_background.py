"""Saves beside the training: they hold what was copied, tell of failures, and write nothing twice."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from checkpoint_stand_ins import (
    KILLED,
    StoppingFiles,
    die,
    fork,
    loaded,
    names,
    on_ranks,
    reap,
    same_bits,
    share,
    tensors,
    wholes,
)

from shoal.checkpoint import (
    Background,
    Coordinator,
    Ended,
    FileSystem,
    Piece,
    ProcessGroupCoordinator,
    RealFiles,
    Saver,
    SingleProcess,
    Staging,
    StoreCoordinator,
    checkpoints,
    compare,
    coordinator_beside,
    latest,
    load,
    read_manifest,
    retain,
    save,
    verify,
)
from shoal.checkpoint.shard import Shard
from shoal.errors import CheckpointError

OLD, NEW = tensors(1), tensors(2)
STATE = {"position": [2]}


def copied(pieces: Sequence[Piece]) -> list[Piece]:
    staging = Staging()
    staging.reserve(pieces)
    return staging.copy(pieces)


def save_beside(
    directory: Path, step: int, pieces: Sequence[Piece], ranks: Coordinator, files: FileSystem, keep: int = 0
) -> Ended:
    background = Background(Saver(files), ranks)
    background.begin(directory, step, copied(pieces), STATE, keep)
    background.wait()
    ended = background.take()
    assert ended is not None
    return ended


# -- what is saved ----------------------------------------------------------------------------------


def test_a_copy_keeps_what_was_there_and_its_memory_is_used_again() -> None:
    values = tensors(1)
    staging = Staging()
    assert staging.missing(wholes(values)) == sum(each.nbytes for each in values.values())
    staging.reserve(wholes(values))
    copies = staging.copy(wholes(values))
    for each in values.values():
        each.zero_()
    assert all(torch.equal(copy.tensor.view_as(OLD[copy.name]), OLD[copy.name]) for copy in copies)
    again = wholes(tensors(2))
    assert staging.missing(again) == 0
    staging.reserve(again)
    places = [copy.tensor.data_ptr() for copy in copies]
    assert [copy.tensor.data_ptr() for copy in staging.copy(again)] == places


def test_a_large_file_is_written_from_the_copy_in_one_piece(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = {f"model/{number}": torch.randn(70_001, generator=generator) for number in range(20)}
    values |= {
        "model/half": torch.ones(5).half(),
        "model/none": torch.zeros(0),
        "model/flag": torch.tensor(True),
    }
    base = replace(Piece.whole("fixed/base", torch.arange(300_001.0)), is_constant=True)
    pieces = [base, *wholes(values)]
    path = save(tmp_path, 1, copied(pieces), {}, SingleProcess())
    elsewhere = save(tmp_path, 2, pieces, {}, SingleProcess())
    verify(path)
    assert read_manifest(path).files == read_manifest(elsewhere).files
    assert read_manifest(path).tensors == read_manifest(elsewhere).tensors
    for file in ("rank-00000.safetensors", "rank-00000-constant.safetensors"):
        named = safetensors.torch.load_file(path / file)
        assert all(
            torch.equal(each, {**values, "fixed/base": base.tensor}[name]) for name, each in named.items()
        )
        blocks = list(Shard([p for p in copied(pieces) if p.is_constant == ("constant" in file)])._blocks())
        assert len(blocks) == 2  # the head, and all tensors
        assert len(blocks[0]) % 4096 == 0


def test_training_may_change_everything_once_the_copy_is_made(tmp_path: Path) -> None:
    def run(ranks: Coordinator) -> Ended:
        values, state = tensors(1), {"position": [1]}
        background = Background(Saver(), ranks)
        background.begin(tmp_path, 100, copied(share(values, ranks.rank, 2)), state)
        for each in values.values():
            each.zero_()
        state["position"].append(2)
        background.wait()
        ended = background.take()
        assert ended is not None
        assert background.take() is None
        return ended

    first, second = on_ranks(2, run)
    assert first.path == second.path == tmp_path / "step-00000100"
    assert first.error is second.error is None
    assert same_bits(loaded(first.path), OLD)
    assert load(first.path, [], SingleProcess())["position"] == [1]


def test_ranks_of_a_process_group_save_beside_their_collectives(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        background = Background(Saver(), coordinator_beside())
        for step in (100, 200):
            background.begin(tmp_path / "saved", step, copied(share(NEW, rank, 2)), STATE, keep=1)
            is_busy = True
            while is_busy:
                ones = torch.ones(100)
                dist.all_reduce(ones)
                assert ones.sum() == 200
                is_busy = any(ProcessGroupCoordinator().all_gather_object(background.is_busy))
            ended = background.take()
            assert ended is not None
            assert ended.error is None, ended.error
            assert not ended.warnings

    children = [fork(lambda r=rank: run(r)) for rank in range(2)]
    assert [reap(child) for child in children] == [0, 0]
    [path] = checkpoints(tmp_path / "saved")
    verify(path)
    assert same_bits(loaded(path), NEW)


def test_ranks_agree_through_a_store_and_leave_nothing_there() -> None:
    store = dist.HashStore()

    def run(rank: int) -> list[Any]:
        ranks = StoreCoordinator(store, rank, 3)
        told = []
        for step in range(5):
            told += [ranks.all_gather_object((rank, step, "x\n" * step)), ranks.gather_object(rank)]
        return told

    everyone = [[(rank, step, "x\n" * step) for rank in range(3)] for step in range(5)]
    for rank, told in enumerate(on_ranks(3, lambda ranks: run(ranks.rank))):
        assert told[::2] == everyone
        assert told[1::2] == [None if rank else [0, 1, 2]] * 5
    assert store.num_keys() == 0


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_told(tmp_path: Path) -> None:
    background = Background(Saver(), StoreCoordinator(dist.HashStore(), 0, 2))
    background.begin(tmp_path, 100, copied(share(OLD, 0, 2)), STATE)
    time.sleep(0.1)
    assert background.is_busy
    background.give_up_after(0.1)
    background.wait()
    ended = background.take()
    assert ended is not None
    assert "other ranks did not come within 0.1 s" in str(ended.error)
    assert checkpoints(tmp_path) == []


# -- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_fails_behind_the_training_is_named_and_costs_one_checkpoint(
    failing: int, number: int, tmp_path: Path
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    def run(ranks: Coordinator, directory: Path, files: FileSystem) -> tuple[Ended, Ended]:
        background = Background(Saver(files), ranks)
        ended = []
        for step in (200, 300):
            background.begin(directory, step, copied(share(NEW, ranks.rank, 2)), STATE, keep=2)
            background.wait()
            ended.append(background.take())
        return ended[0], ended[1]

    template = tmp_path / "template"
    save(template, 100, wholes(OLD), {}, SingleProcess())
    counted = [StoppingFiles(grain=200), StoppingFiles(grain=200)]
    scratch = shutil.copytree(template, tmp_path / "counted")
    on_ranks(
        2, lambda ranks: save(scratch, 200, share(NEW, ranks.rank, 2), STATE, ranks, counted[ranks.rank])
    )

    for place in range(counted[failing].places):
        directory = shutil.copytree(template, tmp_path / str(place))
        disks = [StoppingFiles(grain=200), StoppingFiles(grain=200)]
        disks[failing] = StoppingFiles(place, fail, grain=200)
        told = on_ranks(2, lambda ranks, d=directory, f=disks: run(ranks, d, f[ranks.rank]))
        for first, second in told:
            assert first.path is None
            assert str(first.error) == (
                f"cannot save step 200 in {directory}: rank {failing}: {os.strerror(number)}"
            )
            assert second.error is None
        newest, before = checkpoints(directory)
        assert names(directory) == [before.name, newest.name]
        assert same_bits(loaded(newest), NEW)
        # If the disk failed after the rename, the new checkpoint is there all the same.
        assert same_bits(loaded(before), OLD if before.name == "step-00000100" else NEW)


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path: Path) -> None:
    class Undeletable(RealFiles):
        def remove_file(self, path: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    save(tmp_path, 100, wholes(OLD), {}, SingleProcess())
    ended = save_beside(tmp_path, 200, wholes(NEW), SingleProcess(), Undeletable(), keep=1)
    assert ended.path == tmp_path / "step-00000200"
    assert ended.error is None
    assert ended.warnings == [f"cannot delete old checkpoints in {tmp_path}: rank 0: Input/output error"]


# -- crashes ----------------------------------------------------------------------------------------


def test_a_crash_at_any_place_behind_the_training_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    template = tmp_path / "template"
    save(template, 100, wholes(OLD), {}, SingleProcess())

    def run(directory: Path, files: FileSystem) -> None:
        save_beside(directory, 200, wholes(NEW), SingleProcess(), files, keep=1)

    counted = StoppingFiles(grain=300)
    run(shutil.copytree(template, tmp_path / "counted"), counted)
    assert counted.places > 15
    for place in range(counted.places):
        directory = shutil.copytree(template, tmp_path / str(place))
        files = StoppingFiles(place, die, grain=300)
        assert reap(fork(lambda d=directory, f=files: run(d, f))) == KILLED
        found = latest(directory, SingleProcess(), pytest.fail)
        assert found is not None
        assert same_bits(loaded(found), OLD if found.name == "step-00000100" else NEW)


def kill_at(delay: float, both: bool, folder: Path) -> tuple[int, int]:
    """Kills one or both of two ranks that save without end; returns the steps of the last two that are whole.

    Each checkpoint is full of its own step. Rank 0 tells in a file, before each save, of the one before.
    """
    directory, told = folder / "saved", folder / "told"

    def train(rank: int) -> None:
        ranks = StoreCoordinator(dist.FileStore(str(folder / "store"), 2), rank, 2)
        background, staging = Background(Saver(), ranks), Staging()
        constant = torch.arange(1000.0)
        for step in range(1, 10**6):
            values = {"model/a": torch.full((40_000,), float(step)), "optimizer/b": torch.full((7,), step)}
            pieces = [*share(values, rank, 2), *share_constant(constant, rank)]
            staging.reserve(pieces)
            background.begin(directory, step, staging.copy(pieces), {}, keep=2)
            background.wait()
            ended = background.take()
            assert ended is not None
            assert ended.error is None
            if rank == 0:
                told.write_text(str(step))

    children = [fork(lambda r=rank: train(r)) for rank in range(2)]
    try:
        until = time.monotonic() + 20
        while not (told.exists() and told.read_text()) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(delay)
    finally:
        for child in children[: 1 + both]:
            os.kill(child, signal.SIGKILL)
        time.sleep(0 if both else 0.02)  # the other one goes on as far as it can
        for child in children[1 + both :]:
            os.kill(child, signal.SIGKILL)
        assert all(reap(child) == -signal.SIGKILL for child in children)
    sound = int(told.read_text() or 0)
    found = latest(directory, SingleProcess(), pytest.fail)
    assert found is not None
    a, b, constant = torch.zeros(40_000), torch.zeros(7, dtype=torch.int64), torch.zeros(1000)
    wanted = [Piece.whole(n, t) for n, t in (("model/a", a), ("optimizer/b", b), ("fixed/c", constant))]
    load(found, wanted, SingleProcess())
    step = int(found.name.removeprefix("step-"))
    assert (a == step).all()
    assert (b == step).all()
    assert torch.equal(constant, torch.arange(1000.0))
    return sound, step


def share_constant(tensor: torch.Tensor, rank: int) -> list[Piece]:
    return [replace(piece, is_constant=True) for piece in share({"fixed/c": tensor}, rank, 2)]


def kill_at_random(times: int, folder: Path) -> None:
    generator = random.Random(7)
    for number in range(times):
        place = folder / str(number)
        place.mkdir()
        sound, step = kill_at(generator.uniform(0, 0.15), generator.random() < 0.5, place)
        assert step >= sound
        shutil.rmtree(place)


def test_ranks_that_are_killed_while_they_save_leave_the_last_checkpoint(tmp_path: Path) -> None:
    kill_at_random(5, tmp_path)


@pytest.mark.long
def test_ranks_that_are_killed_at_200_random_moments_leave_the_last_checkpoint(tmp_path: Path) -> None:
    kill_at_random(200, tmp_path)


# -- what ranks tell each other ---------------------------------------------------------------------


class Counting:
    """A Coordinator that counts the bytes of what a rank tells rank 0."""

    def __init__(self, ranks: Coordinator) -> None:
        self.ranks, self.rank, self.size = ranks, ranks.rank, ranks.size
        self.told: list[int] = []

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.ranks.all_gather_object(value)

    def gather_object(self, value: Any) -> list[Any] | None:
        self.told.append(len(pickle.dumps(value)))
        return self.ranks.gather_object(value)


def test_ranks_tell_their_tensors_again_only_if_these_changed_or_a_save_failed(tmp_path: Path) -> None:
    many = {f"model/{number}": torch.full((8,), float(number)) for number in range(100)}
    more = {**many, "model/last": torch.ones(8)}

    def run(ranks: Coordinator) -> list[int]:
        failing = StoppingFiles()
        saver, counting = Saver(failing), Counting(ranks)
        for step, named in enumerate((many, many, more, more, more, more)):
            if step == 4 and ranks.rank == 1:
                failing.at, failing.stop = failing.places, disk_fails
            with contextlib.suppress(CheckpointError):
                saver.save(tmp_path, step, share(named, ranks.rank, 2), {}, counting)
        return counting.told

    for told in on_ranks(2, run):
        assert [number > 5000 for number in told] == [True, False, True, False, False, True]
    assert [path.name for path in checkpoints(tmp_path)] == [
        f"step-0000000{step}" for step in (5, 3, 2, 1, 0)
    ]
    for path in checkpoints(tmp_path):
        named = many if path.name.endswith(("0", "1")) else more
        verify(path)
        read = {name: torch.zeros(8) for name in named}
        load(path, wholes(read), SingleProcess())
        assert same_bits(read, named)


def disk_fails() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


# -- what does not change is not written again -----------------------------------------------------


def with_constant(seed: int) -> list[Piece]:
    """The pieces of `tensors(seed)`, and a large one that is constant and equal for all seeds."""
    constant = torch.arange(5000.0)
    return [*wholes(tensors(seed)), replace(Piece.whole("fixed/base", constant), is_constant=True)]


def constant_of(path: Path) -> Path:
    return path / "rank-00000-constant.safetensors"


class WithoutLinks(RealFiles):
    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_constant_pieces_are_linked_and_outlive_the_checkpoint_that_they_were_written_for(
    tmp_path: Path,
) -> None:
    saver = Saver()
    first, second = (saver.save(tmp_path, step, with_constant(step), {}, SingleProcess()) for step in (1, 2))
    assert constant_of(first).samefile(constant_of(second))
    assert {each.name for each in compare(first, second)} == set(tensors(0)) - {"rank/0/random.torch"}
    assert retain(tmp_path, 1, SingleProcess(), sound=second) == [first]
    verify(second)
    elsewhere = shutil.copytree(second, tmp_path / "elsewhere" / second.name)
    verify(elsewhere)
    base = torch.zeros(5000)
    load(elsewhere, [Piece.whole("fixed/base", base)], SingleProcess())
    assert torch.equal(base, torch.arange(5000.0))
    third = saver.save(tmp_path, 2, with_constant(2), {}, SingleProcess())  # the step again
    assert not second.exists()
    assert constant_of(third).stat().st_nlink == 1
    verify(third)


def is_written_anew(path: Path) -> bool:
    verify(path)
    return constant_of(path).stat().st_nlink == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda first, pieces: pieces[-1].tensor.add_(1),  # another value
        lambda first, pieces: constant_of(first).write_bytes(constant_of(first).read_bytes()[:-1] + b"\1"),
        lambda first, pieces: constant_of(first).unlink(),
        lambda first, pieces: shutil.rmtree(first),
    ],
    ids=["values", "damage", "missing file", "missing checkpoint"],
)
def test_constant_pieces_that_are_not_as_they_were_are_written_anew(
    change: Callable[[Path, list[Piece]], object], tmp_path: Path
) -> None:
    saver, pieces = Saver(), with_constant(1)
    first = saver.save(tmp_path, 1, pieces, {}, SingleProcess())
    change(first, pieces)
    assert is_written_anew(saver.save(tmp_path, 2, pieces, {}, SingleProcess()))


def test_where_there_are_no_links_constant_pieces_are_written_anew(tmp_path: Path) -> None:
    saver = Saver(WithoutLinks())
    saver.save(tmp_path, 1, with_constant(1), {}, SingleProcess())
    assert is_written_anew(saver.save(tmp_path, 2, with_constant(1), {}, SingleProcess()))


# -- retention --------------------------------------------------------------------------------------


def test_retention_reads_nothing_if_one_that_stays_is_known_to_be_sound(tmp_path: Path) -> None:
    first, second, third = (save(tmp_path, step, wholes(OLD), {}, SingleProcess()) for step in (1, 2, 3))
    (third / "manifest.json").unlink()  # whoever reads it says so
    assert retain(tmp_path, 2, SingleProcess(), pytest.fail, sound=third) == [first]
    # One that would not stay says nothing of those that would.
    said: list[str] = []
    assert retain(tmp_path, 1, SingleProcess(), said.append, sound=second) == []
    assert len(said) == 1
