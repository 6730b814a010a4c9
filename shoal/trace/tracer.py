"""Trace any module into a Workload, on fake tensors: these have shapes, but no memory and no values.

A copy of the module with fake parameters runs forward and backward once, on the given inputs. `Recorder`
observes its operators; autograd's hooks show what forward keeps for backward. Pieces are the module's blocks
(`find_blocks`), the operators before them, and those after. Experts are assumed to get even loads and to drop
nothing. Parameters that are not trained count as frozen, as beside adapters (LoRA).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from shoal.errors import ModelError
from shoal.models.experts import Mixture, run_experts
from shoal.models.grouped_matmul import Runs
from shoal.models.once_differentiable import once_differentiable
from shoal.models.task import find_blocks
from shoal.spec.workload import Block, Keep, Operation, Parameters, Part, Pass, Product, Saved, Workload
from shoal.trace.operator_trace import Made, Moved, Piece, Recorder, address, is_adapter


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


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def trace(
    module: nn.Module,
    inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    precision: str = "bf16",
    device: torch.device | str = "cpu",
) -> Workload:
    """Return the work of a module on samples like `inputs`. It takes no memory, and the module stays as is.

    Args:
        module: Any module; the meta device will do. Its mode, training or not, counts.
        inputs: Inputs of its forward: a tensor, a tuple of arguments, or a mapping of named ones. The first
            dim of the first tensor counts samples; tensors computed from inputs grow with it.
        loss: A function from the module's output to a scalar; None for the sum of the output.
        precision: bf16 or fp32, the type of the weights that compute and of floating inputs. Trace with the
            one to plan for: tensors that are fp32 in any case are then known separately.
        device: The kind of device whose kernels are meant, such as "cuda"; torch must be built for it.

    Raises:
        ModelError: The inputs hold no tensor, the precision is unknown, the module's operations depend on
            values, or the module fails.
    """
    if precision not in _DTYPES:
        raise ModelError(
            f"a model cannot be traced with precision={precision!r}",
            possible=", ".join(_DTYPES),
            change="give one of these",
        )
    dtype = _DTYPES[precision]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = _fake_copy(module, dtype, torch.device(device))
        arguments, named = _fake_inputs(inputs, dtype, torch.device(device))
    tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, Tensor)]
    if not tensors or not tensors[0].ndim:
        raise ModelError(
            "the inputs for tracing a model hold no tensor of samples",
            possible="a tensor such as tokens [batch, seq], a tuple of arguments, or a mapping by names",
            change="give such inputs",
        )
    blocks = find_blocks(model) or [model]
    recorder = Recorder(len(blocks) + 2, len(tensors[0]), dict(model.named_parameters()), tensors)
    _attach(recorder, model, blocks)
    try:
        with mode, recorder:
            with torch.autograd.graph.saved_tensors_hooks(recorder.keep, _same):
                output = model(*arguments, **named)
                value = _total(output) if loss is None else loss(output)
            value.backward()
    except Exception as error:
        said = next(iter(str(error).splitlines()), "")
        raise ModelError(
            f"tracing {type(module).__name__} raised {type(error).__name__}: {said}",
            possible="a forward whose operators and shapes do not depend on the values of tensors",
            change="correct the inputs or the loss, or describe the model by a ModelShape",
        ) from error
    if all(piece.stream is None for piece in recorder.pieces[1:-1]):
        raise ModelError(
            f"no block of {type(module).__name__} was called with a tensor",
            possible="blocks in a ModuleList or a Sequential, whose forwards are called on the hidden state",
            change="call the blocks themselves in the model's forward",
        )
    workload = summarise(
        recorder, type(module).__name__, dict(model.named_parameters()), len(tensors[0]), dtype
    )
    # Hugging Face's models repeat keys and values for their queries before they attend.
    kv_heads = getattr(getattr(module, "config", None), "num_key_value_heads", None)
    return workload if kv_heads is None else replace(workload, kv_heads=kv_heads)


def _fake_copy(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a copy of the module whose parameters and buffers have no values."""
    known: dict[int, Any] = {}
    for parameter in module.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        fake = torch.empty(parameter.shape, dtype=kind, device=device)
        known[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        known[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return copy.deepcopy(module, known)


def _fake_inputs(
    inputs: Any, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        kind = dtype if value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=kind, device=device)

    inputs = tree_map(fake, inputs)
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _attach(recorder: Recorder, model: nn.Module, blocks: list[nn.Module]) -> None:
    """Tell the recorder where blocks and experts begin and end."""

    def enter(piece: int, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        stream = next((each for each in (*arguments, *named.values()) if isinstance(each, Tensor)), None)
        recorder.enter(piece, stream)

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        recorder.enter(len(blocks) + 1, next(iter(_floating(output)), None))

    for number, block in enumerate(blocks, 1):
        block.register_forward_pre_hook(partial(enter, number), with_kwargs=True)
    blocks[-1].register_forward_hook(leave)
    for module in model.modules():
        if isinstance(module, Mixture):
            _listen_to_experts(recorder, module)


def _listen_to_experts(recorder: Recorder, mixture: Mixture) -> None:
    """Replace the experts' products by ones that need no counts of rows, which are not known here."""

    def enter(module: nn.Module, arguments: Any) -> None:
        recorder.enter_experts()

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        recorder.leave_experts()

    def multiply(rows: Tensor, runs: Runs, weights: Any) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = _Even.apply(recorder, rows, *weights)
        return results

    mixture.capacity = None
    mixture.compute = partial(run_experts, multiply=multiply)
    mixture.register_forward_pre_hook(enter)
    mixture.register_forward_hook(leave)


class _Even(torch.autograd.Function):
    """Give the results and gradients of `multiply_by_experts`, in shape only."""

    @staticmethod
    def forward(context: Any, recorder: Recorder, rows: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        context.save_for_backward(rows, *weights)
        results = tuple(rows.new_empty(len(rows), weight.shape[1]) for weight in weights)
        for weight, result in zip(weights, results, strict=True):
            recorder.experts(rows, weight, result)
        return results

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = context.saved_tensors
        return None, torch.empty_like(rows), *map(torch.empty_like, weights)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _floating(output: Any) -> Iterator[Tensor]:
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _total(output: Any) -> Tensor:
    return torch.stack([each.sum().float() for each in _floating(output) if each.requires_grad]).sum()
