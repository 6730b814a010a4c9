"""Tensor parallelism: the matrices of a layer are split over ranks (Shoeybi et al., arXiv:1909.08053).

Layers that read the residual stream are split by their outputs (columns), layers that write to it by their
inputs (rows), so that all tensors between them belong to one rank: heads of attention, features of a
feed-forward layer. Two communications are needed: the input of columns is gathered, the output of rows is
summed. If the stream is split along the sequence too (Korthikanti et al., arXiv:2205.05198) these are an
all-gather and a reduce-scatter, otherwise nothing and an all-reduce; backward does the reverse. The embedding
and the head are split by the vocabulary, and the loss is computed from logits that are never gathered.

A `TensorLayout` says, by patterns of module names, which layer is split and how.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from shoal.errors import ModelError, PlanError
from shoal.models import Transformer
from shoal.parallel.communication import Axis
from shoal.parallel.hugging_face.layout import (
    fit_heads,
    has_tensor_plan,
    layout_of_hugging_face,
    needs_whole_sequence,
)
from shoal.parallel.local_shards import Cut
from shoal.parallel.pipeline.split_backward import Deferral
from shoal.parallel.tensor.parallel_linear import column_products, row_product
from shoal.parallel.tensor.tensor_layout import (
    Split,
    TensorLayout,
    full_name,
    linear_layer,
    matching_modules,
    require_divisible,
    require_whole_parts,
    split_layers,
    vocabulary_weight,
    watch_heads,
)
from shoal.parallel.tensor.vocabulary import SplitLogits, embed_rows
from shoal.parallel.weight_hooks import between_graphs
from shoal.spec.plan import Plan


class TensorCuts(NamedTuple):
    """The cuts of a model's parameters.

    Attributes:
        cuts: This rank's block of each parameter that is split, by name.
        narrowed: For key and value layers with fewer heads than ranks: the rows (first, count) that this rank
            computes with. Such parameters stay whole, and each rank has a part of their gradient.
    """

    cuts: dict[str, Cut]
    narrowed: dict[str, tuple[int, int]]


def layout_of(model: nn.Module) -> TensorLayout:
    """Return the layout in the model's `tensor_layout`, or the one that Shoal knows for it.

    Raises:
        PlanError: There is no such layout.
    """
    declared = getattr(model, "tensor_layout", None)
    if isinstance(declared, TensorLayout):
        return declared
    if has_tensor_plan(model):
        return layout_of_hugging_face(model)
    if not isinstance(model, Transformer):
        raise PlanError(
            f"nothing says how the layers of {type(model).__name__} are split for tensor parallelism",
            possible="Shoal's own transformers, Hugging Face's, or any model with a TensorLayout",
            change="give the model a TensorLayout as its attribute `tensor_layout`, or use tp=1",
        )
    shape = model.config
    splits = {
        "blocks.*.attention": Split(
            {"query": shape.heads, "key": shape.kv_heads, "value": shape.kv_heads}, {"output": shape.heads}
        ),
    }
    if not shape.experts:  # every rank of tp has whole experts, for its part of the tokens
        splits["blocks.*.feed_forward"] = Split({"gate": shape.ffn, "up": shape.ffn}, {"down": shape.ffn})
    return TensorLayout(splits, "embed", None if model.head is None else "head")


def cut_tensors(model: nn.Module, layout: TensorLayout, plan: Plan, index: int) -> TensorCuts:
    """Return what rank `index` of tensor parallelism has of each parameter; the model is not changed.

    Raises:
        PlanError: A layer does not split over this many ranks, or the layout names a missing layer.
    """
    size = plan.tp
    result = TensorCuts({}, {})
    if plan.tensor != "plain" and (layout.embedding is None or not layout.sequence):
        why = "names none" if layout.embedding is None else f"says that {type(model).__name__} cannot"
        part = needs_whole_sequence(model, layout) if has_tensor_plan(model) else ""
        part = f"; here {part}" if part else ""
        raise PlanError(
            f"tensor={plan.tensor} splits the sequence at the embedding, and the layout {why}",
            possible=f"tensor=plain, or a model and a layout that let the sequence be split{part}",
            change="add tensor=plain",
        )
    for name, module, split in split_layers(model, layout):
        require_whole_parts(module, name, split)
        for child, units in split.columns.items():
            layer, full = linear_layer(module, name, child), full_name(name, child)
            for kind, parameter in layer.named_parameters(recurse=False):
                shape = tuple(parameter.shape)
                if size > units and size % units == 0:
                    length = shape[0] // units
                    result.narrowed[f"{full}.{kind}"] = (index * units // size * length, length)
                else:
                    require_divisible(full, units, size)
                    length = shape[0] // size
                    result.cuts[f"{full}.{kind}"] = Cut(shape, 0, index * length, length)
        for child, units in split.rows.items():
            layer, full = linear_layer(module, name, child), full_name(name, child)
            require_divisible(full, units, size)
            shape = tuple(layer.weight.shape)
            length = shape[1] // size
            result.cuts[f"{full}.weight"] = Cut(shape, 1, index * length, length)
    vocabulary = []
    if layout.embedding is not None:
        vocabulary.append((layout.embedding, vocabulary_weight(model, layout.embedding, nn.Embedding)))
    if layout.head is not None:
        vocabulary.append((layout.head, vocabulary_weight(model, layout.head, nn.Linear)))
    for name, weight in vocabulary:
        shape = tuple(weight.shape)
        rows = -(-shape[0] // size)
        first = min(index * rows, shape[0])
        if (size - 1) * rows >= shape[0]:
            raise PlanError(
                f"a vocabulary of {shape[0]} does not split over tp={size}",
                possible="at least one token for every rank",
                change="use a smaller tp",
            )
        result.cuts[f"{name}.weight"] = Cut(shape, 0, first, min(rows, shape[0] - first))
    return result


def tensor_parallel(
    model: nn.Module,
    layout: TensorLayout,
    cuts: TensorCuts,
    axis: Axis,
    plan: Plan,
    deferral: Deferral | None = None,
) -> None:
    """Make the layers compute with this rank's blocks, which the caller puts in place of the parameters.

    Args:
        model: The model; its layers' `forward` is replaced.
        layout: The layers to split.
        cuts: The result of `cut_tensors`.
        axis: The ranks of tensor parallelism.
        plan: The Plan, which says how the ranks communicate.
        deferral: Collector of the gradients of weights, if backward is made in two halves.
    """
    sequence, overlap = plan.tensor != "plain", plan.tensor == "async"
    common: dict[str, Any] = {"axis": axis, "sequence": sequence, "overlap": overlap, "deferral": deferral}
    columned: Any = partial(column_products, **common)
    rowed: Any = partial(row_product, **common)
    for name, module, split in matching_modules(model, layout):
        fit_heads(module, split, axis.size)
        watch_heads(name, module, split, axis.size)
    for name, module, split in split_layers(model, layout):
        columns = _Columns(
            [module.get_submodule(child) for child in split.columns],
            [full_name(name, child) for child in split.columns],
            [cuts.narrowed.get(f"{full_name(name, child)}.weight") for child in split.columns],
            columned,
        )
        for index, child in enumerate(split.columns):
            module.get_submodule(child).forward = partial(columns, index)
        for child in split.rows:
            layer = module.get_submodule(child)
            layer.forward = partial(_row_forward, layer, rowed)
    if layout.embedding is not None:
        layer = model.get_submodule(layout.embedding)
        cut = cuts.cuts[f"{layout.embedding}.weight"]
        layer.forward = partial(_embed, layer, axis, cut.offset, sequence=sequence)
        if layout.head is None:
            unembed: Any = partial(_unembed, layer, columned, axis, cut)
            model.unembed = unembed
    if layout.head is not None:
        layer = model.get_submodule(layout.head)
        layer.forward = partial(_unembed, layer, columned, axis, cuts.cuts[f"{layout.head}.weight"])


class _Columns:
    """Layers with one common input, computed together when the first of them is called.

    Args:
        layers: The layers, in the order of the layout.
        names: Their names in the model.
        narrowed: For each layer, the rows (first, count) to compute with; None for all.
        products: `column_products` with all arguments except the operands.
    """

    def __init__(
        self,
        layers: list[Any],
        names: list[str],
        narrowed: list[tuple[int, int] | None],
        products: Any,
    ) -> None:
        self._layers = layers
        self._names = names
        self._narrowed = narrowed
        self._products = products
        self._input: Tensor | None = None
        self._results: dict[int, Tensor] = {}

    @between_graphs
    def __call__(self, index: int, hidden: Tensor) -> Tensor:
        """Return the output of layer `index` for `hidden`."""
        if hidden is not self._input or index not in self._results:
            # In latent attention (MLA) some layers read a narrower input.
            fitting = [
                number for number, layer in enumerate(self._layers) if layer.in_features == hidden.shape[-1]
            ]
            if index not in fitting:
                raise ModelError(
                    f"{self._names[index]} takes {self._layers[index].in_features} features, and got "
                    f"{list(hidden.shape)}",
                    possible="inputs as on one device: the whole width of the residual stream",
                    change="give it its input; between columns and rows a rank has only its own features",
                )
            given = [(self._layers[number], self._narrowed[number]) for number in fitting]
            weights = [self._part(layer.weight, rows) for layer, rows in given]
            biases = [None if layer.bias is None else self._part(layer.bias, rows) for layer, rows in given]
            has_biases = any(bias is not None for bias in biases)
            product = partial(self._products, weights=weights, biases=biases if has_biases else None)
            results = _along_sequence(hidden, product)
            self._results = dict(zip(fitting, results, strict=True))
        result = self._results.pop(index)
        self._input = hidden if self._results else None  # not kept longer than it is needed
        return result

    @staticmethod
    def _part(parameter: Tensor, rows: tuple[int, int] | None) -> Tensor:
        return parameter if rows is None else parameter.narrow(0, *rows)


@between_graphs
def _row_forward(layer: Any, product: Any, hidden: Tensor) -> Tensor:
    (result,) = _along_sequence(hidden, lambda part: (product(part, layer.weight, bias=layer.bias),))
    return result


def _along_sequence(hidden: Tensor, product: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return products `[batch, seq, out]` of an input that may have other dims before its last two, or none.

    Rows of several samples in one dim, as in shared experts, count as one sequence: a product does not depend
    on their order.
    """
    if hidden.dim() == 3:
        return product(hidden)
    *before, seq, width = hidden.shape
    results = product(hidden.reshape(-1, seq, width))
    return tuple(result.view(*before, *result.shape[-2:]) for result in results)


def _embed(layer: Any, axis: Axis, first_row: int, tokens: Tensor, *, sequence: bool) -> Tensor:
    return embed_rows(tokens, layer.weight, axis, first_row, sequence=sequence)


def _unembed(layer: Any, products: Any, axis: Axis, cut: Cut, hidden: Tensor) -> SplitLogits:
    (local,) = products(hidden, [layer.weight])
    return SplitLogits(local, axis, cut.offset, cut.shape[0])
