"""The memory of a rank in one step, as a run measured it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from shoal.errors import RunError
from shoal.limits import DESCRIPTION, json_of, read_regular

OUTSIDE = "outside blocks"
"""Name of the unit of all that is in no block: embedding, last norm, head."""


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """Bytes of a part of the model on a rank: a block, or all that is outside of blocks.

    Attributes:
        name: Name of the block in the model.
        weights: Bytes of the weights that compute, or of the shards that they are gathered from.
        gradients: Bytes of gradients at the rank's peak.
        optimizer: Bytes of the optimizer's state, and of its copy of the weights if it has one.
        activations: Bytes that the forward of a micro-batch leaves for backward, without gathered weights;
            the most of all micro-batches.
    """

    name: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes of a rank in a step.

    Attributes:
        rank: The rank.
        step: The step, from 1.
        peak: The most bytes of tensors that lived at once.
        moment: Where the step was then.
        buffers: Bytes of the model's buffers.
        units: The parts of the model on the rank.
        resident: Most bytes of the process that the system had in memory so far; None if it does not say.
        reserved: Most bytes that the GPU's allocator held; None on a CPU.
    """

    rank: int
    step: int
    peak: int
    moment: str
    buffers: int
    units: tuple[UnitMemory, ...] = field(default=())
    resident: int | None = None
    reserved: int | None = None

    @property
    def parts(self) -> dict[str, int]:
        """The bytes at the peak by name; activations are all that is not one of the others."""
        parts = {
            name: sum(getattr(unit, name) for unit in self.units)
            for name in ("weights", "gradients", "optimizer")
        }
        parts["buffers"] = self.buffers
        return {**parts, "activations": max(0, self.peak - sum(parts.values()))}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return what `write_memory` wrote."""
        return cls(**{**values, "units": tuple(UnitMemory(**unit) for unit in values["units"])})


def write_memory(path: Path, measured: MeasuredMemory) -> None:
    """Write what was measured, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")


def read_memory(paths: Iterable[Path]) -> list[MeasuredMemory]:
    """Return what ranks wrote.

    Raises:
        RunError: A file is malformed.
    """
    found = []
    for path in paths:
        try:
            found.append(MeasuredMemory.of(json_of(read_regular(path, DESCRIPTION))))
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(
                f"{path} cannot be read: {error}",
                possible="the file as the run wrote it",
                change="remove it, and train on with --resume, which measures again",
            ) from error
    return found
