"""Checks of models on a GPU: dropout, graphs, gradients, experts, codecs, and a training's losses.

Each function returns a line of findings, or raises AssertionError with what it found and what it wanted. On a
CPU they run with smaller sizes, so that their own code is tried.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_device import finish, no_waits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.collectives.codecs import with_torch
from shoal.models import (
    Mixture,
    Transformer,
    TransformerConfig,
    next_token_loss,
    token_keys,
)
from shoal.models.grouped_matmul import GroupedProducts, LoopedProducts, Runs, multiply_by_experts
from shoal.parallel import compiled, parallelize
from shoal.parallel.optimizer.optimizers import limit_gradients
from shoal.spec.plan import Compression
from shoal.train.optimizer_step import Update

__all__ = ["Operators", "finish"]

_LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
"""Calls that start something on a GPU, as the profiler names them."""

_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "layers": 6,
    "hidden": 256,
    "heads": 8,
    "kv_heads": 2,
    "ffn": 512,
    "seq": 128,
}


class Operators(TorchDispatchMode):
    """Notes the name of each operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.names.append(operator.name().removeprefix("aten::"))
        return operator(*arguments, **(named or {}))


def check_norm_and_clip(device: torch.device) -> str:
    """Norm and clip take a few launches however many parameters there are."""
    launches = {}
    for layers in (20, 200):
        parallel = parallelize(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))), "dp=1", device=device
        )
        parallel(torch.ones(2, 64, device=device)).sum().backward()

        def clip(parallel: Any = parallel) -> None:
            limit_gradients(parallel.owned, parallel.measure_gradient().whole, 1e-3)

        launches[2 * layers] = _launches(clip, device)
        began = time.perf_counter()
        for _ in range(20):
            clip()
        host = (time.perf_counter() - began) / 20
        finish(device)
    few, many = launches.values()
    assert many - few <= 36, f"{launches} launches by parameters, wanted at most one for ten parameters more"
    return f"norm and clip: {launches} launches by parameters; {host * 1e6:.0f} us of the host for the most"


def check_gradients_are_moved_together(device: torch.device) -> str:
    """Small gradients of two micro-batches move into a bucket's sum by a few launches."""
    extra = {}
    for layers in (10, 100):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        alone = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))).to(device, torch.bfloat16)
        parallel = parallelize(model, "dp=1,precision=bf16", device=device)
        values = torch.ones(2, 64, device=device)

        def own(parallel: Any = parallel, values: Tensor = values) -> None:
            with parallel.accumulate():
                parallel(values).sum().backward()
            parallel(values).sum().backward()
            parallel.zero_grad()

        def plain(alone: Any = alone, values: Tensor = values) -> None:
            for _ in range(2):
                alone(values.bfloat16()).sum().backward()
                alone.zero_grad()

        extra[2 * layers] = _launches(own, device) - _launches(plain, device)
    few, many = extra.values()
    if device.type == "cuda":  # a CPU moves each while it is in the cache
        assert many - few <= 60, f"{extra} launches more than plain torch, wanted few for 180 parameters more"
    return f"gradients into the sum: {extra} launches more than plain torch, by parameters"


def check_dropout_shares_a_graph(device: torch.device) -> str:
    """Blocks with dropout share one graph, whose masks are those of the eager model."""
    model = _transformer(device, dropout=0.1)
    tokens = torch.arange(256, device=device).view(2, 128)
    model.dropout_keys = token_keys(0, 0, torch.arange(2, device=device), torch.arange(128, device=device))
    expected: Any = model(tokens)
    with _counted_graphs("inductor" if device.type == "cuda" else "aot_eager") as graphs:
        compiled.compile_blocks(list(model.blocks), "none", "blocks", device)
        began = time.perf_counter()
        output: Any = model(tokens)
        output.sum().backward()
        finish(device)
        seconds, first = time.perf_counter() - began, graphs()
        model.dropout_keys = model.dropout_keys + 2
        model(tokens).sum().backward()
        assert (first, graphs()) == (1, 1), f"{first}, then {graphs()} graphs of 6 blocks, wanted 1"
    error = float((output - expected).detach().abs().max() / expected.detach().abs().max())
    assert error < 1e-3, f"compiled output differs by {error:.1e} of the largest logit, wanted 1e-3"
    return f"dropout: 1 graph of 6 blocks, {seconds:.1f} s to compile; differs from eager by {error:.1e}"


def check_full_recompute_is_compiled(device: torch.device) -> str:
    """Full recompute runs graphs in backward's thread, also beyond the eighth."""
    with _counted_graphs("aot_eager") as graphs:
        blocks: list[nn.Module] = [_Unlike(number + 2) for number in range(12)]
        compiled.compile_blocks(blocks, "full", "blocks", device)
        values = torch.ones(4, requires_grad=True, device=device)
        for block in blocks:
            values = block(values)
        forward = graphs()
        torch._dynamo.reset()  # recomputing compiles again, in the thread that runs backward
        values.sum().backward()
        both = graphs()
        assert (forward, both) == (12, 24), f"{forward}, then {both} graphs, wanted 12, then 24"
    model = _transformer(device, dropout=0.1)
    with _counted_graphs("aot_eager") as graphs:
        compiled.compile_blocks(list(model.blocks), "full", "blocks", device)
        numbers = []
        for _ in range(3):
            model(torch.arange(256, device=device).view(2, 128)).sum().backward()
            numbers.append(graphs())
        assert numbers[0] <= 2, f"{numbers[0]} graphs of 6 blocks in the first step, wanted 1 or 2"
        assert numbers[1:] == numbers[:1] * 2, f"graphs after each step: {numbers}, wanted no more"
    return f"full recompute: 12 unlike blocks, 12 + 12 graphs; 6 blocks with dropout, graphs: {numbers[0]}"


def check_recompute_draws_the_same(device: torch.device) -> str:
    """Recomputing draws the random numbers of the forward again, and the host does not wait for that."""
    model = _transformer(device, dropout=0.0)
    tokens = torch.arange(256, device=device).view(2, 128)
    for block in model.blocks:
        block.attention.register_forward_hook(lambda module, arguments, output: F.dropout(output, 0.3))

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        return list(torch.autograd.grad(model(tokens).square().sum(), list(model.parameters())))

    expected = gradients()
    compiled.compile_blocks(list(model.blocks), "full", device=device)
    found = gradients()
    finish(device)
    with no_waits(device, "recomputing"):
        gradients()
    # Sums of the embedding's gradient have no fixed order on a GPU.
    error = max(
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    )
    assert error < 1e-4, f"recomputed gradients differ by {error:.1e} of the largest, wanted 1e-4"
    return f"recompute with a hook that drops: gradients differ by {error:.1e}, no wait"


def check_grouped_products(device: torch.device) -> str:
    """Grouped products are right where experts have no rows, and where no expert has any."""
    width, generator = (1024, 4096) if device.type == "cuda" else (32, 64), torch.Generator().manual_seed(0)
    counts = torch.tensor([300, 0, 1, 0, 0, 700, 23, 0], device=device)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    rows, weight, gradient = random(1024, width[0]), random(8, width[1], width[0]), random(1024, width[1])
    grouped, looped = GroupedProducts(counts), LoopedProducts(counts.tolist())
    errors = []
    for name, product in (
        ("results", lambda each: each.results(rows, weight)),
        ("rows' gradient", lambda each: each.rows_gradient([gradient], [weight])),
        ("weights' gradient", lambda each: each.weight_gradient(gradient, rows)),
    ):
        expected = product(looped)
        poisoned = torch.full((2 * weight.numel(),), math.nan, dtype=torch.bfloat16, device=device)
        del poisoned  # the next result gets this memory
        found = product(grouped)
        assert bool(found.isfinite().all()), f"{name}: {int((~found.isfinite()).sum())} are not finite"
        errors.append(float((found - expected).abs().max() / expected.abs().max()))
        assert errors[-1] < 2e-2, f"{name} differ from a loop by {errors[-1]:.1e}, wanted 2e-2"
    weight.requires_grad_()
    none = rows[:0].clone().requires_grad_()
    (result,) = multiply_by_experts(none, Runs(torch.zeros_like(counts)), [weight])
    result.sum().backward()
    assert result.shape == (0, width[1]), f"{tuple(result.shape)}, wanted (0, {width[1]})"
    assert weight.grad is not None, "no rows gave the weights no gradient, wanted zeros"
    assert not bool(weight.grad.any()), "no rows gave the weights a gradient other than zeros"
    return (
        f"grouped products: differ from a loop by {', '.join(f'{each:.1e}' for each in errors)}; no rows: 0"
    )


def check_experts_do_not_wait(device: torch.device) -> str:
    """A layer of experts in bf16 on one GPU never makes the host wait."""
    config = {**_SHAPE, "experts": 8, "experts_per_token": 2, "layers": 1}
    mixture = Mixture(TransformerConfig(**config)).to(device, torch.bfloat16)
    hidden = torch.randn(2, 128, 256, device=device).bfloat16().requires_grad_()

    def run() -> None:
        mixture(hidden).sum().backward()

    run()
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "experts: not checked for waits, because only Hopper's grouped product never waits"
    finish(device)
    with no_waits(device, "a layer of experts"):
        run()
    return f"experts: no wait in a layer's forward and backward, {_launches(run, device)} launches"


def check_threshold_codec(device: torch.device) -> str:
    """The codec `threshold` decodes by a bounded number of launches, as on a CPU."""
    elements = 2**24 if device.type == "cuda" else 2**18
    compression = Compression.parse("threshold:3")
    values = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(device)
    payload = torch.empty(elements, dtype=torch.uint8, device=device)
    written = with_torch.encode(compression, values, payload, 0, None)
    decoded, expected = torch.empty_like(values), torch.empty(elements)

    def decode() -> None:
        with_torch.decode(compression, payload[:written], decoded, 0)

    launches = _launches(decode, device)
    began = time.perf_counter()
    decode()
    finish(device)
    seconds = time.perf_counter() - began
    with_torch.decode(compression, payload[:written].cpu(), expected, 0)
    assert torch.equal(decoded.cpu(), expected), "the device decodes other numbers than a CPU"
    assert launches <= 60, f"{launches} launches to decode {elements} elements, wanted at most 60"
    return f"threshold: {elements / 1e6:.1f} M elements in {seconds * 1e3:.1f} ms, {launches} launches"


def check_losses(device: torch.device) -> str:
    """Three steps of a small model have the losses of plain torch on the device."""
    tokens = torch.randint(1024, (3, 4, 129), generator=torch.Generator().manual_seed(0)).to(device)
    expected = _plain_losses(device, tokens)
    found = []
    # fp32: sums in another order. bf16: 8 bits for each of the operands, averaged over 512 tokens.
    for plan, tolerance in (("dp=1", 1e-4), ("dp=1,precision=bf16", 1e-2)):
        model = Transformer(TransformerConfig(**_SHAPE))
        model.initialize(0)
        parallel = parallelize(model, plan, device=device)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
        update, losses = Update(parallel, optimizer, clip=1.0), []
        for batch in tokens:
            loss = next_token_loss(parallel(batch[:, :-1]), batch[:, 1:])
            loss.backward()
            update.make(loss.detach(), parallel.measure_gradient().whole)
            optimizer.zero_grad()
            losses.append(loss.item())
        error = max(abs(one - other) / other for one, other in zip(losses, expected, strict=True))
        assert error < tolerance, f"{plan}: losses {losses}, wanted {expected} within {tolerance}"
        found.append(f"{plan}: within {error:.1e}")
    return f"losses {', '.join(f'{loss:.4f}' for loss in expected)} of plain torch; {'; '.join(found)}"


def _plain_losses(device: torch.device, tokens: Tensor) -> list[float]:
    model = Transformer(TransformerConfig(**_SHAPE))
    model.initialize(0)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in tokens:
        logits: Any = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class _Unlike(nn.Module):
    """A block that needs a graph of its own, because it computes with its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, values: Tensor) -> Tensor:
        return values.sin() * self.number


def _transformer(device: torch.device, dropout: float) -> Transformer:
    model = Transformer(TransformerConfig(**_SHAPE, dropout=dropout))
    model.initialize(0)
    return model.to(device)


@contextlib.contextmanager
def _counted_graphs(backend: str) -> Iterator[Callable[[], int]]:
    """Give a function that returns how many graphs were compiled in this context, by a backend."""
    before, compiled.BACKEND = compiled.BACKEND, backend
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    try:
        yield lambda: int(counters["stats"]["unique_graphs"])
    finally:
        compiled.BACKEND = before


def _launches(run: Callable[[], object], device: torch.device) -> int:
    """Return how much a call starts on a GPU, after a first call; on a CPU how many operators it runs."""
    run()
    finish(device)
    if device.type != "cuda":
        with Operators() as operators:
            run()
        return len(operators.names)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        finish(device)
    return sum(event.name in _LAUNCHES for event in profile.events() or ())
