"""What any number of ranks saved, any other number of ranks loads."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checkpoint_stand_ins import StoppingFiles, as_bytes, same_bits, share, tensors, wholes
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_stand_ins import on_ranks

from shoal.checkpoint import Piece, SingleProcess, load, read_manifest, save
from shoal.errors import CheckpointError, CorruptCheckpointError

DTYPES = (
    torch.bfloat16,
    torch.bool,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.uint8,
)


@dataclass
class Scattered:
    """A tensor, and for each rank the intervals of it that the rank holds."""

    tensor: torch.Tensor
    intervals: list[list[tuple[int, int]]]

    def pieces(self, name: str, rank: int) -> list[Piece]:
        flat = self.tensor.reshape(-1)
        return [
            Piece(name, tuple(self.tensor.shape), start, stop, flat[start:stop].clone())
            for start, stop in self.intervals[rank]
        ]


@st.composite
def any_tensor(draw: st.DrawFn) -> torch.Tensor:
    """Any bits, NaNs among them: a checkpoint keeps bits, not values."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


@st.composite
def scattered(draw: st.DrawFn, ranks: int) -> Scattered:
    tensor = draw(any_tensor())
    cuts = draw(st.lists(st.integers(0, tensor.numel()), max_size=5))
    bounds = sorted({0, tensor.numel(), *cuts})
    intervals: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for interval in pairwise(bounds):
        intervals[draw(st.integers(0, ranks - 1))].append(interval)
    if tensor.numel() == 0:
        intervals[draw(st.integers(0, ranks - 1))].append((0, 0))
    return Scattered(tensor, intervals)


@st.composite
def saved(draw: st.DrawFn) -> tuple[int, list[Scattered]]:
    ranks = draw(st.integers(1, 4))
    return ranks, draw(st.lists(scattered(ranks), min_size=1, max_size=3))


@settings(max_examples=80, deadline=None)
@given(saved=saved(), data=st.data())
def test_any_cut_over_any_ranks_loads_under_any_other_cut(
    saved: tuple[int, list[Scattered]], data: st.DataObject
) -> None:
    ranks, held = saved
    with tempfile.TemporaryDirectory() as directory:
        paths = on_ranks(
            ranks,
            lambda coordinator: save(
                Path(directory),
                1,
                [
                    piece
                    for index, one in enumerate(held)
                    for piece in one.pieces(f"t/{index}", coordinator.rank)
                ],
                {"rank": coordinator.rank},
                coordinator,
                StoppingFiles(),
            ),
        )
        assert paths == [Path(directory) / "step-00000001"] * ranks

        readers = data.draw(st.integers(1, 3))
        wanted: list[list[Piece]] = [[] for _ in range(readers)]
        for index, one in enumerate(held):
            size = one.tensor.numel()
            for rank in range(readers):
                start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
                blank = torch.zeros(stop - start, dtype=one.tensor.dtype)
                wanted[rank].append(Piece(f"t/{index}", tuple(one.tensor.shape), start, stop, blank))
        states = on_ranks(readers, lambda coordinator: load(paths[0], wanted[coordinator.rank], coordinator))

        assert states == [{"rank": 0}] * readers
        for pieces in wanted:
            for piece in pieces:
                original = held[int(piece.name[2:])].tensor.reshape(-1)[piece.start : piece.stop]
                assert torch.equal(as_bytes(piece.tensor), as_bytes(original))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 12), (12, 1), (1, 3, 4), (2, 1, 6), (3, 2, 2)])
def test_every_interval_of_a_tensor_saved_whole_can_be_loaded(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.randn(shape)
    path = save(tmp_path, 1, [Piece.whole("t", tensor)], {}, SingleProcess())
    wanted = [
        Piece("t", shape, start, stop, torch.zeros(stop - start))
        for start in range(tensor.numel() + 1)
        for stop in range(start, tensor.numel() + 1)
    ]
    load(path, wanted, SingleProcess())
    for piece in wanted:
        assert torch.equal(piece.tensor, tensor.reshape(-1)[piece.start : piece.stop])


def test_values_are_cast_to_the_dtype_that_is_wanted(tmp_path: Path) -> None:
    tensor = torch.randn(50)
    path = save(tmp_path, 1, [Piece.whole("t", tensor)], {}, SingleProcess())
    narrow = torch.zeros(50, dtype=torch.bfloat16)
    load(path, [Piece.whole("t", narrow)], SingleProcess())
    assert torch.equal(narrow, tensor.to(torch.bfloat16))


def test_a_parameter_is_filled_in_place_though_it_requires_a_gradient(tmp_path: Path) -> None:
    saved, fresh = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    path = save(tmp_path, 1, wholes(dict(saved.named_parameters())), {}, SingleProcess())
    load(path, wholes(dict(fresh.named_parameters())), SingleProcess())
    assert same_bits(fresh.state_dict(), saved.state_dict())
    assert fresh.weight.requires_grad


def test_the_state_comes_back_as_json_would_give_it(tmp_path: Path) -> None:
    state = {"position": 12, "loss": 0.1 + 0.2, "plan": "dp=2", "seeds": {10: (1, 2), 9: None}}
    path = save(tmp_path, 1, [], state, SingleProcess())
    expected = {"position": 12, "loss": 0.1 + 0.2, "plan": "dp=2", "seeds": {"10": [1, 2], "9": None}}
    assert load(path, [], SingleProcess()) == expected


def test_a_tensor_that_is_missing_is_named_with_the_nearest_on_all_ranks(tmp_path: Path) -> None:
    path = save(tmp_path, 1, wholes(tensors(1)), {}, SingleProcess())
    misspelt = Piece.whole("model/norm.wait", torch.zeros(6))
    errors = on_ranks(
        2, lambda coordinator: load(path, [misspelt] if coordinator.rank == 1 else [], coordinator)
    )
    assert [str(error) for error in errors] == [
        f"cannot load {path}: rank 1: tensor 'model/norm.wait' is not in the checkpoint "
        "(did you mean 'model/norm.weight'?)"
    ] * 2


def test_a_shape_that_differs_is_named_with_both_shapes(tmp_path: Path) -> None:
    path = save(tmp_path, 1, wholes(tensors(1)), {}, SingleProcess())
    with pytest.raises(
        CheckpointError, match=r"norm.weight' has shape \[6\] in the checkpoint, and \[2, 3\]"
    ):
        load(path, [Piece.whole("model/norm.weight", torch.zeros(2, 3))], SingleProcess())


def test_a_file_that_is_missing_is_named_when_it_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 1, wholes(tensors(1)), {}, SingleProcess())
    (path / "rank-00000.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000.safetensors cannot be read"):
        load(path, wholes(tensors(0)), SingleProcess())


def test_only_files_that_hold_what_is_wanted_are_read(tmp_path: Path) -> None:
    [path, _] = on_ranks(2, lambda ranks: save(tmp_path, 1, share(tensors(1), ranks.rank, 2), {}, ranks))
    (path / "rank-00001.safetensors").unlink()
    [first_half, *_] = share(tensors(0), 0, 2)
    load(path, [first_half], SingleProcess())
    assert torch.equal(first_half.tensor, share(tensors(1), 0, 2)[0].tensor)


def test_the_manifest_lists_a_tensor_without_elements(tmp_path: Path) -> None:
    path = save(tmp_path, 1, [Piece.whole("empty", torch.zeros(0, 3))], {}, SingleProcess())
    record = read_manifest(path).tensors["empty"]
    assert (record.shape, record.pieces) == ((0, 3), ())


@pytest.mark.parametrize(
    ("start", "stop", "held", "reason"),
    [
        (-1, 2, torch.zeros(3), "not inside its 6 elements"),
        (4, 7, torch.zeros(3), "not inside its 6 elements"),
        (0, 4, torch.zeros(3), "a tensor of 3 elements"),
        (0, 6, torch.zeros(3, 2).t(), "not contiguous"),
    ],
)
def test_a_piece_that_is_not_its_interval_is_refused(
    start: int, stop: int, held: torch.Tensor, reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        Piece("t", (2, 3), start, stop, held)
