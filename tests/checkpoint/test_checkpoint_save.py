"""What a save writes, what it refuses, and how all ranks learn that one failed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed
from checkpoint_stand_ins import StoppingFiles, fork, loaded, names, reap, same_bits, share, tensors, wholes
from rank_stand_ins import on_ranks

from shoal.checkpoint import (
    Piece,
    ProcessGroupCoordinator,
    SingleProcess,
    checkpoints,
    latest,
    read_manifest,
    save,
    verify,
)
from shoal.errors import CheckpointError

OLD, NEW = tensors(1), tensors(2)


def test_the_safetensors_library_reads_a_whole_save_under_its_own_names(tmp_path: Path) -> None:
    path = save(tmp_path, 100, wholes(OLD), {}, SingleProcess())
    assert same_bits(safetensors.torch.load_file(path / "rank-00000.safetensors"), OLD)


def test_the_safetensors_library_reads_the_part_of_each_rank(tmp_path: Path) -> None:
    [path, *_] = on_ranks(3, lambda ranks: save(tmp_path, 100, share(OLD, ranks.rank, 3), {}, ranks))
    for rank in range(3):
        file = safetensors.torch.load_file(path / f"rank-{rank:05d}.safetensors")
        pieces = [piece for piece in share(OLD, rank, 3) if piece.tensor.numel()]
        assert len(file) == len(pieces)
        for piece in pieces:
            whole = piece.tensor.numel() == OLD[piece.name].numel()
            key = piece.name if whole else f"{piece.name}[{piece.start}:{piece.stop}]"
            assert torch.equal(file[key].reshape(-1), piece.tensor)


def test_every_tensor_starts_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    odd = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(3), "c": torch.ones(1, dtype=torch.int16)}
    path = save(tmp_path, 1, wholes(odd), {}, SingleProcess())
    content = (path / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    for name, tensor in odd.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


def test_a_rank_that_holds_nothing_writes_no_file(tmp_path: Path) -> None:
    [path, _] = on_ranks(2, lambda r: save(tmp_path, 1, wholes(OLD) if r.rank == 1 else [], {}, r))
    assert names(path) == ["manifest.json", "rank-00001.safetensors"]


def test_a_tensor_larger_than_one_write_is_saved_in_full(tmp_path: Path) -> None:
    tensor = torch.arange(1_500_000)  # 12 MB of int64, in writes of 2 MiB
    path = save(tmp_path, 1, [Piece.whole("t", tensor)], {}, SingleProcess())
    verify(path)
    assert torch.equal(safetensors.torch.load_file(path / "rank-00000.safetensors")["t"], tensor)


def test_a_step_saved_again_replaces_the_first_save(tmp_path: Path) -> None:
    first = save(tmp_path, 100, wholes(OLD), {}, SingleProcess())
    second = save(tmp_path, 100, wholes(NEW), {}, SingleProcess())
    third = save(tmp_path, 100, wholes(OLD), {}, SingleProcess())
    assert [path.name for path in (first, second, third)] == [
        "step-00000100",
        "step-00000100.1",
        "step-00000100.2",
    ]
    assert checkpoints(tmp_path) == [third]
    assert same_bits(loaded(third), OLD)


def test_the_manifest_stays_small_with_many_tensors(tmp_path: Path) -> None:
    many = [Piece.whole(f"model/blocks.{index}.weight", torch.zeros(1)) for index in range(1000)]
    path = save(tmp_path, 1, many, {}, SingleProcess())
    # A name of 25 bytes, a file name of 22, and about 70 of JSON around them.
    assert (path / "manifest.json").stat().st_size < 1000 * 130


@pytest.mark.parametrize(
    ("intervals", "reason"),
    [
        ([[(0, 4)], [(6, 10)]], r"elements \[4, 6\) of tensor 't' are in no piece"),
        ([[(0, 6)], [(4, 10)]], r"elements \[4, 6\) of tensor 't' are in two pieces"),
        ([[(0, 10)], [(0, 10)]], r"elements \[0, 10\) of tensor 't' are in two pieces"),
        ([[(2, 6)], [(6, 10)]], r"elements \[0, 2\) of tensor 't' are in no piece"),
        ([[(0, 4)], [(4, 8)]], r"elements \[8, 10\) of tensor 't' are in no piece"),
        ([[(0, 4), (0, 4)], [(4, 10)]], r"rank 0: this rank holds piece 't\[0:4\]' twice"),
    ],
)
def test_pieces_with_a_gap_or_an_overlap_are_refused_on_all_ranks(
    intervals: Sequence[Sequence[tuple[int, int]]], reason: str, tmp_path: Path
) -> None:
    def pieces(rank: int) -> list[Piece]:
        return [Piece("t", (10,), start, stop, torch.zeros(stop - start)) for start, stop in intervals[rank]]

    errors = on_ranks(2, lambda ranks: save(tmp_path, 1, pieces(ranks.rank), {}, ranks))
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(CheckpointError, match=reason):
        raise errors[1]
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (torch.zeros(4), torch.zeros(4).half(), "'t' is F16 .* on rank 1, and F32"),
        (torch.zeros(4), torch.zeros(4, 1), r"'t' is F32 \[4, 1\] on rank 1, and F32 \[4\]"),
        (
            torch.zeros(4, dtype=torch.complex64),
            torch.zeros(4),
            "rank 0: .*complex64, which cannot be stored",
        ),
    ],
)
def test_ranks_that_disagree_on_a_tensor_are_refused(
    first: torch.Tensor, second: torch.Tensor, reason: str, tmp_path: Path
) -> None:
    def piece(rank: int) -> Piece:
        tensor = (first, second)[rank]
        part = tensor.reshape(-1)[2 * rank : 2 * rank + 2]
        return Piece("t", tuple(tensor.shape), 2 * rank, 2 * rank + 2, part)

    errors = on_ranks(2, lambda ranks: save(tmp_path, 1, [piece(ranks.rank)], {}, ranks))
    with pytest.raises(CheckpointError, match=reason):
        raise errors[1]


@pytest.mark.parametrize("state", [{"loss": float("nan")}, {"plan": object()}, {"seed": torch.zeros(1)}])
def test_a_state_that_is_not_json_is_refused(state: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the state to save is not JSON"):
        save(tmp_path, 1, wholes(OLD), state, SingleProcess())
    assert names(tmp_path) == []


def test_a_name_that_safetensors_reserves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="__metadata__"):
        save(tmp_path, 1, [Piece.whole("__metadata__", torch.zeros(1))], {}, SingleProcess())


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("full", [0, 1])
def test_a_disk_full_anywhere_raises_alike_on_all_ranks_and_leaves_no_litter(
    full: int, tmp_path: Path
) -> None:
    template = tmp_path / "template"
    save(template, 100, wholes(OLD), {}, SingleProcess())
    counted = [StoppingFiles(), StoppingFiles()]
    directory = shutil.copytree(template, tmp_path / "counted")
    on_ranks(2, lambda ranks: save(directory, 200, share(NEW, ranks.rank, 2), {}, ranks, counted[ranks.rank]))

    for place in range(counted[full].places):
        directory = shutil.copytree(template, tmp_path / str(place))
        disks = [StoppingFiles(), StoppingFiles()]
        disks[full] = StoppingFiles(place, disk_full)
        errors = on_ranks(
            2,
            lambda ranks, directory=directory, disks=disks: save(
                directory, 200, share(NEW, ranks.rank, 2), {}, ranks, disks[ranks.rank]
            ),
        )
        assert all(type(error) is CheckpointError for error in errors)
        assert {str(error) for error in errors} == {
            f"cannot save step 200 in {directory}: rank {full}: No space left on device"
        }
        found = latest(directory, SingleProcess(), pytest.fail)
        assert found is not None
        assert same_bits(loaded(found), OLD if found.name == "step-00000100" else NEW)
        assert names(directory) == sorted(path.name for path in checkpoints(directory))


def test_a_disk_that_fails_while_the_first_save_of_a_step_is_deleted_does_not_fail_the_second(
    tmp_path: Path,
) -> None:
    template = tmp_path / "template"
    save(template, 100, wholes(OLD), {}, SingleProcess())
    counted = StoppingFiles()
    save(shutil.copytree(template, tmp_path / "counted"), 100, wholes(NEW), {}, SingleProcess(), counted)
    deletions = 5  # a rename, a sync, two files, a directory
    for place in range(counted.places - deletions, counted.places):
        directory = shutil.copytree(template, tmp_path / str(place))
        files = StoppingFiles(place, disk_full)
        path = save(directory, 100, wholes(NEW), {}, SingleProcess(), files)
        assert latest(directory, SingleProcess(), pytest.fail) == path
        assert same_bits(loaded(path), NEW)


def test_a_directory_that_only_rank_zero_sees_is_named_as_such(tmp_path: Path) -> None:
    errors = on_ranks(
        2, lambda ranks: save(tmp_path / str(ranks.rank), 1, share(OLD, ranks.rank, 2), {}, ranks)
    )
    assert all(
        "rank 1" in str(error) and "all ranks must see the same file system" in str(error) for error in errors
    )


def test_ranks_of_a_process_group_save_and_verify_together(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        coordinator = ProcessGroupCoordinator()
        assert (coordinator.rank, coordinator.size) == (rank, 2)
        verify(save(tmp_path / "checkpoints", 100, share(OLD, rank, 2), {}, coordinator), coordinator)

    children = [fork(lambda r=rank: run(r)) for rank in range(2)]
    assert [reap(child) for child in children] == [0, 0]
    [path] = checkpoints(tmp_path / "checkpoints")
    assert same_bits(loaded(path), OLD)
    assert set(read_manifest(path).files) == {"rank-00000.safetensors", "rank-00001.safetensors"}
