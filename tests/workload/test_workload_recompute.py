"""What a full recompute makes again, against the operations that torch runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shoal.models import Transformer, TransformerConfig
from shoal.parallel.compiled import compile_blocks
from shoal.spec.workload import Product, transformer_shape, workload_of

EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_ffn": 24}


def products_flop(config, policy):
    """Of forward and backward of one sample, without attention, which the counter takes by kernels."""
    torch.manual_seed(0)
    model = Transformer(config)
    model.initialize(0)
    compile_blocks(model.blocks, policy)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, config.seq, dtype=torch.int64)).float().sum().backward()
    counts = counter.get_flop_counts()["Global"]
    return sum(flop for operator, flop in counts.items() if "mm" in str(operator))


@pytest.mark.parametrize("options", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_full_recompute_ends_with_the_last_result_that_backward_reads(options):
    config = TransformerConfig(
        vocab_size=32, layers=3, hidden=16, heads=2, kv_heads=2, ffn=48, seq=8, **options
    )
    again = products_flop(config, "full") - products_flop(config, "none")
    workload = workload_of(transformer_shape(config.model_dump(), "counted"))
    expected = sum(
        operation.flop
        for layer in workload.layers
        for operation in layer.operations
        if isinstance(operation, Product) and operation not in layer.unread
    )
    assert again == expected
