"""A checkpoint is loaded and verified in one pass: nothing in use changes before all of it is sound."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_stand_ins import flip, fork, reap, same_bits, share, tensors, wholes
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_stand_ins import on_ranks

from shoal.checkpoint import Coordinator, Piece, Region, SingleProcess, load_verified, read_together, save
from shoal.checkpoint.shard import HashedPass, ShardReader
from shoal.errors import CheckpointError, CorruptCheckpointError, TrainingError

STATE = {
    **tensors(5),
    "model/large": torch.arange(1_500_000.0).reshape(1500, 1000),  # files of several chunks
    "optimizer/moment": torch.arange(700_000.0),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three ranks."""
    directory = tmp_path_factory.mktemp("template")
    return on_ranks(3, lambda ranks: save(directory, 1, share(STATE, ranks.rank, 3), {}, ranks))[0]


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}


def loaded(path: Path, ranks: Coordinator, size: int) -> dict[str, torch.Tensor]:
    """Loads a part of the checkpoint on this rank of `size`; returns all, filled in this part alone."""
    into = blank()
    pieces = share(into, ranks.rank, size)
    manifest = read_together(path, ranks)
    load_verified(path, manifest, ranks, fresh=pieces[::2], in_use=pieces[1::2])
    return into


@settings(max_examples=15, deadline=None)
@given(readers=st.integers(1, 4))
def test_any_number_of_ranks_loads_what_was_saved(template: Path, readers: int) -> None:
    parts = on_ranks(readers, lambda ranks: loaded(template, ranks, readers))
    for part in parts[1:]:
        for name, tensor in part.items():
            parts[0][name] += tensor
    assert same_bits(parts[0], STATE)


def test_every_rank_may_want_everything_in_another_dtype_and_blocks_of_it(template: Path) -> None:
    region = Region.whole((1500, 1000)).narrow(1, 300, 200)

    def run(ranks: Coordinator) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        whole = blank()
        half, block = torch.zeros(700_000, dtype=torch.bfloat16), torch.zeros(1500, 200)
        named = Piece("model/large", (1500, 1000), 0, 300_000, block, region)
        wanted = [*wholes(whole), Piece.whole("optimizer/moment", half), named]
        load_verified(template, read_together(template, ranks), ranks, fresh=wanted)
        return whole, half, block

    for whole, half, block in on_ranks(2, run):
        assert same_bits(whole, STATE)
        assert torch.equal(half, STATE["optimizer/moment"].bfloat16())
        assert torch.equal(block, STATE["model/large"][:, 300:500])


def test_under_the_layout_of_the_save_each_byte_is_read_once_and_what_is_in_use_again(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = ShardReader.read_bytes
    monkeypatch.setattr(
        ShardReader, "read_bytes", lambda self, at, to: (read.append(len(to)), original(self, at, to))
    )
    on_ranks(3, lambda ranks: loaded(template, ranks, 3))
    in_use = sum(piece.tensor.nbytes for rank in range(3) for piece in share(STATE, rank, 3)[1::2])
    assert sum(read) == sum(path.stat().st_size for path in template.glob("*.safetensors")) + in_use


@pytest.mark.parametrize("readers", [1, 3, 4])
def test_a_flip_of_any_byte_is_found_and_its_file_named_before_anything_in_use_changes(
    readers: int, template: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(template, tmp_path / template.name)
    generator = random.Random(readers)
    for file in sorted(path.glob("*.safetensors")):
        for position in (3, generator.randrange(file.stat().st_size), -1):
            flip(file, position)

            def run(ranks: Coordinator, file: Path = file) -> dict[str, torch.Tensor]:
                into = blank()
                with pytest.raises(CorruptCheckpointError, match=file.name):
                    load_verified(
                        path, read_together(path, ranks), ranks, in_use=share(into, ranks.rank, readers)
                    )
                return into

            assert all(same_bits(into, blank()) for into in on_ranks(readers, run))
            flip(file, position)
    on_ranks(readers, lambda ranks: loaded(path, ranks, readers))


def test_files_that_no_rank_wants_are_verified_too(template: Path, tmp_path: Path) -> None:
    path = shutil.copytree(template, tmp_path / template.name)
    flip(path / "rank-00002.safetensors", -1)
    errors = on_ranks(2, lambda ranks: load_verified(path, read_together(path, ranks), ranks))
    assert all("rank-00002.safetensors was changed" in str(error) for error in errors)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_file_that_is_missing_or_short_is_named(damage: str, template: Path, tmp_path: Path) -> None:
    path = shutil.copytree(template, tmp_path / template.name)
    file = path / "rank-00001.safetensors"
    file.unlink() if damage == "missing" else file.write_bytes(file.read_bytes()[:-1])
    for error in on_ranks(2, lambda ranks: loaded(path, ranks, 2)):
        assert isinstance(error, CorruptCheckpointError)
        assert file.name in str(error)


def resident(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def load_and_tell_growth(path: Path, wanted: Callable[[str, tuple[int, ...]], Piece], into: Path) -> None:
    manifest = read_together(path, SingleProcess())
    pieces = [wanted(name, record.shape) for name, record in manifest.tensors.items()]
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    load_verified(path, manifest, SingleProcess(), fresh=pieces[8:], in_use=pieces[:8])
    into.write_text(str(resident("VmHWM") - before))


def test_under_another_layout_a_rank_takes_less_than_two_of_its_shards_beside_its_own(tmp_path: Path) -> None:
    """Four ranks save halves of the columns of 24 tensors, cut by data parallelism too: 96 MiB.

    One rank then reads all files for its half of each tensor, 48 MiB, of which a third is in use.
    """
    named = {f"model/{number:02}": torch.full((512, 2048), float(number)) for number in range(24)}

    def pieces(rank: int) -> list[Piece]:
        cut = []
        for name, tensor in named.items():
            block = Region.whole(tensor.shape).narrow(1, rank % 2 * 1024, 1024)
            part = tensor[rank // 2 * 256 :][:256, rank % 2 * 1024 :][:, :1024].contiguous()
            start = rank // 2 * part.numel()
            cut.append(Piece(name, tuple(tensor.shape), start, start + part.numel(), part, block))
        return cut

    path = on_ranks(4, lambda ranks: save(tmp_path, 1, pieces(ranks.rank), {}, ranks))[0]

    def rows(name: str, shape: tuple[int, ...]) -> Piece:
        return Piece(name, shape, 0, 256 * 2048, torch.ones(256, 2048))

    def columns(name: str, shape: tuple[int, ...]) -> Piece:
        block = Region.whole(shape).narrow(1, 512, 1024)
        return Piece(name, shape, 0, 512 * 1024, torch.ones(512, 1024), block)

    for wanted in (rows, columns):
        told = tmp_path / "told"
        child = fork(lambda wanted=wanted, told=told: load_and_tell_growth(path, wanted, told))
        assert reap(child) == 0
        assert float(told.read_text()) < 2 * 48


def test_a_file_that_cannot_be_read_again_is_named_as_what_stops_the_training(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(template, tmp_path / template.name)
    original = HashedPass.digest

    def digest(hashed: HashedPass) -> str:
        found = original(hashed)
        (path / "rank-00000.safetensors").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(HashedPass, "digest", digest)
    with pytest.raises(TrainingError, match=r"loaded only in part: .*rank-00000.safetensors cannot be read"):
        loaded(path, SingleProcess(), 1)


def test_what_does_not_fit_is_refused_on_all_ranks_before_anything_is_read(template: Path) -> None:
    def run(ranks: Coordinator) -> None:
        wanted = [Piece.whole("model/larg", torch.zeros(3))] if ranks.rank else []
        load_verified(template, read_together(template, ranks), ranks, fresh=wanted)

    for error in on_ranks(2, run):
        assert type(error) is CheckpointError
        assert "did you mean 'model/large'?" in str(error)
