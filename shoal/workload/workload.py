"""The Workload: the operations of a model, block by block, for any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shoal.workload.operation import Attention, Operation, Pass, Product, Saved


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
