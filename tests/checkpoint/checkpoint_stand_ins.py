"""Ranks without a cluster, and disks that stop: what the tests of this folder share."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import REAL_FILES, Manifest, Piece, SingleProcess, load, read_manifest

KILLED = 17
RAISED = 3


class PipeExchange:
    """A Coordinator of two processes; it raises EOFError or BrokenPipeError when the other has died."""

    size = 2

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self.connection = connection

    def all_gather_object(self, value: Any) -> list[Any]:
        self.connection.send(value)
        other = self.connection.recv()
        return [value, other] if self.rank == 0 else [other, value]

    def gather_object(self, value: Any) -> list[Any] | None:
        values = self.all_gather_object(value)
        return values if self.rank == 0 else None


def fork(function: Callable[[], object]) -> int:
    """Starts `function` in a forked child; `reap` tells how it ended."""
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # a child that waits for ever ends by itself, and fails the test
        try:
            function()
        except BaseException:
            os._exit(RAISED)
        os._exit(0)
    return child


def reap(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class StoppingFiles:
    """A FileSystem that calls `stop` at its `at`-th place; without `at` it counts the places.

    There is a place before each operation, and within a write after every `grain` bytes: so a write stops
    before, torn in the middle, and just before its end.
    """

    def __init__(self, at: int | None = None, stop: Callable[[], object] = int, grain: int = 24) -> None:
        self.at = at
        self.stop = stop
        self.grain = grain
        self.places = 0

    def place(self) -> None:
        if self.places == self.at:
            self.places += 1
            self.stop()
        else:
            self.places += 1

    def make_directory(self, path: Path) -> None:
        self.place()
        REAL_FILES.make_directory(path)

    def create(self, path: Path) -> FileIO:
        self.place()
        return REAL_FILES.create(path)

    def write(self, file: FileIO, data: memoryview) -> None:
        for first in range(0, len(data), self.grain):
            self.place()
            REAL_FILES.write(file, data[first : first + self.grain])

    def sync(self, file: FileIO) -> None:
        self.place()

    def sync_directory(self, path: Path) -> None:
        self.place()

    def rename(self, source: Path, target: Path) -> None:
        self.place()
        REAL_FILES.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self.place()
        REAL_FILES.link(source, target)

    def remove_file(self, path: Path) -> None:
        self.place()
        REAL_FILES.remove_file(path)

    def remove_directory(self, path: Path) -> None:
        self.place()
        REAL_FILES.remove_directory(path)


class LosingPower(StoppingFiles):
    """A disk that keeps, when it stops, only what a sync promised: the worst that POSIX allows.

    Content that was not synced is gone, and so are entries whose directory was not synced after them. Renames
    that were not synced are undone or kept, as `renames_last` says: a disk may do either.
    """

    def __init__(self, at: int, renames_last: bool) -> None:
        super().__init__(at, self.lose, grain=400)  # where within a file it stops makes no difference here
        self.renames_last = renames_last
        self.content: set[Path] = set()
        self.entries: set[Path] = set()
        self.renames: list[tuple[Path, Path]] = []

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        self.entries.add(path)

    def create(self, path: Path) -> FileIO:
        file = super().create(path)
        self.content.add(path)
        self.entries.add(path)
        return file

    def sync(self, file: FileIO) -> None:
        super().sync(file)
        self.content.discard(Path(file.name))

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.entries = {entry for entry in self.entries if entry.parent != path}
        self.renames = [(source, target) for source, target in self.renames if target.parent != path]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.renames.append((source, target))
        self.content = {moved(path, source, target) for path in self.content}
        # The directory's own entry is now that of the rename, which is undone or kept.
        self.entries = {moved(path, source, target) for path in self.entries if path != source}

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self.entries.add(target)

    def lose(self) -> None:
        for path in self.content:
            if path.exists():
                os.truncate(path, 0)
        for path in sorted(self.entries, reverse=True):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        if not self.renames_last:
            for source, target in reversed(self.renames):
                if target.exists():
                    target.rename(source)
        die()


def moved(path: Path, source: Path, target: Path) -> Path:
    return target / path.relative_to(source) if path.is_relative_to(source) else path


def die() -> None:
    os._exit(KILLED)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """A small training state of several dtypes; another for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/embedding.weight": torch.randn(9, 4, generator=generator),
        "model/norm.weight": torch.randn(6, generator=generator).to(torch.bfloat16),
        "optimizer/step": torch.tensor(float(seed)),
        "rank/0/random.torch": torch.randint(0, 256, (40,), generator=generator, dtype=torch.uint8),
    }


def share(named: Mapping[str, torch.Tensor], rank: int, size: int) -> list[Piece]:
    """The `rank`-th of `size` nearly equal parts of every tensor."""
    pieces = []
    for name, tensor in named.items():
        start, stop = (tensor.numel() * part // size for part in (rank, rank + 1))
        pieces.append(Piece(name, tuple(tensor.shape), start, stop, tensor.reshape(-1)[start:stop]))
    return pieces


def wholes(named: Mapping[str, torch.Tensor]) -> list[Piece]:
    return [Piece.whole(name, tensor) for name, tensor in named.items()]


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of `tensors`, loaded by one process."""
    blank = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
    load(path, wholes(blank), SingleProcess())
    return blank


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(as_bytes(one[name]), as_bytes(other[name]))
        for name in one
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def flip(path: Path, position: int) -> None:
    """Inverts one byte of a file."""
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 0xFF
    path.write_bytes(content)


def rewrite_manifest(path: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Replaces a checkpoint's manifest by a changed one, with the right hash."""
    (path / "manifest.json").write_bytes(change(read_manifest(path)).to_json())


def names(directory: Path) -> Sequence[str]:
    """The names in a directory, without its writer's claim."""
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(".writer-"))
