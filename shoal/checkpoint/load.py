"""Loads checkpoints: each rank reads the elements that it wants from the files that hold them.

`load_verified` verifies a checkpoint meanwhile. The protocol has these steps, in order:

1. Each rank tells of which files it wants most. From this all ranks choose the same reader for each file: the
   rank that wants most of it, or, for a file of which nobody tells, the rank with the least to read.
2. The reader of a file reads it in full, and hashes it meanwhile. Its own elements go to their place on the
   way, if that is new memory; other ranks read only what they want. Under the Plan of the save each file is
   read once.
3. The ranks tell each other the result. Only if all files are sound, each reads what replaces values that are
   in use. It passed through memory just before, and mostly is in the system's cache. To keep it instead would
   take new memory, which comes slowly from some systems: it took three times as long as to read it again.

Where no file system holds all of a checkpoint (`Spread`), a rank first gets the files that it wants from
other hosts, which verifies them, and a file is read by those alone that want some of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from shoal.checkpoint.coordinator import Coordinator, SingleProcess, Spread, attempt_together
from shoal.checkpoint.directory import check_hash, check_size
from shoal.checkpoint.manifest import FileRecord, Manifest, StoredPiece, TensorRecord, read_manifest
from shoal.checkpoint.region import Piece, Region, Run, overlaps
from shoal.checkpoint.shard import HashedPass, ShardReader, dtype_named
from shoal.collectives.host_buffers import BounceBuffers
from shoal.errors import CheckpointError, CorruptCheckpointError, TrainingError, nearest

_TOLD = 4  # files of which a rank tells, so that what all ranks tell grows with their number alone


@dataclass(frozen=True)
class _Copy:
    """A copy of a region of a tensor, from a stored piece into a wanted piece.

    Attributes:
        source: The stored piece.
        target: The wanted piece.
        source_run: The block that contains the region and is consecutive in the source.
        target_run: The block that contains the region and is consecutive in the target.
        region: The region that both hold.
        dtype: The source's dtype.
    """

    source: StoredPiece
    target: Piece
    source_run: Run
    target_run: Run
    region: Region
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """Name of the source in its file."""
        return self.source.key(self.target.name, self.target.shape)

    @property
    def first(self) -> int | None:
        """The region's first element in the source; None if it is not consecutive there."""
        return self.source_run.first_of(self.region)

    @property
    def nbytes(self) -> int:
        """Bytes of the region in the file."""
        return self.region.elements * self.dtype.itemsize

    def target_view(self) -> torch.Tensor:
        """Return the elements to fill."""
        return self.target_run.view(self.target.tensor.detach().view(-1), self.region)


def load(path: Path, wanted: Sequence[Piece], coordinator: Coordinator) -> Mapping[str, Any]:
    """Fill the wanted pieces from a checkpoint, which any number of ranks may have saved.

    Values are cast to the dtype of the piece that they fill. Other tensors of the checkpoint are not read.
    Hashes are not checked: `verify` does that, and `load_verified` while it reads.

    Args:
        path: The directory of the checkpoint.
        wanted: The pieces that this rank wants; each piece's tensor is filled in place.
        coordinator: The ranks that load together; each has its own `wanted`.

    Returns:
        The `state` that was saved.

    Raises:
        CheckpointError: A tensor is not in the checkpoint, or has another shape. The message names it, and
            the rank that wants it. All ranks raise the same error.
        CorruptCheckpointError: The manifest or a file cannot be read. All ranks raise the same error.
    """
    states = attempt_together(coordinator, f"cannot load {path}", lambda: _load_share(path, wanted))
    return states[coordinator.rank]


def _load_share(path: Path, wanted: Sequence[Piece]) -> Mapping[str, Any]:
    manifest = read_manifest(path)
    fill(path, manifest, wanted)
    return manifest.state


def load_verified(
    path: Path,
    manifest: Manifest,
    coordinator: Coordinator,
    *,
    fresh: Sequence[Piece] = (),
    in_use: Sequence[Piece] = (),
    spread: Spread | None = None,
) -> None:
    """Fill pieces as `load` does, and compare every file of the checkpoint with its hash; all ranks call it.

    Args:
        path: The directory of the checkpoint.
        manifest: Its manifest.
        coordinator: The ranks that load together; each has its own pieces.
        fresh: Pieces that are filled as they are read. After an error their values mean nothing.
        in_use: Pieces that are filled once all files are known to be sound: after an error they are as
            before.
        spread: How the checkpoints of a directory are spread over hosts, if there is such a directory.

    Raises:
        CheckpointError: A tensor is not in the checkpoint, or does not fit. All ranks raise the same error.
        CorruptCheckpointError: A file is not what was written. All ranks raise the same error.
        TrainingError: A sound file could not be read once more, and pieces in use may be filled in part. All
            ranks raise the same error.
    """
    purpose = f"cannot load {path}"
    mine: dict[str, list[_Copy]] = {}

    def choose() -> dict[str, int]:
        wants = {name: _nbytes(copies) for name, copies in _copies_by_file(manifest, in_use).items()}
        mine.update(_copies_by_file(manifest, fresh))
        for name, copies in mine.items():
            wants[name] = wants.get(name, 0) + _nbytes(copies)
        return {name: wants[name] for name in nlargest(_TOLD, wants, key=wants.__getitem__)}

    readers = _readers(manifest.files, attempt_together(coordinator, purpose, choose))
    to_verify = {name for name, rank in readers.items() if rank == coordinator.rank}
    if spread is not None and path.parent != spread.directory:
        spread = None

    def read() -> None:
        if spread is not None:
            wanted = mine.keys() | _copies_by_file(manifest, in_use).keys()
            to_verify.intersection_update(wanted)
            spread.require(path, manifest, wanted)
        for name in to_verify:
            check_size(path / name, manifest.files[name])
        with BounceBuffers() as buffers:
            for name in sorted(mine.keys() | to_verify):
                if name in to_verify:
                    _read_and_verify(path / name, manifest.files[name], mine.get(name, []), buffers)
                else:
                    _read_file(path / name, mine[name], buffers)

    attempt_together(coordinator, purpose, read)
    try:
        attempt_together(coordinator, purpose, lambda: fill(path, manifest, in_use))
    except CheckpointError as error:
        raise TrainingError(
            f"{path} was sound, and could not be read once more: the model is loaded only in part: {error}"
        ) from error


def _nbytes(copies: Sequence[_Copy]) -> int:
    return sum(copy.nbytes for copy in copies)


def _readers(files: Mapping[str, FileRecord], wants: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the rank that reads each file in full; ranks that want equal parts get about equal bytes."""
    wanted_by: dict[str, dict[int, int]] = {}
    for rank, told in enumerate(wants):
        for name, nbytes in told.items():
            wanted_by.setdefault(name, {})[rank] = nbytes
    to_read = [0] * len(wants)
    readers = {}
    for name in sorted(files, key=lambda name: (name not in wanted_by, -files[name].size, name)):
        by_rank = wanted_by.get(name) or dict.fromkeys(range(len(wants)), 0)
        most = max(by_rank.values())
        readers[name] = min(
            (rank for rank, nbytes in by_rank.items() if nbytes == most),
            key=lambda rank: (to_read[rank], rank),
        )
        to_read[readers[name]] += files[name].size
    return readers


def _read_file(path: Path, copies: Sequence[_Copy], buffers: BounceBuffers) -> None:
    with _opened(path) as reader:
        for copy in _in_order_of_file(copies, reader):
            _perform(copy, reader, reader, buffers)


def _read_and_verify(path: Path, record: FileRecord, copies: Sequence[_Copy], buffers: BounceBuffers) -> None:
    with _opened(path) as reader, HashedPass(reader) as hashed:
        later = []
        for copy in _in_order_of_file(copies, reader):
            if copy.first is None:
                later.append(copy)
            else:
                _perform(copy, reader, hashed, buffers)
        check_hash(path, hashed.digest(), record)
        for copy in later:
            _perform(copy, reader, reader, buffers)


def fill(path: Path, manifest: Manifest, wanted: Sequence[Piece]) -> None:
    """Fill the wanted pieces from a checkpoint whose manifest was read; errors as in `load`."""
    with BounceBuffers() as buffers:
        for name, copies in sorted(_copies_by_file(manifest, wanted).items()):
            _read_file(path / name, copies, buffers)


def _copies_by_file(manifest: Manifest, wanted: Sequence[Piece]) -> dict[str, list[_Copy]]:
    """Return the copies that fill the wanted pieces, for each file that holds any of them.

    Raises:
        CheckpointError: A tensor is not in the checkpoint, or has another shape, or a dtype that does not
            convert to the wanted one.
    """
    by_file: defaultdict[str, list[_Copy]] = defaultdict(list)
    for piece in wanted:
        for copy in _copies(manifest, piece):
            by_file[copy.source.file].append(copy)
    return by_file


def _in_order_of_file(copies: Iterable[_Copy], reader: ShardReader) -> list[_Copy]:
    """Return copies from a file in its order; those that are not consecutive in it come last."""
    return sorted(copies, key=lambda copy: (copy.first is None, reader.start(copy.key), copy.first or 0))


@contextmanager
def _opened(path: Path) -> Iterator[ShardReader]:
    """Open a file of a checkpoint.

    Raises:
        CorruptCheckpointError: It cannot be opened, or something in this context could not be read.
    """
    try:
        with ShardReader(path) as reader:
            yield reader
    except (OSError, ValueError, SafetensorError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error}") from error


def _copies(manifest: Manifest, piece: Piece) -> Iterator[_Copy]:
    record = manifest.tensors.get(piece.name)
    if record is None:
        hint = nearest(piece.name, manifest.tensors)
        raise CheckpointError(f"tensor {piece.name!r} is not in the checkpoint{hint}")
    if record.shape != piece.shape:
        raise CheckpointError(
            f"tensor {piece.name!r} has shape {list(record.shape)} in the checkpoint, "
            f"and {list(piece.shape)} is expected"
        )
    dtype = dtype_named(record.dtype)
    if not _converts(dtype, piece.tensor.dtype):
        raise CheckpointError(
            f"tensor {piece.name!r} is {_title(dtype)} in the checkpoint, and {_title(piece.tensor.dtype)} "
            "is expected, to which it does not convert: use the type of the run that saved it"
        )
    mine = (piece.block, piece.start, piece.stop)
    for source in record.pieces:
        held = (source.block(record.shape), source.start, source.stop)
        for source_run, target_run, region in overlaps(held, mine):
            yield _Copy(source, piece, source_run, target_run, region, dtype)


def _converts(one: torch.dtype, other: torch.dtype) -> bool:
    """Return whether values of a type can be those of another one, for floating types with rounding."""
    is_wider_integer = not one.is_floating_point and one.itemsize < other.itemsize
    return other.is_floating_point or one == other or is_wider_integer


def _title(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _perform(
    copy: _Copy, reader: ShardReader, consecutive: ShardReader | HashedPass, buffers: BounceBuffers
) -> None:
    """Copy from a file, without memory in between where elements are consecutive in both.

    Args:
        copy: The copy.
        reader: The file.
        consecutive: Reads elements that are consecutive in the file.
        buffers: What copies to a device go through.
    """
    target, first = copy.target_view(), copy.first
    if first is None:
        buffers.put(target, copy.source_run.view(reader.mapped(copy.key).reshape(-1), copy.region))
    elif buffers.is_on_device(target):
        buffers.fill(target, copy.dtype, partial(_read, consecutive, copy.key, first))
    elif target.dtype == copy.dtype and target.device.type == "cpu" and target.is_contiguous():
        consecutive.read(copy.key, first, target)
    else:
        values = torch.empty(target.shape, dtype=copy.dtype)
        consecutive.read(copy.key, first, values)
        target.copy_(values)


def _read(
    consecutive: ShardReader | HashedPass, key: str, first: int, index: int, host: torch.Tensor
) -> None:
    consecutive.read(key, first + index, host)
    consecutive.settle()  # the buffer is soon used again


_OF_RANK = "rank/"
_TOGETHER = 1 << 26  # bytes of tensors that are read at once, unless one has more


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that differs between two checkpoints.

    Attributes:
        name: Its name.
        problem: Why its elements were not compared; "" if they were.
        elements: Its elements.
        differing: Those of them that differ; NaN does not differ from NaN.
        largest: The largest absolute difference; infinite where one is not finite and the other is another.
        magnitude: The largest absolute value of the first one that is finite.
    """

    name: str
    problem: str = ""
    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    magnitude: float = 0.0


def compare(first: Path, second: Path) -> Iterator[Difference]:
    """Return the tensors that differ between two checkpoints, in the order of their names.

    What belongs to single ranks, such as random generators, is not compared.

    Args:
        first, second: Directories of checkpoints.

    Raises:
        CorruptCheckpointError: A manifest or a file cannot be read.
    """
    ours, theirs = ({**read_manifest(path).tensors} for path in (first, second))
    pending: list[str] = []
    nbytes = 0
    for name in sorted(name for name in ours.keys() | theirs.keys() if not name.startswith(_OF_RANK)):
        problem = _problem(ours.get(name), theirs.get(name))
        if problem:
            yield Difference(name, problem)
            continue
        pending.append(name)
        nbytes += max(_bytes_of(ours[name]), _bytes_of(theirs[name]))
        if nbytes >= _TOGETHER:
            yield from _compared(first, second, ours, theirs, pending)
            pending, nbytes = [], 0
    yield from _compared(first, second, ours, theirs, pending)


def _problem(ours: TensorRecord | None, theirs: TensorRecord | None) -> str:
    if ours is None or theirs is None:
        return "only in the second" if ours is None else "only in the first"
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)} and {list(theirs.shape)}"
    return ""


def _bytes_of(record: TensorRecord) -> int:
    return torch.Size(record.shape).numel() * dtype_named(record.dtype).itemsize


def _compared(
    first: Path,
    second: Path,
    ours: dict[str, TensorRecord],
    theirs: dict[str, TensorRecord],
    names: list[str],
) -> Iterator[Difference]:
    read = []
    for path, records in ((first, ours), (second, theirs)):
        tensors = [torch.empty(records[name].shape, dtype=dtype_named(records[name].dtype)) for name in names]
        pieces = [Piece.whole(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
        load(path, pieces, SingleProcess())
        read.append(tensors)
    for name, one, other in zip(names, *read, strict=True):
        found = _difference(name, one.double(), other.double())
        if found.differing:
            yield found


def _difference(name: str, one: torch.Tensor, other: torch.Tensor) -> Difference:
    differs = (one != other) & ~(one.isnan() & other.isnan())
    apart = (one[differs] - other[differs]).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    finite = one[one.isfinite()].abs()
    return Difference(
        name,
        elements=one.numel(),
        differing=int(differs.sum()),
        largest=apart.max().item() if apart.numel() else 0.0,
        magnitude=finite.max().item() if finite.numel() else 0.0,
    )
