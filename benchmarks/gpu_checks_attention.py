"""Check of attention on a GPU; see `gpu_checks_models.py`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_checks_models import Operators
from gpu_device import finish
from torch import Tensor

from shoal.models import Documents
from shoal.models.attention import causal_attention


def check_attention(device: torch.device) -> str:
    """Grouped-query attention equals the plain form, by a kernel without all scores in memory."""
    on_gpu = device.type == "cuda"
    found = []
    for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float32, 2e-3)):
        for is_masked in (False, True):
            name = f"{str(dtype).removeprefix('torch.')}{' masked' if is_masked else ''}"
            _compare_attention(device, dtype, is_masked, 1024 if on_gpu else 96, tolerance, name)
            seq = 8192 if on_gpu else 256
            given, documents = _attention_inputs(device, dtype, is_masked, seq)
            with Operators() as operators:
                causal_attention(*given, documents)
            kernels = {each for each in operators.names if "dot_product" in each or "softmax" in each}

            def own(given: Any = given, documents: Any = documents) -> Tensor:
                return causal_attention(*given, documents)

            def shared(given: Any = given, documents: Any = documents) -> Tensor:
                mask = None if documents is None else documents.mask()
                return F.scaled_dot_product_attention(
                    *given, attn_mask=mask, is_causal=mask is None, enable_gqa=True
                )

            measured, reference = (_time_and_memory(each, given, device) for each in (own, shared))
            scores = given[0].shape[1] * seq**2 * given[0].element_size()
            assert not any("softmax" in each for each in kernels), (
                f"{name}: ran {kernels}, wanted a fused kernel"
            )
            assert not on_gpu or measured[1] < scores / 4, (
                f"{name}: {measured[1] / 1e6:.0f} MB more at the peak, wanted less than a quarter of the "
                f"scores' {scores / 1e6:.0f} MB"
            )
            found.append(
                f"{name}: {', '.join(sorted(kernels))} {measured[0] * 1e3:.2f} ms {measured[1] / 1e6:.0f} MB "
                f"(keys shared {reference[0] * 1e3:.2f} ms {reference[1] / 1e6:.0f} MB)"
            )
    return f"attention, forward and backward: {'; '.join(found)}"


def _attention_inputs(
    device: torch.device, dtype: torch.dtype, is_masked: bool, seq: int
) -> tuple[list[Tensor], Documents | None]:
    """Return query, key and value of 16 and 4 heads as projections give them, and documents for a mask."""
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(1, seq, heads, 64, generator=generator).to(device, dtype).transpose(1, 2).requires_grad_()
        for heads in (16, 4, 4)
    ]
    if not is_masked:
        return given, None
    # On a CPU attention to such short documents is masked, too.
    positions = torch.arange(seq, device=device) % (seq // 3 if device.type == "cuda" else 8)
    return given, Documents(positions[None])


def _compare_attention(
    device: torch.device, dtype: torch.dtype, is_masked: bool, seq: int, tolerance: float, name: str
) -> None:
    """Hold attention and its gradients against the definition in fp32."""
    given, documents = _attention_inputs(device, dtype, is_masked, seq)
    wide = [each.detach().float().requires_grad_() for each in given]
    seen = torch.ones(seq, seq, dtype=torch.bool, device=device).tril()
    if documents is not None:
        seen = documents.mask()
    query, key, value = wide[0], *(each.repeat_interleave(4, 1) for each in wide[1:])
    scores = (query @ key.mT / 8).masked_fill(~seen, -math.inf)
    expected, found = scores.softmax(-1) @ value, causal_attention(*given, documents)
    expected.square().sum().backward()
    found.float().square().sum().backward()
    pairs: list[Any] = [("output", found.detach(), expected.detach())]
    for what, own, each in zip(("query", "key", "value"), given, wide, strict=True):
        pairs.append((f"the gradient of the {what}", own.grad, each.grad))
    for what, one, other in pairs:
        error = float((one.float() - other).abs().max() / other.abs().max())
        assert error < tolerance, f"{name}: {what} differs by {error:.1e} of the largest, wanted {tolerance}"


def _time_and_memory(
    attend: Callable[[], Tensor], given: list[Tensor], device: torch.device
) -> tuple[float, int]:
    """Return seconds of forward and backward, and bytes that they take beyond what was there."""

    def both() -> None:
        output = attend()
        torch.autograd.grad(output, given, output.detach())

    both()
    finish(device)
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    began = time.perf_counter()
    for _ in range(5):
        both()
    finish(device)
    seconds = (time.perf_counter() - began) / 5
    return seconds, torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
