"""Saves beside the training: they hold what was copied, tell of failures."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from checkpoint_stand_ins import StoppingFiles, fork, loaded, names, reap, same_bits, share, tensors, wholes
from rank_stand_ins import on_ranks

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
    coordinator_beside,
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


@pytest.mark.parametrize(("failing", "number"), [(0, errno.EIO), (1, errno.ENOSPC)])
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


# -- beside other calls of the same process -----------------------------------------------------------


class Meanwhile(RealFiles):
    """Files of a save that do something else once, before the rename that completes it."""

    def __init__(self, act) -> None:
        self._act = act

    def rename(self, source: Path, target: Path) -> None:
        act, self._act = self._act, lambda: None
        act()
        super().rename(source, target)


@pytest.mark.parametrize("act", ["retain", "save"])
def test_other_calls_of_a_process_leave_its_unfinished_save_alone(tmp_path: Path, act: str) -> None:
    for step in (100, 200):
        save(tmp_path, step, wholes(OLD), STATE, SingleProcess())

    def other() -> None:
        if act == "retain":
            retain(tmp_path, 1, SingleProcess())
        else:
            save(tmp_path, 210, wholes(OLD), STATE, SingleProcess())

    ended = save_beside(tmp_path, 300, wholes(NEW), SingleProcess(), Meanwhile(other))
    assert ended.error is None
    verify(tmp_path / "step-00000300")
    steps = {"retain": [300, 200], "save": [300, 210, 200, 100]}[act]
    assert [path.name for path in checkpoints(tmp_path)] == [f"step-{step:08d}" for step in steps]


def test_a_second_save_of_a_step_is_refused_while_the_first_one_writes(tmp_path: Path) -> None:
    refused: list[str] = []

    def other() -> None:
        with pytest.raises(CheckpointError, match="another save of this process writes the same step"):
            save(tmp_path, 300, wholes(OLD), STATE, SingleProcess())
        refused.append("once")

    ended = save_beside(tmp_path, 300, wholes(NEW), SingleProcess(), Meanwhile(other))
    assert (ended.error, refused) == (None, ["once"])
    verify(tmp_path / "step-00000300")
    save(tmp_path, 300, wholes(OLD), STATE, SingleProcess())
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000300.1"]


def test_a_checkpoint_that_was_just_saved_stays_though_others_have_higher_steps(tmp_path: Path) -> None:
    for step in (80, 90, 100):
        save(tmp_path, step, wholes(OLD), STATE, SingleProcess())
    for step in (10, 20):  # of a training that went back
        ended = save_beside(tmp_path, step, wholes(NEW), SingleProcess(), RealFiles(), keep=2)
        assert (ended.error, list(ended.warnings)) == (None, [])
        kept = [f"step-{each:08d}" for each in (100, 90, step)]
        assert [path.name for path in checkpoints(tmp_path)] == kept


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path: Path) -> None:
    class Undeletable(RealFiles):
        def remove_file(self, path: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    save(tmp_path, 100, wholes(OLD), {}, SingleProcess())
    ended = save_beside(tmp_path, 200, wholes(NEW), SingleProcess(), Undeletable(), keep=1)
    assert ended.path == tmp_path / "step-00000200"
    assert ended.error is None
    assert ended.warnings == [f"cannot delete old checkpoints in {tmp_path}: rank 0: Input/output error"]
