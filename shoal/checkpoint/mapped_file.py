"""Makes a safetensors file whose tensors are mapped into memory, to be filled in any order."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from shoal.checkpoint.shard import dtype_name

_ALIGNMENT = 64  # bytes, of the first tensor


def make_mapped_file(
    path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], metadata: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Make a safetensors file of zeros, and return its tensors by name; a change of them changes the file.

    The system writes changed pages to the disk and takes their memory for others when it needs it, so that a
    file may be larger than memory. Its room on the disk is taken at once.

    Args:
        path: The file.
        tensors: Shape and dtype of each tensor, by name.
        metadata: Texts to keep in the file's header.

    Raises:
        OSError: The file exists, cannot be made, or has no room.
        CheckpointError: A dtype cannot be stored.
    """
    # Wide types first, so that each tensor begins at a multiple of its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    begins, size = {}, 0
    for name in names:
        shape, dtype = tensors[name]
        begins[name], size = size, size + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": dtype_name(dtype, name),
            "shape": shape,
            "data_offsets": (begins[name], size),
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    start = -(-(8 + len(header)) // _ALIGNMENT) * _ALIGNMENT
    with path.open("x+b") as file:
        file.write((start - 8).to_bytes(8, "little") + header.ljust(start - 8))
        file.flush()
        os.posix_fallocate(file.fileno(), 0, start + size)
        mapping = mmap.mmap(file.fileno(), start + size)
    made = {}
    for name in names:
        shape, dtype = tensors[name]
        count = math.prod(shape)
        made[name] = (
            torch.frombuffer(mapping, dtype=dtype, count=count, offset=start + begins[name]).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
        )
    return made
