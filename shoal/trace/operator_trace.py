"""Observe a model's operators while it runs on fake tensors, and sum them up.

Each storage that an operator makes has a `Part`, which says how tensor parallelism would divide it. It
follows from the tensor's origin, by Megatron's scheme (Shoeybi et al. 2019, arXiv:1909.08053): the model's
input is STREAM; a product of STREAM with a weight divides the weight's COLUMNS, and so its result; a product
of that with a weight divides the ROWS, and its sum over ranks is STREAM again. Attention's result is divided
by heads. The result of any other operator has the Part of its largest tensor; if two are equally large,
STREAM wins. A tensor that depends on no input and no random number depends only on positions. In a mixture of
experts all is WHOLE. Adapters (LoRA) are divided as the layer that they stand beside.

In backward the scheme is reversed. There an operator counts with the piece whose forward made the node that
autograd runs: autograd numbers its nodes, and the numbers of a piece are consecutive.

Attention that is not fused is two products of activations; the second takes the first one's result. It
becomes one `Attention`, and the passes over its scores are part of it. A mask that depends only on positions
is taken to be the causal one.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.spec.workload import Attention, Part, Product

_aten = torch.ops.aten

PRODUCTS: frozenset[Any] = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
        _aten.convolution.default,
    }
)
ATTENTIONS: frozenset[Any] = frozenset(
    {
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
EXPENSIVE: frozenset[Any] = (PRODUCTS | ATTENTIONS) - {_aten.baddbmm.default, _aten.convolution.default}
"""Operators whose results recompute=selective keeps."""

FREE: frozenset[Any] = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
"""Operators that return new memory and move no byte. Views are free as well, and known by their results."""

COPIES: frozenset[Any] = frozenset({_aten._to_copy.default, _aten.clone.default})
"""Operators that return equal values in other memory, maybe of another type."""

LOOKUPS: frozenset[Any] = frozenset(
    {
        _aten.embedding.default,
        _aten.index_select.default,
        _aten.index.Tensor,
        _aten.gather.default,
        _aten.nll_loss_forward.default,
    }
)
"""Operators that read as much of their first tensor as they write."""


class Sizes(NamedTuple):
    """Sizes of a product `[rows, inputs] x [inputs, outputs]`, or of `copies` of it that share the rows.

    Attributes:
        left: The operand that has the rows.
        right: The matrix, or matrices.
    """

    left: Tensor
    right: Tensor
    rows: int
    inputs: int
    outputs: int
    copies: int = 1


def product_of(operator: Any, arguments: Sequence[Any], result: Tensor) -> Sizes:
    """Return the sizes of one of `PRODUCTS`.

    A convolution has a row for each position of its kernel: positions in the result, or in the input if it is
    transposed.
    """
    if operator is _aten.convolution.default:
        image, kernel = arguments[0], arguments[1]
        if argument(operator, arguments, {}, "transposed"):
            channels = len(kernel)
            return Sizes(image, kernel, image.numel() // channels, channels, kernel[0].numel())
        return Sizes(image, kernel, result.numel() // len(kernel), kernel[0].numel(), len(kernel))
    added = operator in (_aten.addmm.default, _aten.baddbmm.default)
    left, right = arguments[added : added + 2]
    if operator is _aten._grouped_mm.default:
        return Sizes(left, right, left.shape[-2], left.shape[-1], right.shape[-1], len(right))
    copies = len(left) if left.ndim == 3 else 1
    return Sizes(left, right, copies * left.shape[-2], left.shape[-1], right.shape[-1], copies)


def bias_of(operator: Any, arguments: Sequence[Any]) -> Tensor | None:
    """Return the tensor that one of `PRODUCTS` adds to its result; None if there is none."""
    if operator is _aten.convolution.default:
        bias: Tensor | None = arguments[2]
        return bias
    return arguments[0] if operator in (_aten.addmm.default, _aten.baddbmm.default) else None


def argument(operator: Any, arguments: Sequence[Any], named: dict[str, Any], name: str) -> Any:
    """Return the argument with this name in a call of an operator, or its default if it is not given."""
    if name in named:
        return named[name]
    for index, each in enumerate(operator._schema.arguments):
        if each.name == name:
            return arguments[index] if index < len(arguments) else each.default_value
    raise AssertionError(f"{operator} has no argument {name}")


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


_FIRST, _SECOND = "lora_A", "lora_B"  # an adapter's matrices
_NO_NUMBER = 2**63  # nodes that add to the gradient of a parameter have none
_STRONGER = (Part.STREAM, Part.COLUMNS, Part.WHOLE)


class Recorder(TorchDispatchMode):
    """Record a model's operators; see the top of the file.

    Args:
        pieces: Number of pieces of the model.
        samples: Number of samples in the batch that goes through it.
        parameters: The model's parameters, by name.
        inputs: The model's inputs.

    Attributes:
        pieces: The observations of each piece.
        made: Storages by address.
        reused: Names of parameters that a later piece used again.
    """

    def __init__(
        self, pieces: int, samples: int, parameters: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self.pieces = [Piece() for _ in range(pieces)]
        self.made: dict[int, Made] = {}
        self.reused: set[str] = set()
        self._samples = samples
        self._names = {address(parameter): name for name, parameter in parameters.items()}
        self._frozen = {name for name, each in parameters.items() if not each.requires_grad}
        self._inputs = {address(each) for each in inputs}
        self._owners: dict[str, int] = {}
        self._first: Sizes | None = None  # last product of activations, if its result is not used yet
        self._in_experts = False
        self._current = 0
        self._starts = [0]
        self._entered = [0]

    # -- calls of the tracer --------------------------------------------------------------------------

    def enter(self, piece: int, stream: Tensor | None = None) -> None:
        """Count the following operators with this piece, whose input is `stream` whatever made it."""
        self._current = piece
        self._starts.append(_get_sequence_nr())
        self._entered.append(piece)
        self.pieces[piece].stream = stream
        made = None if stream is None else self.made.get(address(stream))
        if made is not None and made.part is Part.COLUMNS:
            made.part = Part.STREAM

    def enter_experts(self) -> None:
        """Count the following operators with a mixture of experts."""
        self._in_experts = True

    def leave_experts(self) -> None:
        """End the mixture of experts."""
        self._in_experts = False

    def experts(self, rows: Tensor, weight: Tensor, result: Tensor) -> None:
        """Record a product `[rows, in]` of each expert's share of rows with its `[experts, out, in]`."""
        sizes = Sizes(rows, weight, len(rows), weight.shape[-1], weight.shape[-2], len(weight))
        self._hear_product("experts", sizes, Part.STREAM)
        self.made[address(result)].result_of = Part.STREAM

    def keep(self, tensor: Tensor) -> Tensor:
        """Note that forward keeps a tensor; an activation counts with the first piece that needs it."""
        where = address(tensor)
        made = self.made.get(where)
        if made is not None and made.elements > 1:
            piece = made.piece if made.part is Part.POSITIONS else self._current
            if not any(where in each.saved for each in self.pieces):
                self.pieces[piece].saved[where] = made
        return tensor

    # -- effects of operators -------------------------------------------------------------------------

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Call the operator, and record it."""
        named = named or {}
        result = function(*arguments, **named)
        if function.namespace != "prim":
            self._hear(function, arguments, named, result)
        return result

    def _hear(self, function: Any, arguments: Any, named: Any, result: Any) -> None:
        node = torch._C._current_autograd_node()
        given = _tensors((arguments, named))
        results = _tensors(result)
        addresses = {address(each) for each in given}
        fresh = [each for each in results if address(each) not in addresses]
        if function.is_view or not (fresh or function._schema.is_mutable):
            return
        if node is None:
            for each in given:
                self._use(each)
        name = _plain(function._schema.name)
        piece = self._current if node is None else self._piece_of(node)
        product: Part | None = None
        part = self._largest(given)
        if torch.Tag.nondeterministic_seeded in function.tags and part is Part.POSITIONS:
            part = Part.STREAM  # drawn again for each sample
        if function in PRODUCTS:
            sizes = product_of(function, arguments, results[0])
            product, part = self._product_parts(sizes)
            if node is None:
                self._hear_product(name, sizes, product, bias_of(function, arguments))
        elif function in ATTENTIONS:
            product = part = Part.STREAM if self._in_experts else Part.COLUMNS
            if node is None:
                self._hear_attention(function, arguments, named)
        elif node is None or not _is_product_backward(name):
            self._hear_pass(function, name, node, piece, part, given, results)
        for each in fresh:
            width = each.element_size()
            self.made[address(each)] = Made(each.untyped_storage(), piece, part, width, name)
            if function in EXPENSIVE and node is None:
                self.made[address(each)].result_of = product
        if function in COPIES and address(given[0]) in self._names:
            self._names[address(results[0])] = self._names[address(given[0])]

    def _product_parts(self, sizes: Sizes) -> tuple[Part, Part]:
        """Return the Part of a product, and of its result."""
        left, right = address(sizes.left), address(sizes.right)
        if left not in self._names and right not in self._names:
            part = self._largest([sizes.left, sizes.right])
            return Part.WHOLE, part
        part = self._part(sizes.right if left in self._names else sizes.left)
        if self._in_experts or sizes.copies > 1:
            return Part.STREAM, Part.STREAM
        name = self._names[left] if left in self._names else self._names[right]
        if is_adapter(name):
            return _adapter_parts(name, part)
        if part in (Part.WHOLE, Part.POSITIONS):
            return Part.WHOLE, part
        return (Part.ROWS, Part.STREAM) if part is Part.COLUMNS else (Part.COLUMNS, Part.COLUMNS)

    def _hear_product(self, name: str, sizes: Sizes, part: Part, bias: Tensor | None = None) -> None:
        weight = self._use(sizes.right) or self._use(sizes.left)
        if weight is None:
            self._hear_scores(name, sizes)
            return
        owner = self.pieces[self._owners[weight]]
        owner.parameters[weight] = part
        if sizes.copies > 1:
            owner.experts.add(weight)
        added = None if bias is None else self._use(bias)
        if added is not None and part is Part.COLUMNS:
            self.pieces[self._owners[added]].parameters[added] = part
        self.pieces[self._current].operations.append(self._product(weight, sizes, part))

    def _hear_scores(self, name: str, sizes: Sizes) -> None:
        """Record a product of activations: the first or the second half of attention that is not fused."""
        piece, heads = self.pieces[self._current], max(1, sizes.copies // self._samples)
        first, self._first = self._first, None
        if first is not None and (first.copies, first.outputs) == (sizes.copies, sizes.inputs):
            length = first.rows // first.copies
            piece.operations.remove(self._product(name, first, Part.WHOLE))
            piece.operations.append(
                Attention(length, heads, heads, first.inputs, sizes.outputs, causal=False, fused=False)
            )
            piece.scores.add(first.rows * first.outputs)
            return
        self._first = sizes
        piece.operations.append(self._product(name, sizes, Part.WHOLE))

    def _hear_attention(self, function: Any, arguments: Any, named: Any) -> None:
        query, key, value = arguments[:3]
        groups = len(query) / self._samples
        causal = bool(argument(function, arguments, named, "is_causal"))
        for mask in _tensors((arguments[3:], named)):
            causal = causal or self._part(mask) is Part.POSITIONS
        self.pieces[self._current].operations.append(
            Attention(
                query.shape[2],
                round(query.shape[1] * groups),
                round(key.shape[1] * groups),
                query.shape[3],
                value.shape[3],
                causal=causal,
            )
        )

    def _hear_pass(
        self,
        function: Any,
        name: str,
        node: Any,
        piece: int,
        part: Part,
        given: list[Tensor],
        results: list[Tensor],
    ) -> None:
        if function in FREE or not results:
            return
        written = sum(map(_nbytes, results))
        read = sum(map(_nbytes, given))
        if function in LOOKUPS:
            read += written - _nbytes(given[0])
            self._hear_lookup(given)
        elements = max(each.numel() for each in results)
        if node is None:
            self.pieces[piece].operations.append(Moved(name, part, elements, read + written))
            return
        forward = _plain(re.sub(r"Backward\d*$", "", node.name()))
        known = {each.name for each in self.pieces[piece].operations if isinstance(each, Moved)}
        name = forward if forward in known else name
        self.pieces[piece].backward.append(Moved(name, part, elements, read + written))

    def _hear_lookup(self, given: list[Tensor]) -> None:
        """Record a look-up in a parameter: divided if its index depends on the sample, else a position's."""
        table = self._names.get(address(given[0]))
        if table is not None and len(given) > 1:
            owner = self.pieces[self._owners[table]]
            owner.tables.add(table)
            if self._part(given[1]) is not Part.POSITIONS:
                owner.parameters[table] = Part.COLUMNS

    def _product(self, name: str, sizes: Sizes, part: Part) -> Product:
        """Record a product, for one sample. Copies are of a weight: heads of activations make one product."""
        rows, outputs, copies = sizes.rows, sizes.outputs, sizes.copies
        if address(sizes.left) in self._names:  # the weight stands on the left
            rows, outputs = outputs * copies, rows // copies
        elif address(sizes.right) not in self._names:
            copies = 1
        each = max(1, round(rows / self._samples))
        return Product(_last(name), each, sizes.inputs, outputs, part, copies, frozen=name in self._frozen)

    def _use(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter that a tensor is; it counts with the piece that uses it first."""
        name = self._names.get(address(tensor))
        if name is not None:
            owner = self._owners.setdefault(name, self._current)
            self.pieces[owner].parameters.setdefault(name, Part.POSITIONS)
            if owner != self._current:
                self.reused.add(name)
        return name

    # -- parts ---------------------------------------------------------------------------------------

    def _part(self, tensor: Tensor) -> Part:
        where = address(tensor)
        if where in self._inputs:
            return Part.STREAM
        made = self.made.get(where)
        return Part.POSITIONS if made is None else made.part

    def _largest(self, tensors: Sequence[Tensor]) -> Part:
        """Return the Part of the largest tensor that is no parameter; of equals, the strongest."""
        sizes: dict[Part, int] = {}
        for each in tensors:
            if address(each) not in self._names:
                part = self._part(each)
                sizes[part] = max(sizes.get(part, 0), each.numel())
        sizes.pop(Part.POSITIONS, None)  # positions combined with a sample's tensor are the sample's
        part = max(sizes, key=lambda part: (sizes[part], -_STRONGER.index(part)), default=Part.POSITIONS)
        return Part.STREAM if self._in_experts and part is not Part.POSITIONS else part

    def _piece_of(self, node: Any) -> int:
        """Return the piece whose forward made a node; sums of gradients count with the last such piece."""
        number = node._sequence_nr()
        if number < _NO_NUMBER:
            self._current = self._entered[bisect_right(self._starts, number) - 1]
        return self._current


def is_adapter(name: str) -> bool:
    """Return whether a parameter or its product is an adapter's, as `peft` names them."""
    return _FIRST in name or _SECOND in name


def _adapter_parts(name: str, part: Part) -> tuple[Part, Part]:
    """Return the Part of an adapter's product with a tensor of this Part, and of its result.

    Its layer divides either its outputs, and with them those of the second matrix, or its inputs, and with
    them those of the first one. The other matrix is whole.
    """
    if _FIRST in name:
        return (Part.ROWS, Part.STREAM) if part is Part.COLUMNS else (Part.WHOLE, Part.WHOLE)
    return (Part.COLUMNS, Part.COLUMNS) if part is Part.WHOLE else (Part.WHOLE, Part.STREAM)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes that reading or writing a tensor moves; an expanded tensor counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _plain(name: str) -> str:
    """Return one name for `aten::_to_copy`, `ToCopy` and `to_copy_`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition("::")[2])
    return words.strip("_").lower()


def _last(name: str) -> str:
    """Return the name of the module that has a parameter; for experts with several, of the parameter.

    Adapters, such as `query.lora_A.default`, stand beside a layer that they call `query.base_layer`.
    """
    return (
        name.removesuffix(".weight").removesuffix(".base_layer").removesuffix(".default").rpartition(".")[2]
    )


def _is_product_backward(name: str) -> bool:
    return name == "convolution_backward" or name.startswith("scaled_dot_product")
