"""What a device does in a block for one sample: products, attention, passes over memory.

Counts are of one sample (a sequence), of the whole model: a layout divides them. Backward follows from
forward: of a product two products, of attention two and a half times its own, of a pass what it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Attention", "Keep", "Operation", "Part", "Pass", "Product", "Saved"]


class Part(Enum):
    """How tensor parallelism divides something over its ranks."""

    STREAM = "stream"
    """The hidden state between layers: divided along the sequence, or with tensor=plain whole on each."""
    COLUMNS = "columns"
    """Of a product: its outputs are divided. Of what such products give: always divided."""
    ROWS = "rows"
    """Of a product: its inputs are divided, and its results added up over the ranks."""
    WHOLE = "whole"
    """Not at all: each rank does it for its whole samples."""
    POSITIONS = "positions"
    """By position alone, such as a table of angles: there once, however many samples a rank has."""


class Keep(Enum):
    """Under which `recompute` forward keeps a tensor for backward; the value is those settings."""

    ALWAYS = ("none", "selective", "full")
    """What is never computed again."""
    START = ("selective", "full")
    """A block's input where backward itself reads a copy of it: what the block is computed again from."""
    RESULTS = ("none", "selective")
    """Results of products and attention that backward reads, or others of the same size in their place."""
    SELECTIVE = ("selective",)
    """Results of products that backward does not read: selective goes by the kind of operator."""
    REST = ("none",)
    """What is cheap to compute again."""

    def under(self, recompute: str) -> bool:
        """Whether it is kept with that setting: none, selective or full."""
        return recompute in self.value


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product with a weight, `[rows, inputs] x [inputs, outputs]`.

    Attributes:
        name: Such as "query" or "up".
        rows: Of one sample; with `copies`, all rows that the copies share.
        inputs: Width of what is multiplied.
        outputs: Width of the result.
        part: COLUMNS or ROWS where tensor parallelism divides the weight; STREAM where each rank has the
            whole weight for its part of the stream, as of experts, of which ep divides the copies; or WHOLE.
        copies: Experts: each has a weight of its own and an equal share of the rows; 1 for a plain product.
    """

    name: str
    rows: int
    inputs: int
    outputs: int
    part: Part = Part.WHOLE
    copies: int = 1

    @property
    def flop(self) -> int:
        """FLOP of forward."""
        return 2 * self.rows * self.inputs * self.outputs

    @property
    def is_divided(self) -> bool:
        """Whether tensor parallelism divides its weight."""
        return self.part in (Part.COLUMNS, Part.ROWS)


@dataclass(frozen=True, slots=True)
class Attention:
    """Scaled products of queries with keys, and of what softmax makes of them with values.

    Attributes:
        length: Tokens of the sample.
        heads: Query heads.
        kv_heads: Key and value heads.
        key_width: Of a head's queries and keys.
        value_width: Of a head's values.
        causal: Whether a token attends to those before it only.
        fused: Whether one kernel does it, which keeps no `[length, length]` scores.
        name: Of the operation.
    """

    length: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    causal: bool = True
    fused: bool = True
    name: str = "attention"

    @property
    def flop(self) -> int:
        """FLOP of forward over the whole square of positions, as Megatron-LM and PaLM count it."""
        return 2 * self.length**2 * self.heads * (self.key_width + self.value_width)


@dataclass(frozen=True, slots=True)
class Pass:
    """An operation that memory bounds: norms, activations, residual sums, dropout, the loss.

    Attributes:
        name: Such as "norm".
        elements: That one sample has, in the whole model.
        forward: Bytes that forward reads and writes for each, where the type that computes has two.
        backward: The same of backward.
        part: Any but ROWS.
        kernels: That do it where nothing is compiled, in forward; backward has as many.
    """

    name: str
    elements: float
    forward: float
    backward: float
    part: Part
    kernels: int = 1


Operation = Product | Attention | Pass


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that forward keeps for backward.

    Attributes:
        name: What it is.
        elements: Of one sample, in the whole model.
        part: STREAM, COLUMNS or WHOLE. ROWS for the result of a product that is divided by rows: with tp > 1
            that is a partial sum, which nobody keeps.
        keep: Under which recompute.
        width: Bytes of an element; None for those of the type that computes.
        copied: Whether it is a copy of what is kept already, of which there is none where `width` computes.
    """

    name: str
    elements: float
    part: Part
    keep: Keep = Keep.REST
    width: int | None = None
    copied: bool = False

    def nbytes(self, width: int) -> float:
        """Bytes of one sample, where an element that computes has `width` bytes."""
        if self.copied and self.width == width:
            return 0.0
        return self.elements * (width if self.width is None else self.width)
