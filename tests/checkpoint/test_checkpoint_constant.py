"""What does not change is not written again, and outlives the checkpoint that it was written for."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_stand_ins import (
    tensors,
    wholes,
)

from shoal.checkpoint import (
    Piece,
    RealFiles,
    Saver,
    SingleProcess,
    compare,
    load,
    retain,
    verify,
)


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
