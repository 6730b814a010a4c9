"""A transformer's layer so small that starting its operators takes all its time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.workload import ModelShape, Pass, Product, workload_of

__all__ = ["SmallLayer"]

_WIDTH = 16
_TOKENS = 4


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
        stream = torch.ones(1, _TOKENS, _WIDTH, device=self.query.weight.device, requires_grad=True)
        self(stream).sum().backward()

    def kernels(self, *, fused: bool) -> int:
        """Return the number of kernels that its Workload counts, forward and backward."""
        shape = ModelShape(
            layers=1,
            hidden=_WIDTH,
            ffn=_WIDTH,
            heads=1,
            vocab=1,
            seq=_TOKENS,
            gated=True,
            rotary=False,
            fused_passes=fused,
        )
        operations = workload_of(shape).layers[0].operations
        passes = sum(2 * each.kernels for each in operations if isinstance(each, Pass))
        return passes + sum(3 for each in operations if isinstance(each, Product)) + 3  # and attention


def _square(count: int) -> list[nn.Linear]:
    return [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)]
