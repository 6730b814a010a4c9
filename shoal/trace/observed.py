"""What a `Recorder` takes note of: storages, what operators move, and what the pieces of a model do."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.workload import Attention, Part, Product

__all__ = ["Made", "Moved", "Piece", "address"]


@dataclass(slots=True)
class Made:
    """A storage that an operator made.

    Attributes:
        storage: Held, so that no other gets its address.
        piece: In which it was made.
        part: How it is divided.
        width: Bytes of an element.
        name: Of the operator.
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
    """A call of an operator that memory bounds; elements of its largest tensor, and bytes."""

    name: str
    part: Part
    elements: int
    nbytes: int


@dataclass(slots=True)
class Piece:
    """What was heard of one piece of a model, of the whole batch but for products and attention.

    Attributes:
        operations: In the order of forward.
        backward: Passes of backward.
        saved: By address, the storages that forward keeps.
        scores: Sizes of the scores that attention wrote.
        stream: The block's input.
        tables: Parameters that are looked up.
        parameters: By name, of those that the piece is the first to use, the part of the product that does.
        experts: Of these, the experts'.
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
