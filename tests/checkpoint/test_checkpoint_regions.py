"""Tensors cut along dims, and what is left at any element: saved in one layout, loaded in any other."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_stand_ins import StoppingFiles, as_bytes, names
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_stand_ins import on_ranks

from shoal.checkpoint import Piece, Region, SingleProcess, load, read_manifest, save, verify
from shoal.checkpoint.region import Run, check_coverage, overlaps, runs
from shoal.errors import CheckpointError

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.bool,
)


@dataclass
class Layout:
    """For each rank, what it holds of a tensor: intervals of flattened regions."""

    held: list[list[tuple[Region, int, int]]]

    def pieces(self, name: str, tensor: torch.Tensor, rank: int) -> list[Piece]:
        return [
            Piece(
                name, tuple(tensor.shape), start, stop, block_of(tensor, region)[start:stop].clone(), region
            )
            for region, start, stop in self.held[rank]
        ]


def block_of(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The elements of a region, flattened: by slices, as a reference."""
    ends = zip(region.offset, region.end, strict=True)
    return tensor[tuple(slice(first, end) for first, end in ends)].reshape(-1)


@st.composite
def intervals(draw: st.DrawFn, elements: int) -> list[tuple[int, int]]:
    cuts = draw(st.lists(st.integers(0, elements), max_size=3))
    return list(pairwise(sorted({0, elements, *cuts}))) or [(0, 0)]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> Layout:
    """A grid of regions, as several axes make it, each cut at any element and dealt to ranks."""
    edges = [
        list(pairwise(sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))}))) or [(0, 0)]
        for length in shape
    ]
    held: list[list[tuple[Region, int, int]]] = [[] for _ in range(ranks)]
    for cell in product(*edges):
        region = Region(tuple(first for first, _ in cell), tuple(end - first for first, end in cell))
        for start, stop in draw(intervals(region.elements)):
            held[draw(st.integers(0, ranks - 1))].append((region, start, stop))
    return Layout(held)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    bounds = [sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length)))) for length in shape]
    return Region(tuple(first for first, _ in bounds), tuple(end - first for first, end in bounds))


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    size = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


@settings(max_examples=120, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 1000), data=st.data())
def test_what_is_saved_in_any_layout_loads_in_any_other(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = random_bits(shape, dtype, seed)
    savers, loaders = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    saved, wanted = data.draw(layouts(shape, savers)), data.draw(layouts(shape, loaders))
    blank = torch.zeros_like(tensor)
    targets = [wanted.pieces("t", blank, rank) for rank in range(loaders)]
    with tempfile.TemporaryDirectory() as directory:
        path, *_ = on_ranks(
            savers,
            lambda ranks: save(
                Path(directory), 1, saved.pieces("t", tensor, ranks.rank), {}, ranks, StoppingFiles()
            ),
        )
        verify(path)
        on_ranks(loaders, lambda ranks: load(path, targets[ranks.rank], ranks))
        whole = torch.zeros_like(tensor)
        load(path, [Piece.whole("t", whole)], SingleProcess())
    assert torch.equal(as_bytes(whole), as_bytes(tensor))
    for pieces in targets:
        for piece in pieces:
            expected = block_of(tensor, piece.block)[piece.start : piece.stop]
            assert torch.equal(as_bytes(piece.tensor), as_bytes(expected))


@settings(max_examples=200, deadline=None)
@given(shape=shapes, data=st.data())
def test_the_runs_of_an_interval_are_its_elements_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    region = data.draw(regions(shape))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, region.elements)] * 2)))
    numbered = torch.arange(math.prod(shape)).reshape(shape)
    found = list(runs(region, start, stop))
    elements = [element for run in found for element in block_of(numbered, run.block).tolist()]
    assert elements == block_of(numbered, region)[start:stop].tolist()
    assert [run.first for run in found] == [
        sum(before.block.elements for before in found[:index]) for index in range(len(found))
    ]
    assert len(found) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=200, deadline=None)
@given(shape=shapes, data=st.data())
def test_two_pieces_meet_in_just_the_elements_that_both_hold(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numbered = torch.arange(math.prod(shape)).reshape(shape)
    one, other = (
        (region, *sorted(data.draw(st.tuples(*[st.integers(0, region.elements)] * 2))))
        for region in (data.draw(regions(shape)), data.draw(regions(shape)))
    )
    first, second = (block_of(numbered, region)[start:stop] for region, start, stop in (one, other))
    met = []
    for run, opposite, part in overlaps(one, other):
        assert torch.equal(run.view(first, part), opposite.view(second, part))
        met += run.view(first, part).reshape(-1).tolist()
    assert sorted(met) == sorted(set(first.tolist()) & set(second.tolist()))


@settings(max_examples=300, deadline=None)
@given(shape=shapes, data=st.data())
def test_pieces_cover_a_tensor_if_and_only_if_counting_says_so(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    pieces = [piece for held in data.draw(layouts(shape, 1)).held for piece in held]
    match data.draw(st.sampled_from(["as they are", "one less", "one twice", "one more"])):
        case "one less":
            pieces.pop(data.draw(st.integers(0, len(pieces) - 1)))
        case "one twice":
            pieces.append(data.draw(st.sampled_from(pieces)))
        case "one more":
            region = data.draw(regions(shape))
            pieces.append((region, 0, data.draw(st.integers(0, region.elements))))
    count = torch.zeros(math.prod(shape), dtype=torch.int64)
    numbered = torch.arange(math.prod(shape)).reshape(shape)
    for region, start, stop in pieces:
        count[block_of(numbered, region)[start:stop]] += 1
    if bool((count == 1).all()):
        check_coverage("t", shape, pieces)
    else:
        with pytest.raises(CheckpointError, match=r"'t' (is|are) in (no piece|two pieces|[0-9]+ pieces)"):
            check_coverage("t", shape, pieces)


def columns(rank: int, ranks: int, tensor: torch.Tensor) -> Piece:
    """A rank's share of the columns of a matrix."""
    width = tensor.shape[1] // ranks
    region = Region.whole(tensor.shape).narrow(1, rank * width, width)
    held = block_of(tensor, region)
    return Piece("t", tuple(tensor.shape), 0, len(held), held, region)


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ([0], r"block \[0:4,3:6\] of tensor 't' is in no piece"),
        ([1], r"block \[0:4,0:3\] of tensor 't' is in no piece"),
        ([0, 1, 1], r"elements \[0, 12\) of block \[0:4,3:6\] of tensor 't' are in two pieces"),
    ],
)
def test_columns_with_a_gap_or_an_overlap_are_refused(kept: list[int], reason: str, tmp_path: Path) -> None:
    tensor = torch.randn(4, 6)
    errors = on_ranks(
        len(kept), lambda ranks: save(tmp_path, 1, [columns(kept[ranks.rank], 2, tensor)], {}, ranks)
    )
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(CheckpointError, match=reason):
        raise errors[0]
    assert names(tmp_path) == []


def test_columns_are_refused_beside_the_whole(tmp_path: Path) -> None:
    tensor = torch.randn(4, 6)
    pieces = [Piece.whole("t", tensor), columns(1, 2, tensor)]
    errors = on_ranks(2, lambda ranks: save(tmp_path, 1, [pieces[ranks.rank]], {}, ranks))
    with pytest.raises(CheckpointError, match=r"block \[0:4,3:6\] of tensor 't' is in two pieces"):
        raise errors[0]


def test_a_block_keeps_its_shape_in_the_file_and_its_region_in_the_manifest(tmp_path: Path) -> None:
    tensor = torch.randn(4, 6)
    path, _ = on_ranks(2, lambda ranks: save(tmp_path, 1, [columns(ranks.rank, 2, tensor)], {}, ranks))
    stored = safetensors.torch.load_file(path / "rank-00001.safetensors")
    assert torch.equal(stored["t[0:4,3:6]"], tensor[:, 3:])
    body = json.loads((path / "manifest.json").read_bytes())
    assert body["tensors"]["t"]["pieces"][1] == {
        "file": "rank-00001.safetensors",
        "region": {"offset": [0, 3], "shape": [4, 3]},
        "interval": [0, 12],
    }


def test_rows_are_stored_as_the_interval_that_they_are(tmp_path: Path) -> None:
    tensor = torch.randn(4, 6)

    def rows(rank: int) -> Piece:
        region = Region.whole((4, 6)).narrow(0, 2 * rank, 2)
        return Piece("t", (4, 6), 0, 12, tensor[2 * rank : 2 * rank + 2], region)

    path, _ = on_ranks(2, lambda ranks: save(tmp_path, 1, [rows(ranks.rank)], {}, ranks))
    pieces = read_manifest(path).tensors["t"].pieces
    assert [(piece.start, piece.stop, piece.region) for piece in pieces] == [(0, 12, None), (12, 24, None)]


def test_a_manifest_without_regions_is_read_as_before(tmp_path: Path) -> None:
    """Written here byte for byte as the version before regions wrote it."""
    tensor = torch.randn(4, 6)
    path = tmp_path / "step-00000007"
    path.mkdir()
    content = safetensors.torch.save(
        {"t[0:10]": tensor.reshape(-1)[:10], "t[10:24]": tensor.reshape(-1)[10:]}
    )
    (path / "rank-00000.safetensors").write_bytes(content)
    body = {
        "format": 1,
        "step": 7,
        "files": {
            "rank-00000.safetensors": {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        },
        "tensors": {
            "t": {
                "dtype": "F32",
                "shape": [4, 6],
                "pieces": [
                    {"file": "rank-00000.safetensors", "start": 0, "stop": 10},
                    {"file": "rank-00000.safetensors", "start": 10, "stop": 24},
                ],
            }
        },
        "state": {},
    }
    compact = {"separators": (",", ":"), "sort_keys": True}
    digest = hashlib.sha256(json.dumps(body, **compact).encode()).hexdigest()
    text = json.dumps({"sha256": digest, **body}, **compact).encode()
    (path / "manifest.json").write_bytes(text)
    verify(path)
    wanted = columns(1, 2, torch.zeros(4, 6))
    load(path, [wanted], SingleProcess())
    assert torch.equal(wanted.tensor, block_of(tensor, wanted.block))
    assert read_manifest(path).to_json() == text


def test_only_files_that_hold_a_wanted_column_are_read(tmp_path: Path) -> None:
    tensor = torch.randn(4, 6)
    path, _ = on_ranks(2, lambda ranks: save(tmp_path, 1, [columns(ranks.rank, 2, tensor)], {}, ranks))
    (path / "rank-00001.safetensors").unlink()
    wanted = columns(0, 3, torch.zeros(4, 6))
    load(path, [wanted], SingleProcess())
    assert torch.equal(wanted.tensor, block_of(tensor, wanted.block))


def test_a_region_of_a_region_counts_from_the_inner_one() -> None:
    part = Region.whole((8, 6)).narrow(0, 4, 4).narrow(1, 2, 3).narrow(0, 1, 2)
    assert part == Region((5, 2), (2, 3))
    with pytest.raises(CheckpointError, match=r"block of shape \[2, 3\] has no indices \[2, 4\) of dim 1"):
        part.narrow(1, 2, 2)


@pytest.mark.parametrize(
    ("region", "elements", "reason"),
    [
        (Region((0, 4), (4, 3)), 12, r"region \[0:4,4:7\] of 't' is not inside its shape \[4, 6\]"),
        (Region((0,), (4,)), 4, r"region \[0:4\] of 't' is not inside"),
        (Region((0, 3), (4, 3)), 13, "not inside its 12 elements"),
    ],
)
def test_a_piece_outside_its_tensor_or_its_region_is_refused(
    region: Region, elements: int, reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        Piece("t", (4, 6), 0, elements, torch.zeros(elements), region)


def test_one_element_with_any_stride_is_saved(tmp_path: Path) -> None:
    tensor = torch.randn(2, 2)
    region = Region.whole((2, 2)).narrow(1, 1, 1)
    elements = tensor[:, 1]
    pieces = [
        Piece.whole("whole", elements[1:]),
        Piece("t", (2, 2), 0, 1, elements[:1], region),
        Piece("t", (2, 2), 1, 2, elements[1:], region),
        Piece("t", (2, 2), 0, 2, tensor[:, 0].clone(), Region.whole((2, 2)).narrow(1, 0, 1)),
    ]
    path = save(tmp_path, 1, pieces, {}, SingleProcess())
    blank = torch.zeros(2, 2)
    load(path, [Piece.whole("t", blank)], SingleProcess())
    assert torch.equal(blank, tensor)


@given(data=st.data(), shape=st.lists(st.integers(1, 4), max_size=4).map(tuple), first=st.integers(0, 9))
def test_it_is_known_which_blocks_are_consecutive(
    data: st.DataObject, shape: tuple[int, ...], first: int
) -> None:
    outer = data.draw(regions(shape).filter(lambda region: region.elements > 0))
    inner = data.draw(regions(outer.shape).filter(lambda region: region.elements > 0))
    part = Region(tuple(map(sum, zip(outer.offset, inner.offset, strict=True))), inner.shape)
    run = Run(first, outer)
    places = run.view(torch.arange(first + outer.elements), part).flatten()
    is_consecutive = torch.equal(places, torch.arange(places[0], places[0] + len(places)))
    assert run.first_of(part) == (places[0] if is_consecutive else None)
