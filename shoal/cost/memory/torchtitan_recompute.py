"""The selective recompute of torchtitan, which makes the result of every second product again.

Shoal's recompute=selective keeps the results of all products and of attention. torchtitan keeps those of
attention and of every second product of a layer, in the order of its forward, which is query, key, value,
output, gate, up, down (`torchtitan/models/llama3/parallelize.py`, its option "op"). To predict a step of
torchtitan, change the Workload with `every_second_product`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoal.workload import Block, Keep, Part, Product, Saved, Workload


def every_second_product(workload: Workload) -> Workload:
    """Return a Workload whose dense layers keep every second product's result under recompute=selective."""
    return workload.with_layers(_changed)


def _changed(layer: Block) -> Block:
    products = [each for each in layer.operations if isinstance(each, Product)]
    if not all(product.is_divided for product in products):
        return layer  # experts: their products are not divided
    rest = [each for each in layer.saved if each.keep not in (Keep.RESULTS, Keep.SELECTIVE)]
    eager = None if layer.eager is None else _changed(layer.eager)
    return replace(layer, saved=(*rest, *_attention(layer), *_results(layer)), remade=0.5, eager=eager)


def _attention(layer: Block) -> Iterator[Saved]:
    for attention in layer.attentions:
        heads = float(attention.length * attention.heads)
        yield Saved("attention's result", heads * attention.value_width, Part.COLUMNS, Keep.RESULTS)
        if attention.fused:
            yield Saved("log-sum-exp", heads, Part.COLUMNS, Keep.RESULTS, 4)


def _results(layer: Block) -> Iterator[Saved]:
    """Yield the results of products; those that are not kept but that backward reads are made again."""
    for index, (name, elements, part) in enumerate(_matrices(layer)):
        is_kept = index % 2 == 0
        if part is Part.COLUMNS:
            yield Saved(name, elements, part, Keep.RESULTS if is_kept else Keep.REST)
        elif is_kept:
            yield Saved(name, elements, part, Keep.SELECTIVE)


def _matrices(layer: Block) -> Iterator[tuple[str, float, Part]]:
    """Yield name, elements and part of the result of each matrix; a Product may have several."""
    attention = next(layer.attentions, None)
    for product in layer.operations:
        if not isinstance(product, Product):
            continue
        names = product.name.split(", ")
        widths = [product.outputs / len(names)] * len(names)
        if attention is not None and len(names) == 3:
            key, value = attention.key_width, attention.value_width
            widths = [attention.heads * key, attention.kv_heads * key, attention.kv_heads * value]
        for name, width in zip(names, widths, strict=True):
            yield name, float(product.rows * width), product.part
