"""The observations of a `Recorder`: storages, operators that move memory, and pieces of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.workload import Attention, Part, Product


@dataclass(slots=True)
class Made:
    """A storage that an operator made.

    Attributes:
        storage: The storage, kept alive so that no other gets its address.
        piece: Piece in which it was made.
        part: How tensor parallelism divides it.
        width: Bytes of an element.
        name: Name of the operator.
        result_of: The part of the product whose result it is, COLUMNS for attention's; None for others.
    """

    storage: torch.UntypedStorage
    piece: int
    part: Part
    width: int
    name: str
    result_of: Part | None = None

    @property
    def elements(self) -> int:
        """Number of elements in the whole storage."""
        return self.storage.nbytes() // self.width


@dataclass(frozen=True, slots=True)
class Moved:
    """A call of an operator that memory bounds: the elements of its largest tensor, and its bytes."""

    name: str
    part: Part
    elements: int
    nbytes: int


@dataclass(slots=True)
class Piece:
    """The observations of one piece of a model, for the whole batch except products and attention.

    Attributes:
        operations: Operations, in the order of forward.
        backward: Passes of backward.
        saved: Storages that forward keeps, by address.
        scores: Sizes of the scores that attention wrote.
        stream: The block's input.
        tables: Parameters that are looked up.
        parameters: For each parameter that the piece is the first to use, by name, the part of the product
            that uses it.
        experts: Names of the experts' parameters among these.
    """

    operations: list[Product | Attention | Moved] = field(default_factory=list)
    backward: list[Moved] = field(default_factory=list)
    saved: dict[int, Made] = field(default_factory=dict)
    scores: set[int] = field(default_factory=set)
    stream: Tensor | None = None
    tables: set[str] = field(default_factory=set)
    parameters: dict[str, Part] = field(default_factory=dict)
    experts: set[str] = field(default_factory=set)


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    found: int = tensor.untyped_storage()._cdata
    return found
