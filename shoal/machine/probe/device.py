"""Measure the seconds of a device's operations: products, passes over memory, attention, small operators.

Shapes are those of training: large and small, square and skewed, and the products of weights' gradients,
whose inner dim is the rows of forward. Passes are those of a transformer, with the bytes that
`shoal.spec.workload` counts for them, so that the fit matches its use; in addition a copy and a triad. Each
repetition of a product or pass has other operands, as in training: its inputs have left the caches. On a GPU
the passes are also measured with operands that stay in its cache. GPUs are timed apart from the host,
and the host by a layer with almost nothing to compute, eager and compiled.

Time operations on a GPU apart from the host that starts them.

A small operation alone takes as long as its start by the host. So the device is first held: it waits for a
given time, while the host starts many repetitions and an event before and after them. When the device is
released they run one behind another, and the time between the events is the device's alone. If the host was
not done when the device was released, the device is held for longer and all is repeated. Events say how long
the device was held: it waits for a number of its cycles, and its clock varies.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from statistics import median
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.machine.probe.measurements import AttentionTime, HostTimes, PassTime, ProductTime
from shoal.machine.probe.place import COLD, Effort, Key, Operation, Place, time_in_turns
from shoal.models.attention import causal_attention
from shoal.predict.cost import Layout
from shoal.predict.cost.time import starts_of
from shoal.spec.workload import (
    Attention,
    Block,
    ModelShape,
    Pass,
    Product,
    compilable_workload_of,
    workload_of,
)

_LAYER_WIDTH = 16
_LAYER_TOKENS = 4
_AROUND = 4  # kernels around the layer: its input, the sum of its result, and their gradients
_SHAPE = ModelShape(
    layers=1,
    hidden=_LAYER_WIDTH,
    ffn=_LAYER_WIDTH,
    heads=1,
    vocab=1,
    seq=_LAYER_TOKENS,
    gated=True,
    rotary=False,
)


class SmallLayer(nn.Module):
    """Norm, attention, norm and a gated feed-forward layer, in modules as in real models."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = (nn.RMSNorm(_LAYER_WIDTH) for _ in range(2))
        self.query, self.key, self.value, self.output = _square(4)
        self.gate, self.up, self.down = _square(3)

    def forward(self, stream: Tensor) -> Tensor:
        """Return `[1, tokens, width]` for an input `[1, tokens, width]`."""
        hidden = self.attention_norm(stream)
        query, key, value = (each(hidden).unsqueeze(1) for each in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.output(attended.squeeze(1))
        hidden = self.norm(stream)
        result: Tensor = stream + self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return result

    def forward_and_backward(self) -> None:
        """Run forward and backward once, on ones."""
        self(self._stream()).sum().backward()

    def compiled(self) -> Callable[[], None]:
        """Return `forward_and_backward` with the layer's forward and backward compiled."""
        run = torch.compile(self)

        def forward_and_backward() -> None:
            run(self._stream()).sum().backward()

        return forward_and_backward

    def kernels(self, *, one_kernel_norm: bool = False) -> int:
        """Return the number of kernels of forward and backward that its Workload counts.

        Args:
            one_kernel_norm: Whether a norm is one kernel, as on GPUs.
        """
        if one_kernel_norm:
            return _started(compilable_workload_of(_SHAPE).layers[0].under("none")) + _AROUND
        operations = workload_of(_SHAPE.replace(fused_passes=False)).layers[0].operations
        passes = sum(sum(each.launches) for each in operations if isinstance(each, Pass))
        return passes + sum(3 for each in operations if isinstance(each, Product)) + 3  # and attention

    def compiled_kernels(self) -> int:
        """Return the number of kernels of forward and backward when the layer is compiled."""
        return _started(compilable_workload_of(_SHAPE).layers[0]) + _AROUND

    def _stream(self) -> Tensor:
        return torch.ones(1, _LAYER_TOKENS, _LAYER_WIDTH, device=self.query.weight.device, requires_grad=True)


def _started(layer: Block) -> int:
    """Return the number of kernels that the host starts for a layer in forward and backward."""
    return round(sum(starts_of(layer, Layout(1, precision="fp32"))))


def _square(count: int) -> list[nn.Linear]:
    return [nn.Linear(_LAYER_WIDTH, _LAYER_WIDTH, bias=False) for _ in range(count)]


_MOST = 64  # repetitions: a GPU's queue holds about a thousand kernels
_FIRST = 4  # repetitions that tell how many fill a turn
_SPARE = 2.0  # times the host's expected seconds that the device is held
_LEAST_HOLD = 1e-3
_TRIES = 6
_CYCLES = 10_000_000  # 5 ms of a GPU at 2 GHz
_STEADY = 0.01  # change of a clock's rate between two holds that is none


class Clock(Protocol):
    """The times of a host and its device."""

    def now(self) -> float:
        """Return the host's time in seconds."""

    def hold(self, seconds: float) -> None:
        """Let the device wait for about so long before it runs what is started next."""

    def mark(self) -> Any:
        """Start an event that keeps the device's time when it is reached."""

    def between(self, first: Any, second: Any) -> float:
        """Return the device's seconds between two events."""

    def finish(self) -> None:
        """Wait until the device has completed all its work."""


class CudaClock:
    """The clock of a CUDA device and its host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The host loads a kernel when it is first started, and the device waits meanwhile: that is no hold.
        # An idle device has a slow clock, which rises within milliseconds.
        rate = self._rate()
        for _ in range(_TRIES):
            before, rate = rate, self._rate()
            if math.isclose(before, rate, rel_tol=_STEADY):
                break
        self._cycles = rate

    def _rate(self) -> float:
        """Return the device's cycles in a second, by a hold."""
        self.finish()
        first = self.mark()
        torch.cuda._sleep(_CYCLES)
        second = self.mark()
        self.finish()
        return _CYCLES / self.between(first, second)

    def now(self) -> float:
        """See `Clock`."""
        return time.perf_counter()

    def hold(self, seconds: float) -> None:
        """See `Clock`."""
        torch.cuda._sleep(round(seconds * self._cycles))

    def mark(self) -> torch.cuda.Event:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """See `Clock`."""
        return float(first.elapsed_time(second)) / 1e3

    def finish(self) -> None:
        """See `Clock`."""
        torch.cuda.synchronize(self._device)


def time_on_device(operations: Mapping[Key, Operation], place: Place, effort: Effort) -> dict[Key, float]:
    """Return the device's seconds of each operation on this rank, the median over rounds.

    On cores the thread that starts an operation runs it, so this is `time_in_turns`. The arguments are those
    of `time_in_turns`.
    """
    if place.device.type == "cpu":
        return time_in_turns(operations, place, effort)
    clock = CudaClock(place.device)
    seconds: dict[Key, list[float]] = {key: [] for key in operations}
    for index in range(effort.rounds):
        for key in reversed(list(operations)) if index % 2 else operations:
            operations[key]()
            place.ranks.start_together()
            seconds[key].append(queued_seconds(operations[key], clock, effort.turn_seconds))
    return {key: median(turns) for key, turns in seconds.items()}


def queued_seconds(operation: Operation, clock: Clock, turn_seconds: float) -> float:
    """Return the device's seconds of an operation, the mean of repetitions that fill a turn.

    Args:
        operation: Starts the operation's kernels, and does not wait for them.
        clock: The times of the host and the device.
        turn_seconds: Seconds that the repetitions should take at least; there are 64 at most.
    """
    operation()  # what the first call allocates or chooses is no part of it
    once = _repeated(operation, _FIRST, clock)
    count = min(max(_FIRST, round(turn_seconds / max(once, 1e-9))), _MOST)
    return _repeated(operation, count, clock)


def _repeated(operation: Operation, count: int, clock: Clock) -> float:
    clock.finish()
    began = clock.now()
    operation()
    hold = max(_LEAST_HOLD, _SPARE * count * (clock.now() - began))
    seconds = 0.0
    for _ in range(_TRIES):
        clock.finish()
        start = clock.mark()
        began = clock.now()
        clock.hold(hold)
        first = clock.mark()
        for _ in range(count):
            operation()
        second = clock.mark()
        host = clock.now() - began
        clock.finish()
        seconds = clock.between(first, second) / count
        if host < clock.between(start, first):
            break
        hold = _SPARE * max(hold, host)
    return seconds


_SQUARES = (64, 128, 256, 512, 1024)
_LARGE_SQUARES = (2048, 4096, 8192)  # only if one product takes less than a second: on accelerators
_SKEWED = (
    (256, 128, 512),
    (256, 512, 128),
    (128, 256, 512),
    (1024, 512, 128),
    (1024, 512, 1600),
    (1024, 1600, 512),
    (512, 1024, 1600),
    (2048, 512, 512),
    (128, 1024, 4096),
)
_LARGE_SKEWED = ((8192, 4096, 1024), (8192, 4096, 14336), (4096, 8192, 14336), (512, 8192, 8192))
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_FP32 = 4  # bytes
_WIDTH = 512
_TOKENS = (512, 2048)
_LARGE_TOKENS = (8192, 32768)
_UPDATE_BYTES = 28  # Adam in fp32: gradient read; weight and two moments read and written

_ATTENTION = (  # length, heads, key-value heads, width
    (128, 8, 8, 64),
    (256, 4, 2, 32),
    (256, 8, 8, 64),
    (512, 8, 2, 64),
    (1024, 8, 8, 64),
)
_LARGE_ATTENTION = ((2048, 16, 16, 128), (4096, 32, 8, 128), (8192, 32, 32, 128))

_SMALL = 64  # elements: nothing to compute, nothing to move
_CHAIN = 200  # operators one after another


def measure_products(place: Place, effort: Effort) -> tuple[ProductTime, ...]:
    """Time products of every shape and precision, on this rank."""
    accelerated = place.device.type != "cpu"
    squares = [(size, size, size) for size in (*_SQUARES, *(_LARGE_SQUARES if accelerated else ()))]
    shapes: list[tuple[int, int, int]] = [*squares, *_SKEWED, *(_LARGE_SKEWED if accelerated else ())]
    operations: dict[tuple[str, tuple[int, int, int]], Operation] = {}
    for precision, dtype in _DTYPES.items():
        largest = max(inputs * (rows + outputs) for rows, inputs, outputs in shapes)
        pool = torch.randn(max(largest, COLD // dtype.itemsize), device=place.device).to(dtype)
        operations |= {(precision, shape): _product(shape, pool) for shape in shapes}
    return tuple(
        ProductTime(precision, rows, inputs, outputs, seconds)
        for (precision, (rows, inputs, outputs)), seconds in time_on_device(operations, place, effort).items()
    )


def _product(shape: tuple[int, int, int], pool: Tensor) -> Operation:
    """Return a product that takes the next numbers of the pool at each call."""
    rows, inputs, outputs = shape
    size = inputs * (rows + outputs)
    given = cycle(
        (part[: rows * inputs].view(rows, inputs), part[rows * inputs :].view(outputs, inputs).t())
        for part in pool[: len(pool) // size * size].view(-1, size)
    )
    return lambda: torch.mm(*next(given))


def measure_passes(place: Place, effort: Effort) -> tuple[PassTime, ...]:
    """Time a transformer's passes, forward and backward, and streams: copy, triad, optimizer update."""
    accelerated = place.device.type != "cpu"
    tokens = (*_TOKENS, *(_LARGE_TOKENS if accelerated else ()))
    passes = [each for count in tokens for each in _passes(count, place.device)]
    if accelerated:
        passes += [each for count in _TOKENS for each in _passes(count, place.device, is_warm=True)]
    passes += _streams(place.device)
    seconds = time_on_device({index: each[1] for index, each in enumerate(passes)}, place, effort)
    return tuple(replace(each[0], seconds=seconds[index]) for index, each in enumerate(passes))


def _passes(
    tokens: int, device: torch.device, *, is_warm: bool = False
) -> Iterator[tuple[PassTime, Operation]]:
    """Yield passes in fp32 over this many tokens, with their times unset; warm ones reuse their operands."""
    blocks = workload_of(_shape(tokens, one_kernel_norm=device.type != "cpu")).pieces
    operations = [each for block in blocks for each in block.operations]
    counted = {each.name: each for each in operations if isinstance(each, Pass)}
    sets = 2 if is_warm else max(2, COLD // (_FP32 * tokens * _WIDTH))
    streams = [torch.randn(tokens, _WIDTH, device=device) for _ in range(sets)]
    weight = torch.ones(_WIDTH, device=device)
    targets = torch.zeros(tokens, dtype=torch.int64, device=device)
    operators: dict[str, tuple[Callable[..., Tensor], list[tuple[Tensor, ...]]]] = {
        "norm": (
            lambda hidden, scale: F.rms_norm(hidden, (_WIDTH,), scale, 1e-5),
            [(each, weight) for each in streams],
        ),
        "silu and product": (
            lambda gate, up: F.silu(gate) * up,
            list(zip(streams[::2], streams[1::2], strict=False)),
        ),
        "loss": (lambda scores: F.cross_entropy(scores.float(), targets), [(each,) for each in streams]),
    }
    for name, (operator, given) in operators.items():
        nbytes, kernels = counted[name].nbytes(_FP32), counted[name].launches
        forward, both = _with_backward(operator, given)
        yield PassTime(name, nbytes[0], kernels[0], 0.0, is_warm=is_warm), forward
        yield PassTime(f"{name}, with backward", sum(nbytes), sum(kernels), 0.0, is_warm=is_warm), both


def _streams(device: torch.device) -> Iterator[tuple[PassTime, Operation]]:
    """Yield passes over tensors that lie in no cache."""
    elements = COLD // 16  # fp32: four tensors are as large as COLD
    others = cycle(torch.randn(4, elements, device=device))
    given = {
        "copy": (8, lambda: next(others).copy_(next(others))),
        "triad": (12, lambda: torch.add(next(others), next(others), alpha=2.0, out=next(others))),
        "update": (_UPDATE_BYTES, _update(elements, device)),
    }
    for name, (nbytes, operation) in given.items():
        yield PassTime(name, float(nbytes * elements), 1, 0.0, is_stream=True), operation


def _shape(tokens: int, *, one_kernel_norm: bool) -> ModelShape:
    return ModelShape(
        layers=1,
        hidden=_WIDTH,
        ffn=_WIDTH,
        heads=8,
        vocab=_WIDTH,
        seq=tokens,
        gated=True,
        fused_passes=False,
        fused_norm=one_kernel_norm,
    )


def _with_backward(
    operator: Callable[..., Tensor], given: Sequence[tuple[Tensor, ...]]
) -> tuple[Operation, Operation]:
    """Return an operator's forward as if a backward follows, and both; each call takes the next operands."""
    leaves = cycle([[tensor.detach().requires_grad_() for tensor in each] for each in given])
    gradient = torch.ones_like(operator(*next(leaves)))

    def forward() -> Tensor:
        return operator(*next(leaves))

    def both() -> object:
        chosen = next(leaves)
        return torch.autograd.grad(operator(*chosen), chosen, gradient)

    return forward, both


def _update(elements: int, device: torch.device) -> Operation:
    parameter = torch.nn.Parameter(torch.randn(elements, device=device))
    parameter.grad = torch.randn(elements, device=device)
    return torch.optim.AdamW([parameter], fused=True).step


def measure_attention(place: Place, effort: Effort) -> tuple[AttentionTime, ...]:
    """Time forward and backward of causal attention.

    Backward is the time of both minus forward: a difference of two times on this rank, which noise can make
    negative. Ranks take the median over all ranks, so each returns an equal list.
    """
    accelerated = place.device.type != "cpu"
    precision = "bf16" if accelerated else "fp32"
    shapes = (*_ATTENTION, *(_LARGE_ATTENTION if accelerated else ()))
    operations: dict[tuple[tuple[int, ...], bool], Operation] = {}
    for shape in shapes:
        operations[shape, False], operations[shape, True] = _attention(
            shape, _DTYPES[precision], place.device
        )
    seconds = time_on_device(operations, place, effort)
    times = []
    for shape in shapes:
        length, heads, kv_heads, width = shape
        attention = Attention(length, heads, kv_heads, width, width)
        forward, both = seconds[shape, False], seconds[shape, True]
        times.append(AttentionTime(precision, attention, "forward", forward))
        times.append(AttentionTime(precision, attention, "backward", both - forward))
    return tuple(times)


def _attention(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Operation, Operation]:
    length, heads, kv_heads, width = shape

    def projected(count: int) -> Tensor:
        """Return a tensor like a product's result, `[1, length, heads, width]`, with heads before length."""
        return torch.randn(1, length, count, width, device=device).to(dtype).transpose(1, 2)

    return _with_backward(causal_attention, [(projected(heads), projected(kv_heads), projected(kv_heads))])


def measure_host(place: Place, effort: Effort) -> HostTimes:
    """Return the seconds between two kernels on the device, and what the host takes to start operations.

    The host's seconds are those of a transformer's layer with almost nothing to compute, forward and
    backward, divided by the kernels that its Workload counts; and those that the same layer takes when it is
    compiled, beyond the start of its kernels. On cores the thread that starts an operator also runs it: all
    is the time between two kernels. On a GPU that time is from kernels that were recorded and are replayed.
    """
    layer = SmallLayer().to(place.device)
    operations: dict[str, Operation] = {"eager": layer.forward_and_backward}
    if place.device.type == "cpu":
        seconds = time_in_turns(operations, place, effort)
        return HostTimes(seconds["eager"] / layer.kernels(), 0.0, 0.0)
    compiled = layer.compiled()
    with contextlib.suppress(RuntimeError):  # no compiler on this machine: the call of a graph is not known
        compiled()
        operations["compiled"] = compiled
    operations["device"] = _recorded(torch.ones(_SMALL, device=place.device))
    seconds = time_in_turns(operations, place, effort)
    dispatch = seconds["eager"] / layer.kernels(one_kernel_norm=True)
    calls = seconds.get("compiled", 0.0) - layer.compiled_kernels() * dispatch
    return HostTimes(seconds["device"] / _CHAIN, dispatch, max(0.0, calls / 2))


def _recorded(value: Tensor) -> Operation:
    def chain() -> None:
        for _ in range(_CHAIN):
            value.mul_(1.0)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return graph.replay
