"""The program of a row: one with fused kernels of its own, or torch's, compiled or operator by operator.

The column `compile` says it. Where that is blank, the words of `note` and `source` may.

Shoal was another program at the commit 6e03e49, which a source may name: each layer made the tables of angles
for queries and for keys, which it kept, and turned these in six operators in fp32; and each step waited for
the device before the optimizer's update.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shoal.predict.validate.cells import Row
from shoal.spec.workload import (
    Block,
    ModelShape,
    Operation,
    Part,
    Pass,
    Product,
    Saved,
    Workload,
    compilable_workload_of,
    shape,
    shape_names,
    workload_of,
)

COMPILED: Mapping[str, tuple[str, ...]] = {
    "none": ("no", "off", "false", "0", "eager"),
    "layers": ("compiled blocks", "blocks without loss"),
    "blocks": ("blocks and loss", "yes", "on", "true", "1"),
}
"""Words for what torch.compile compiles: nothing, each block, or each block and the loss."""

_SAID = {r"\bcompiled blocks\b": "layers", r"\beager\b": "none"}
"""The program that a note or a source names."""

_OF_TORCH = re.compile(r"torchtitan|fms-fsdp", re.IGNORECASE)
"""Sources of programs that call torch's kernels, and say where they compile blocks."""

_EARLIER = "6e03e49"

_CAST_BYTES = 4.0

_SCALES_BLOCKS = re.compile(r"\bG?B[23]00", re.IGNORECASE)
"""Devices whose tensor cores scale blocks of 8-bit elements."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program of torch's kernels.

    Attributes:
        compiled: What is compiled, a word of COMPILED.
        is_earlier: Whether it is Shoal at the commit above.
        is_shoal: Whether it is Shoal, or else a program like it, such as torchtitan.
    """

    compiled: str
    is_earlier: bool = False
    is_shoal: bool = True


def program_of(row: Row) -> Program | None:
    """Return the program; None if it has fused kernels of its own."""
    said = f"{row['note'] or ''} {row['source'] or ''}"
    compiled = row["compile"] or next((word for words, word in _SAID.items() if re.search(words, said)), None)
    if compiled is not None:
        return Program(compiled, _EARLIER in said)
    if _OF_TORCH.search(said):
        return Program("layers" if re.search(r"\bcompile\b", said) else "none", is_shoal=False)
    return None


def as_trained(found: ModelShape, program: Program | None, tied: bool | None) -> ModelShape:
    """Return the shape with what depends on the program: angles, and whether the head is tied.

    Args:
        found: The shape that the row's sizes describe.
        program: The result of `program_of`.
        tied: The row's cell; None if it is blank: then a program of torch has the preset of the model's name.
    """
    if tied is None:
        tied = program is not None and found.name in shape_names() and shape(found.name).tied
    return found.replace(tied=tied, is_own=program is not None and program.is_shoal and found.rotary)


def program_workload(found: ModelShape, program: Program | None, casts: int = 0) -> Workload:
    """Return the workload of a shape as the program runs it.

    Args:
        found: The shape that the row's sizes describe.
        program: The result of `program_of`.
        casts: Number of kernels that cast one operand of a product, of `kernels_of_cast`.
    """
    if program is None:
        return _as_fused(workload_of(found), found, casts)
    workload = compilable_workload_of(found)
    if program.compiled == "layers" and workload.end.eager is not None:
        workload = replace(workload, end=workload.end.eager)
    return _earlier(workload, found) if program.is_earlier else workload


def kernels_of_cast(row: Row) -> int:
    """Return the number of kernels that cast an operand to the row's type of products; 0 if it has 16 bits.

    Tensor cores of Blackwell scale blocks of 32 elements, and one kernel casts them (MXFP8). Before, a kernel
    finds the largest element of the whole operand, and one makes a scale of it.
    """
    if row["precision"] != "fp8":
        return 0
    return 1 if _SCALES_BLOCKS.search(row["device"]) else 3


def _as_fused(workload: Workload, found: ModelShape, casts: int) -> Workload:
    """Return the workload of a program with fused kernels of its own, such as Megatron-Core.

    A token is sent once to each node that has some of its experts (DeepEP, deepseek-ai/DeepEP). In fp8 what
    products read is cast (Transformer Engine): in forward the inputs that no norm writes, in backward the
    gradients of results. 16 bits are read, and 8 written by rows and 8 by columns. For experts, kernels of
    their own cast the rows of each.
    """

    def changed(block: Block) -> Block:
        operations = block.operations
        if casts:
            operations = tuple(each for one in operations for each in (one, *_casts_of(one, casts)))
        return replace(
            block, operations=operations, once_to_node=found.experts_per_token if block.routed else 0
        )

    return workload.with_layers(changed)


def _casts_of(operation: Operation, casts: int) -> Iterator[Pass]:
    """Yield the casts of a product of a layer."""
    if not isinstance(operation, Product) or operation.name == "router":
        return
    is_of_experts = operation.copies > 1
    is_from_norm = operation.part is not Part.ROWS and not is_of_experts
    yield Pass(
        f"casts of {operation.name}",
        float(operation.rows),
        0.0 if is_from_norm else _CAST_BYTES * operation.inputs,
        _CAST_BYTES * operation.outputs,
        Part.COLUMNS if operation.is_divided else operation.part,
        kernels=(0 if is_from_norm else 1) * (casts if is_of_experts else 1),
        backward_kernels=casts if is_of_experts else 1,
        copies=operation.copies,
        again=False,
    )


def _earlier(workload: Workload, found: ModelShape) -> Workload:
    """Return the workload of Shoal at the earlier commit."""
    angles = Saved("angles", 4.0 * found.seq * found.width, Part.POSITIONS, width=4)

    def changed(block: Block) -> Block:
        operations = tuple(
            replace(each, forward=48, backward=56, in_fp32=(36, 44), kernels=36, backward_kernels=12)
            if isinstance(each, Pass) and each.name == "rotary" and each.in_fp32 is not None
            else each
            for each in block.operations
        )
        eager = None if block.eager is None else changed(block.eager)
        return replace(block, operations=operations, saved=(*block.saved, angles), eager=eager)

    kept = tuple(each for each in workload.embedding.saved if each.name != "angles")
    embedding = replace(workload.embedding, saved=kept)
    return replace(workload.with_layers(changed), embedding=embedding, synchronises=True)
