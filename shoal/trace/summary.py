"""Make a model's Workload from the observations of a `Recorder`."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from shoal.trace.observed import Made, Moved, Piece, address
from shoal.trace.operator_trace import Recorder, is_adapter
from shoal.workload import Block, Keep, Operation, Parameters, Part, Pass, Product, Saved, Workload


def summarise(
    recorder: Recorder, name: str, parameters: Mapping[str, Tensor], samples: int, dtype: torch.dtype
) -> Workload:
    """Return the Workload of one sample.

    Args:
        recorder: Recorder that observed a forward and a backward.
        name: Name of the model.
        parameters: The model's parameters, by name.
        samples: Number of samples in the traced batch.
        dtype: Type that computes.
    """
    pieces = recorder.pieces
    used = {each for piece in pieces for each in piece.parameters}
    pieces[-1].parameters.update({each: Part.POSITIONS for each in parameters if each not in used})
    sizes = {each: parameter.numel() for each, parameter in parameters.items()}
    frozen = {each for each, parameter in parameters.items() if not parameter.requires_grad}
    known: dict[Block, Block] = {}

    def block(number: int, kind: str) -> Block:
        unread = tuple(_unread(recorder, number)) if kind == "layer" else ()
        found = _Summary(pieces[number], sizes, frozen, samples, dtype.itemsize).block(kind, unread)
        return known.setdefault(found, found)

    layers = tuple(block(number, "layer") for number in range(1, len(pieces) - 1))
    attention = next((each for layer in layers for each in layer.attentions), None)
    stream = next(piece.stream for piece in pieces[1:-1] if piece.stream is not None)
    return Workload(
        name=name,
        length=max(1, stream.numel() // samples // stream.shape[-1]),
        hidden=stream.shape[-1],
        embedding=block(0, "embedding"),
        layers=layers,
        end=block(len(pieces) - 1, "end"),
        tied=bool(recorder.reused & pieces[0].tables),
        heads=attention.heads if attention else 0,
        kv_heads=attention.kv_heads if attention else 0,
        experts=max(
            (each.copies for layer in layers for each in layer.operations if _is_of_experts(each)), default=0
        ),
    )


def _unread(recorder: Recorder, number: int) -> Iterator[Made]:
    """Yield results of products and attention that a block's backward does not read."""
    saved = recorder.pieces[number].saved
    for where, made in recorder.made.items():
        if made.piece == number and made.result_of is not None and where not in saved and made.elements > 1:
            yield made


def _is_of_experts(operation: Operation) -> TypeGuard[Product]:
    return isinstance(operation, Product) and operation.copies > 1


class _Summary:
    """Summarise one piece: numbers for one sample, with equal passes put together."""

    def __init__(
        self, piece: Piece, sizes: Mapping[str, int], frozen: Container[str], samples: int, width: int
    ) -> None:
        self._piece = piece
        self._sizes = sizes
        self._frozen = frozen
        self._samples = samples
        self._width = width

    def block(self, kind: str, unread: Sequence[Made]) -> Block:
        """Return the piece as a block: embedding, layer or end; a layer includes the results left unread."""
        is_layer = kind == "layer"
        operations = tuple(self._operations())
        has_embedding = any(self._piece.parameters[table] is Part.COLUMNS for table in self._piece.tables)
        rows = sum(
            isinstance(each, Product) and each.part is Part.ROWS and not is_adapter(each.name)
            for each in operations
        )  # a layer's adapter is added before the sum over ranks
        return Block(
            kind,
            operations,
            self._parameters(frozen=False),
            tuple(self._saved(unread, is_layer)),
            routed=next((each.rows * each.inputs for each in operations if _is_of_experts(each)), 0),
            joins=rows if is_layer else int(has_embedding or kind == "end"),
            tables=sum(self._sizes[table] for table in self._piece.tables),
            frozen=self._parameters(frozen=True),
        )

    def _parameters(self, *, frozen: bool) -> Parameters:
        """Return the parameters that are not trained, or the others."""
        whole = divided = experts = 0
        for name, part in self._piece.parameters.items():
            if (name in self._frozen) != frozen:
                continue
            if name in self._piece.experts:
                experts += self._sizes[name]
            elif part in (Part.COLUMNS, Part.ROWS):
                divided += self._sizes[name]
            else:
                whole += self._sizes[name]
        return Parameters(whole, divided, experts)

    def _operations(self) -> Iterator[Operation]:
        """Yield operations in forward order; all passes of one name and part at the place of the first."""
        calls: dict[tuple[str, Part], tuple[list[Moved], list[Moved]]] = {}
        ways: tuple[Sequence[object], ...] = (self._piece.operations, self._piece.backward)
        for way, observed in enumerate(ways):
            for each in observed:
                if isinstance(each, Moved) and each.elements not in self._piece.scores:
                    calls.setdefault((each.name, each.part), ([], []))[way].append(each)
        for each in self._piece.operations:
            if not isinstance(each, Moved):
                yield each
            elif (each.name, each.part) in calls:
                yield self._pass(*calls.pop((each.name, each.part)))
        for forward, backward in calls.values():
            yield self._pass(forward, backward)

    def _pass(self, forward: list[Moved], backward: list[Moved]) -> Pass:
        calls = forward or backward
        elements = max(1, sum(each.elements for each in calls))
        # The bytes if elements in compute had two bytes each.
        forward_bytes, backward_bytes = (
            2 / self._width * sum(each.nbytes for each in way) / elements for way in (forward, backward)
        )
        part = calls[0].part
        return Pass(
            calls[0].name,
            elements / self._times(part),
            forward_bytes,
            backward_bytes,
            part,
            kernels=max(1, round((len(forward) + len(backward)) / 2)),
        )

    def _saved(self, unread: Sequence[Made], is_layer: bool) -> Iterator[Saved]:
        stream = self._piece.stream
        start = None if stream is None else address(stream)
        if is_layer and stream is not None and start not in self._piece.saved:
            yield Saved("input", stream.numel() / self._samples, Part.STREAM, Keep.START)
        for where, made in self._piece.saved.items():
            if not is_layer or where == start:
                yield self._one("input" if where == start else made.name, made, made.part, Keep.ALWAYS)
            else:
                keep = Keep.REST if made.result_of is None else Keep.RESULTS
                yield self._one(made.name, made, made.part, keep)
        for made in unread:
            part = Part.ROWS if made.result_of is Part.ROWS else made.part
            yield self._one(made.name, made, part, Keep.SELECTIVE)

    def _one(self, name: str, made: Made, part: Part, keep: Keep) -> Saved:
        width = None if made.width == self._width else made.width
        return Saved(name, made.elements / self._times(made.part), part, keep, width)

    def _times(self, part: Part) -> int:
        """Return the number of samples whose elements were observed together."""
        return 1 if part is Part.POSITIONS else self._samples
