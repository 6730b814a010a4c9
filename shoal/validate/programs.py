"""The program of a row: one with fused kernels of its own, or torch's, compiled or operator by operator.

The column `compile` says it. Where that is blank, the words of `note` and `source` may.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from shoal.validate.cells import Row
from shoal.workload import ModelShape, Workload, compilable_workload_of, shape, shape_names, workload_of

__all__ = ["COMPILED", "as_trained", "program_of", "program_workload"]

COMPILED: Mapping[str, tuple[str, ...]] = {
    "none": ("no", "off", "false", "0", "eager"),
    "layers": ("compiled blocks", "blocks without loss"),
    "blocks": ("blocks and loss", "yes", "on", "true", "1"),
}
"""Words for what torch.compile compiles: nothing, each block, or each block and the loss."""

_SAID = {r"\bcompiled blocks\b": "layers", r"\beager\b": "none"}
"""The program that a note or a source names."""


def program_of(row: Row) -> str | None:
    """Return what is compiled: a word of `COMPILED`; None for a program with fused kernels of its own."""
    if row["compile"] is not None:
        return str(row["compile"])
    said = f"{row['note'] or ''} {row['source'] or ''}"
    return next((word for words, word in _SAID.items() if re.search(words, said)), None)


def as_trained(found: ModelShape, program: str | None, tied: bool | None) -> ModelShape:
    """Return the shape with what depends on the program: tables of angles, and whether the head is tied.

    Args:
        found: The shape that the row's sizes describe.
        program: The result of `program_of`.
        tied: The row's cell; None if it is blank: then a program of torch has the preset of the model's name.
    """
    if tied is None:
        tied = program is not None and found.name in shape_names() and shape(found.name).tied
    return found.replace(tied=tied, layer_tables=program is not None and found.rotary)


def program_workload(found: ModelShape, program: str | None) -> Workload:
    """Return the workload of a shape as the program runs it."""
    if program is None:
        return workload_of(found)
    workload = compilable_workload_of(found)
    if program == "layers" and workload.end.eager is not None:
        return replace(workload, end=workload.end.eager)
    return workload
