"""A transformer's layer so small that starting its operators takes all its time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.cost import Layout
from shoal.cost.time import starts_of
from shoal.workload import Block, ModelShape, Pass, Product, compilable_workload_of, workload_of

_WIDTH = 16
_TOKENS = 4
_AROUND = 4  # kernels around the layer: its input, the sum of its result, and their gradients
_SHAPE = ModelShape(
    layers=1, hidden=_WIDTH, ffn=_WIDTH, heads=1, vocab=1, seq=_TOKENS, gated=True, rotary=False
)


class SmallLayer(nn.Module):
    """Norm, attention, norm and a gated feed-forward layer, in modules as in real models."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = (nn.RMSNorm(_WIDTH) for _ in range(2))
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
        return torch.ones(1, _TOKENS, _WIDTH, device=self.query.weight.device, requires_grad=True)


def _started(layer: Block) -> int:
    """Return the number of kernels that the host starts for a layer in forward and backward."""
    return round(sum(starts_of(layer, Layout(1, precision="fp32"))))


def _square(count: int) -> list[nn.Linear]:
    return [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)]
