"""The Workload of a model whose weights are frozen, and which trains adapters beside them (LoRA).

A product `y = W x` of a frozen weight becomes `y = W x + c B A x`, with A `[rank, inputs]` and B
`[outputs, rank]`, of which only A and B are trained. What changes:

    products    W has no product for its weight's gradient; A and B are products with one
    passes      forward multiplies by c and adds; backward multiplies by c, and adds the gradients of x from W
                and A. Dropout of the adapter's input is one pass more. The frozen embedding has no backward.
                The first layer needs no gradient of its input, but counts as the others do
    parameters  W, norms, embedding and head are held, and gathered where weights are cut; nothing else
    kept        the results of A, and with recompute=selective also those of B; dropped inputs and masks. A
                norm's quotient and the input of a product without an adapter are not kept, since only their
                weights' gradients read them
    tp          A is whole and B is divided where outputs are; where inputs are divided, A is, and B is whole
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from shoal.spec.workload.workload import (
    Block,
    Keep,
    Operation,
    Parameters,
    Part,
    Pass,
    Product,
    Saved,
    Workload,
)

_LAYERS = {
    "query, key, value": ("query", "key", "value"),
    "attention output": ("output",),
    "gate, up": ("gate", "up"),
    "up": ("up",),
    "down": ("down",),
}
"""Products of a layer by name, and the linear layers of a Shoal transformer that they compute."""

_ALL = "all-linear"


def with_adapters(
    workload: Workload, rank: int, targets: Sequence[str] = (_ALL,), dropout: float = 0.0
) -> Workload:
    """Return a workload with frozen weights, and adapters beside some products of its layers.

    Args:
        workload: The workload of a Shoal transformer, from its shape.
        rank: Width of the adapters.
        targets: Names of layers, or the ends of names, such as "query"; or "all-linear".
        dropout: Share of an adapter's input that is zeroed in training.
    """
    made = _Adapters(rank, tuple(targets), dropout > 0, workload.heads, workload.kv_heads)
    adapted = workload.with_layers(made.layer)
    return replace(adapted, embedding=_looked_up(workload.embedding), end=_frozen(workload.end))


class _Adapters(NamedTuple):
    """The adapters of all layers; attributes as in `with_adapters`."""

    rank: int
    targets: tuple[str, ...]
    drops: bool
    heads: int
    kv_heads: int

    def layer(self, block: Block) -> Block:
        """Return a layer with its adapters."""
        found = _frozen(block)
        operations: list[Operation] = []
        saved = list(found.saved)
        trained, matrices = Parameters(), 0
        for operation in found.operations:
            operations.append(operation)
            outputs = self._outputs(operation) if isinstance(operation, Product) else []
            if not isinstance(operation, Product) or not outputs:
                continue
            operations += self._operations(operation, outputs)
            saved += self._saved(operation, outputs, mask=1 if block.sums else None)
            first, second = self.rank * operation.inputs * len(outputs), self.rank * sum(outputs)
            cut = operation.part is Part.ROWS
            trained += Parameters(second if cut else first, first if cut else second)
            matrices += 2 * len(outputs)
        return replace(
            found,
            operations=tuple(operations),
            saved=tuple(saved),
            parameters=trained,
            sums=matrices if block.sums else 0,
            eager=None if block.eager is None else self.layer(block.eager),
        )

    def _outputs(self, product: Product) -> list[int]:
        """Return the outputs of each linear layer of a product that has an adapter."""
        layers = _LAYERS.get(product.name, ()) if product.copies == 1 else ()
        widths = [product.outputs // max(1, len(layers))] * len(layers)
        if len(layers) == 3:
            keys = product.outputs * self.kv_heads // (self.heads + 2 * self.kv_heads)
            widths = [product.outputs - 2 * keys, keys, keys]
        ends = {target.rpartition(".")[2] for target in self.targets}
        return [width for name, width in zip(layers, widths, strict=True) if ends & {name, _ALL}]

    def _operations(self, product: Product, outputs: Sequence[int]) -> Iterator[Operation]:
        """Yield the operations of adapters beside one product, one for each of these outputs."""
        number, rows = len(outputs), product.rows
        cut = product.part is Part.ROWS
        around, within = (Part.COLUMNS, Part.STREAM) if cut else (Part.STREAM, Part.COLUMNS)
        read = float(rows * product.inputs * number)
        first = Part.ROWS if cut else Part.WHOLE
        yield Product("adapters, A", rows, product.inputs, number * self.rank, first, matrices=number)
        for width in outputs:
            yield Product("adapters, B", rows, self.rank, width, Part.WHOLE if cut else Part.COLUMNS)
        added = float(rows * sum(outputs))
        yield Pass("adapters' results", added, 10, 4, within, kernels=2 * number, backward_kernels=number)
        yield Pass("adapters' gradients", read, 0, 6, around, kernels=0, backward_kernels=number)
        if self.drops:
            yield Pass("adapters' dropout", read, 5, 5, around, kernels=number)

    def _saved(self, product: Product, outputs: Sequence[int], mask: int | None) -> Iterator[Saved]:
        """Yield the tensors that the adapters beside one product keep for backward.

        Args:
            product: The product.
            outputs: Outputs of each adapter.
            mask: Bytes of an element of dropout's mask; None for the type that computes, as on cores.
        """
        cut, number = product.part is Part.ROWS, len(outputs)
        around, within = (Part.COLUMNS, Part.STREAM) if cut else (Part.STREAM, Part.COLUMNS)
        read = float(product.rows * product.inputs)
        yield Saved("adapters' sums", float(product.rows * sum(outputs)), within, Keep.SELECTIVE)
        yield Saved("adapters' results", float(product.rows * self.rank * number), Part.WHOLE, Keep.RESULTS)
        if self.drops:
            yield Saved("adapters' inputs", number * read, around)
            yield Saved("adapters' masks", number * read, around, width=mask)
        elif product.name != "attention output":  # attention keeps its result
            yield Saved("adapters' inputs", read, around)


def _frozen(block: Block) -> Block:
    """Return a block without gradients of weights."""
    operations = tuple(
        replace(each, frozen=True) if isinstance(each, Product) else each for each in block.operations
    )
    return replace(
        block,
        operations=operations,
        parameters=Parameters(),
        saved=tuple(_without_weights(block)),
        sums=0,
        eager=None if block.eager is None else _frozen(block.eager),
        frozen=block.parameters,
    )


def _without_weights(block: Block) -> Iterator[Saved]:
    """Yield the tensors that a block keeps for backward if it makes no gradients of weights."""
    inner = {"gate, up": 0.5, "up": 1.0}
    before = next((inner[each.name] * each.elements for each in block.saved if each.name in inner), 0.0)
    for each in block.saved:
        if each.name == "input and quotient":
            yield replace(each, elements=each.elements / 2)
        elif each.name == "activation":
            yield replace(each, elements=each.elements - before)
        elif each.name != "norm":
            yield each


def _looked_up(embedding: Block) -> Block:
    """Return an embedding that is frozen: its backward does nothing."""
    found = _frozen(embedding)
    operations = (
        replace(each, backward=0.0, backward_kernels=0) if isinstance(each, Pass) else each
        for each in found.operations
    )
    eager = None if found.eager is None else _looked_up(embedding.eager or embedding)
    return replace(found, operations=tuple(operations), eager=eager)
