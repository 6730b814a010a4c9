"""The operations of a block for one sample: products, attention, passes over memory.

Counts are for one sample (a sequence), for the whole model: a layout divides them. Backward follows from
forward: a product has two products, attention two and a half times its forward, a pass its own count.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """How tensor parallelism divides a tensor or operation over its ranks."""

    STREAM = "stream"
    """Like the hidden state between layers: divided along the sequence, or with tensor=plain whole on each
    rank.
    """
    COLUMNS = "columns"
    """For a product, its outputs are divided. The results of such products are always divided."""
    ROWS = "rows"
    """For a product, its inputs are divided, and its results added up over the ranks."""
    WHOLE = "whole"
    """Not divided: each rank computes it for its whole samples."""
    POSITIONS = "positions"
    """Depends only on position, such as a table of angles: there is one for any number of samples."""


class Keep(Enum):
    """The `recompute` settings under which forward keeps a tensor for backward; the value holds them."""

    ALWAYS = ("none", "selective", "full")
    """Tensors that are never computed again."""
    START = ("selective", "full")
    """A block's input, if backward reads a copy of it: the block is computed again from it."""
    RESULTS = ("none", "selective")
    """Results of products and attention that backward reads, or others of the same size in their place."""
    SELECTIVE = ("selective",)
    """Results of products that backward does not read: selective decides by the kind of operator."""
    REST = ("none",)
    """Tensors that are cheap to compute again."""

    def under(self, recompute: str) -> bool:
        """Return whether it is kept with this setting: none, selective or full."""
        return recompute in self.value


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product with a weight, `[rows, inputs] x [inputs, outputs]`.

    Attributes:
        name: Name, such as "query" or "up".
        rows: Rows of one sample; with `copies`, all rows that the copies share.
        inputs: Width of the input.
        outputs: Width of the result.
        part: COLUMNS or ROWS if tensor parallelism divides the weight; STREAM if each rank has the whole
            weight for its part of the stream, as for experts, whose copies ep divides; or WHOLE.
        copies: Number of experts, each with a weight of its own and an equal share of the rows; 1 for a plain
            product.
        matrices: Number of weights side by side whose products torch computes one by one: 3 for queries, keys
            and values. The device's seconds are those of one product.
        grouped: Whether the host starts the products of all copies together, or else one by one.
        frozen: Whether its weight is not trained, so that backward has no product for the weight's gradient.
    """

    name: str
    rows: int
    inputs: int
    outputs: int
    part: Part = Part.WHOLE
    copies: int = 1
    matrices: int = 1
    grouped: bool = True
    frozen: bool = False

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
    """Scaled products of queries with keys, and of softmax's result with values.

    Attributes:
        length: Tokens of the sample.
        heads: Query heads.
        kv_heads: Key and value heads.
        key_width: Width of a head's queries and keys.
        value_width: Width of a head's values.
        causal: Whether a token attends only to those before it.
        fused: Whether one kernel computes it, which keeps no `[length, length]` scores.
        name: Name of the operation.
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
        name: Name, such as "norm".
        elements: Elements of one sample, in the whole model.
        forward: Bytes that forward reads and writes per element, if the type that computes has two bytes.
        backward: Bytes that backward reads and writes per element, counted likewise.
        part: Any but ROWS.
        kernels: Number of its forward kernels.
        backward_kernels: Number of its backward kernels; None for as many as in forward. in_fp32: `forward`
            and `backward` if fp32 computes; None for twice as many. An operator that computes in fp32
            whatever the model does reads and writes casts besides.
        copies: Number of experts, each of which has these kernels for its own share of the elements.
        again: Whether a selective recompute repeats it.
    """

    name: str
    elements: float
    forward: float
    backward: float
    part: Part
    kernels: int = 1
    backward_kernels: int | None = None
    in_fp32: tuple[float, float] | None = None
    copies: int = 1
    again: bool = True

    def nbytes(self, width: int) -> tuple[float, float]:
        """Return the bytes of one sample's forward and backward, if an element that computes has `width`."""
        forward, backward = self.forward * width / 2, self.backward * width / 2
        if self.in_fp32 is not None and width == 4:
            forward, backward = self.in_fp32
        return self.elements * forward, self.elements * backward

    @property
    def launches(self) -> tuple[int, int]:
        """The number of kernels of forward and backward."""
        return self.kernels, self.kernels if self.backward_kernels is None else self.backward_kernels


Operation = Product | Attention | Pass


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that forward keeps for backward.

    Attributes:
        name: Name of the tensor.
        elements: Elements of one sample, in the whole model.
        part: STREAM, COLUMNS or WHOLE. ROWS for the result of a product that is divided by rows: with tp > 1
            this is a partial sum, which is not kept.
        keep: The recompute settings under which it is kept.
        width: Bytes of an element; None for the type that computes.
        copied: Whether it is a copy in another type of a kept tensor; there is no copy if `width` computes.
    """

    name: str
    elements: float
    part: Part
    keep: Keep = Keep.REST
    width: int | None = None
    copied: bool = False

    def nbytes(self, width: int) -> float:
        """Return the bytes of one sample, if an element that computes has `width` bytes."""
        if self.copied and self.width == width:
            return 0.0
        return self.elements * (width if self.width is None else self.width)
