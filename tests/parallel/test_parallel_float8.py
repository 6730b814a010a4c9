"""precision=fp8: products of blocks in 8 bits, which a CPU emulates.

Where torchao is not installed, layers that round their operands in the same way stand in for its own.
"""

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from shoal.errors import PlanError
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import parallelize
from shoal.parallel.precision import use_float8
from shoal.spec.plan import Plan

SHAPE = TransformerConfig(vocab_size=61, layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, seq=16)


class Float8Linear(torch.nn.Linear):
    """Rounds input and weight to 8 bits, each with one scale."""

    def forward(self, hidden):
        return torch.nn.functional.linear(rounded(hidden), rounded(self.weight), self.bias)


def rounded(tensor):
    kind = torch.float8_e4m3fn
    scale = torch.finfo(kind).max / tensor.detach().abs().max().float()
    narrow = (tensor.detach() * scale).to(kind).to(tensor.dtype) / scale
    return tensor + (narrow - tensor).detach()  # the gradient passes through


def convert(block, *, config, module_filter_fn):
    assert config.emulate
    for name, layer in list(block.named_modules()):
        if module_filter_fn(layer, name):
            layer.__class__ = Float8Linear


def train(plan):
    """Losses of four steps, and the kinds of the blocks' layers."""
    if find_spec("torchao") is None:
        sys.modules["torchao.float8"] = SimpleNamespace(
            Float8LinearConfig=SimpleNamespace, convert_to_float8_training=convert
        )
    model = Transformer(SHAPE)
    model.initialize(0)
    parallel = parallelize(model, plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for number in range(4):
        tokens = torch.randint(61, (4, 17), generator=torch.Generator().manual_seed(number))
        mine = parallel.local(tokens)
        loss = next_token_loss(parallel(mine[:, :-1]), mine[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        parallel.axes.dp.all_reduce(mean := loss.detach().clone(), "loss").wait()
        losses.append(mean.item() / parallel.axes.dp.size)
    kinds = {type(layer).__name__ for layer in parallel.module.blocks.modules()}
    return losses, kinds


@pytest.mark.parametrize("layout", ["dp=1", "dp=2,shard=zero3,recompute=full"])
def test_products_in_8_bits_train_near_those_in_16(ranks, layout):
    narrow, kinds = ranks.run(train, int(layout[3]), layout + ",precision=fp8")[0]
    wide, _ = ranks.run(train, int(layout[3]), layout + ",precision=bf16")[0]
    assert "Float8Linear" in kinds
    assert "Linear" not in kinds
    assert narrow != wide
    # An operand with 3 bits of mantissa is off by up to 6 %, which averages out in sums of 64 and more.
    assert narrow == pytest.approx(wide, rel=0.02)


def test_what_cannot_be_made_in_8_bits_is_refused(monkeypatch):
    with pytest.raises(PlanError, match="precision=fp8 was given with tp=2"):
        Plan.parse("tp=2,precision=fp8")
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(PlanError, match=r"torchao.* is not installed"):
        parallelize(Transformer(SHAPE), "precision=fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(PlanError, match="A100 has no products in 8 bits"):
        use_float8([], torch.device("cuda"))
