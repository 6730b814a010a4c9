"""The Workload: the operations of a model, block by block, for any machine.

The operations of a block for one sample: products, attention, passes over memory.

Counts are for one sample (a sequence), for the whole model: a layout divides them. Backward follows from
forward: a product has two products, attention two and a half times its forward, a pass its own count.

A Workload as JSON, so that a model can be traced in one place and planned in another.

Every block is written once, in `blocks`; `pieces` gives their order by number. Numbers are read back exactly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from typing import Any

from shoal.errors import ModelError
from shoal.limits import json_of


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


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters, by how parallelism divides them.

    Attributes:
        whole: Parameters that each rank of tp has whole: norms, a router.
        divided: Parameters divided over tp.
        experts: Parameters divided over ep.
    """

    whole: int = 0
    divided: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.whole + self.divided + self.experts

    def __add__(self, other: Parameters) -> Parameters:
        """Return the sum, kind by kind."""
        return Parameters(
            self.whole + other.whole, self.divided + other.divided, self.experts + other.experts
        )


class _Hashed:
    """An object that caches its hash, as it does not change; costs are looked up by blocks."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True)
class Block(_Hashed):
    """A piece of a model: its embedding, a layer, or its end.

    Attributes:
        name: Name, such as "block" or "end".
        operations: Operations, in the order of forward.
        parameters: Parameters of this block that are trained; a tied weight counts in the first block that
            has it.
        frozen: Parameters of this block that are not trained.
        saved: Tensors that forward keeps for backward.
        routed: Elements that one sample's tokens send to experts, and get back: choices x hidden.
        once_to_node: Number of experts that a token goes to, if it is sent once to each node that has some of
            them; 0 if it is sent to each expert.
        joins: Number of times that forward adds up over the ranks of tp, with the stream whole or divided.
        tables: Number of parameters that are looked up and not multiplied.
        remade: Share of the products that a selective recompute computes again; 0 for Shoal's.
        stops_early: Whether a full recompute ends with the last result that backward reads, as torch's does.
        sums: Number of weights whose gradients torch adds, one by one, to sums in fp32; 0 if products add
            them.
        graphs: Number of compiled graphs that forward calls; backward calls as many.
        eager: The block as torch runs it if nothing is compiled; None if the Plan's `compile` changes
            nothing.
        is_kept: Whether a Plan's recompute leaves the block out: backward has all that forward made.
    """

    name: str
    operations: tuple[Operation, ...]
    parameters: Parameters
    saved: tuple[Saved, ...] = ()
    routed: int = 0
    once_to_node: int = 0
    joins: int = 0
    tables: int = 0
    remade: float = 0.0
    stops_early: bool = True
    sums: int = 0
    graphs: int = 0
    eager: Block | None = None
    is_kept: bool = False
    frozen: Parameters = Parameters()

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            made_of = self.name, self.operations, self.parameters, self.saved, self.routed
            object.__setattr__(self, "_hash", hash(made_of))
            return self._hash

    def under(self, compile: str) -> Block:
        """Return the block as it runs under a Plan's `compile`; auto that is not settled is blocks."""
        return self.eager if self.eager is not None and compile == "none" else self

    @property
    def unread(self) -> tuple[Operation, ...]:
        """The operations at its end whose results backward does not read: a layer's last product and sum."""
        *_, product, last = (None, None, *self.operations)
        if self.routed or not (isinstance(product, Product) and isinstance(last, Pass)):
            return ()
        return product, last

    @property
    def flop(self) -> int:
        """FLOP of one sample's forward: products, and attention over the whole square."""
        return sum(each.flop for each in self.operations if isinstance(each, Product | Attention))

    @property
    def attentions(self) -> Iterator[Attention]:
        """Yield its attention operations."""
        return (each for each in self.operations if isinstance(each, Attention))

    def kept(self, recompute: str, width: int) -> float:
        """Return the bytes that forward of one sample keeps for backward on one device.

        Args:
            recompute: none, selective or full.
            width: Bytes of an element that computes.
        """
        return sum(each.nbytes(width) for each in self.saved if each.keep.under(recompute))


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a model on samples of one length.

    Attributes:
        name: Name of the model.
        length: Tokens of a sample.
        hidden: Width of the hidden state, which goes from block to block.
        embedding: Piece 0.
        layers: The blocks between, in order. Equal ones are one object, whose costs are computed once.
        end: The last piece: norm, head and loss.
        tied: Whether the head's weight is the embedding's.
        heads, kv_heads: Query heads, and key and value heads, that tp and Ulysses must divide among ranks; 0
            if not known.
        experts: Number of experts that ep divides; 0 for none.
        synchronises: Whether the host waits for the device before the optimizer's update.
    """

    name: str
    length: int
    hidden: int
    embedding: Block
    layers: tuple[Block, ...]
    end: Block
    tied: bool = False
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    synchronises: bool = True

    @property
    def pieces(self) -> tuple[Block, ...]:
        """Embedding, layers, end: the pieces of stages."""
        return (self.embedding, *self.layers, self.end)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, trained or not; a tied weight counts once."""
        return self.trained + sum(piece.frozen.total for piece in self.pieces)

    @property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return sum(piece.parameters.total for piece in self.pieces)

    @property
    def flop(self) -> int:
        """FLOP of one sample's forward."""
        return sum(piece.flop for piece in self.pieces)

    @property
    def training_flop(self) -> int:
        """FLOP of one sample's forward and backward, without recompute: what MFU counts."""
        operations = (each for piece in self.pieces for each in piece.operations)
        frozen = sum(each.flop for each in operations if isinstance(each, Product) and each.frozen)
        return 3 * self.flop - frozen

    def with_layers(self, change: Callable[[Block], Block]) -> Workload:
        """Return a Workload with each layer changed; equal ones stay one object."""
        changed = {layer: change(layer) for layer in dict.fromkeys(self.layers)}
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))


_FORMAT = 1
_KINDS: dict[str, type[Operation]] = {"product": Product, "attention": Attention, "pass": Pass}
_PIECES = ("embedding", "layers", "end")
_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
}
"""Types that a value may have, by the annotation of its field."""
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_json(workload: Workload) -> str:
    """Return the text of a Workload."""
    blocks = list(dict.fromkeys(workload.pieces))
    numbers = {block: number for number, block in enumerate(blocks)}
    plain = {each.name: getattr(workload, each.name) for each in fields(Workload) if each.name not in _PIECES}
    text = {
        "format": _FORMAT,
        **plain,
        "pieces": [numbers[piece] for piece in workload.pieces],
        "blocks": [_written(block) for block in blocks],
    }
    return json.dumps(text, indent=1)


def from_json(text: str) -> Workload:
    """Return the Workload of a text from `to_json`.

    Raises:
        ModelError: The text is not one.
    """
    try:
        read = json_of(text)
        if read.pop("format") != _FORMAT:
            raise ValueError("another format")
        blocks = [_block(each) for each in read.pop("blocks")]
        embedding, *layers, end = (blocks[number] for number in read.pop("pieces"))
        return Workload(embedding=embedding, layers=tuple(layers), end=end, **_plain(Workload, read))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(
            f"the text is not a Workload: {type(error).__name__}: {error}",
            possible=f"a text that to_json of this version wrote, format {_FORMAT}",
            change="trace the model again",
        ) from None


def _written(value: Any) -> Any:
    """Return a dataclass as a mapping without its defaults; an operation also has its kind."""
    if isinstance(value, Part | Keep):
        return value.name.lower()
    if isinstance(value, tuple):
        return [_written(each) for each in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    kind = {"kind": _NAMES[type(value)]} if type(value) in _NAMES else {}
    given = {each.name: getattr(value, each.name) for each in fields(value)}
    defaults = {each.name: each.default for each in fields(value) if each.default is not MISSING}
    return kind | {
        name: _written(each) for name, each in given.items() if defaults.get(name, MISSING) != each
    }


def _plain(kind: type, read: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values that a dataclass is to be made of, if the plain ones have the types that it names."""
    for each in fields(kind):
        wanted = _PLAIN.get(str(each.type))
        if wanted and each.name in read and not isinstance(read[each.name], wanted):
            raise TypeError(f"{kind.__name__}.{each.name} is {read[each.name]!r}")
    return read


def _block(read: Mapping[str, Any]) -> Block:
    made = ("operations", "parameters", "saved", "eager", "frozen")
    rest = {name: value for name, value in read.items() if name not in made}
    return Block(
        operations=tuple(map(_operation, read["operations"])),
        parameters=Parameters(**_plain(Parameters, read["parameters"])),
        saved=tuple(Saved(**_plain(Saved, _with_enums(each))) for each in read.get("saved", ())),
        eager=_block(read["eager"]) if "eager" in read else None,
        frozen=Parameters(**_plain(Parameters, read.get("frozen", {}))),
        **_plain(Block, rest),
    )


def _operation(read: Mapping[str, Any]) -> Operation:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in _with_enums(read).items()
    }
    kind = _KINDS[values.pop("kind")]
    return kind(**_plain(kind, values))


def _with_enums(read: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(read)
    if "part" in values:
        values["part"] = Part[values["part"].upper()]
    if "keep" in values:
        values["keep"] = Keep[values["keep"].upper()]
    return values
