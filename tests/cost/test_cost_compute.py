"""Seconds of single operations, against formulas spelled out here."""

import dataclasses

import pytest

from shoal.cluster import Cluster
from shoal.cost.layout import Layout
from shoal.cost.time.block import block_cost
from shoal.cost.time.compute import attention_seconds, host_seconds, operation_seconds, product_seconds
from shoal.workload import Attention, ModelShape, Part, Product, workload_of

CLUSTER = Cluster.preset("dgx-h100", 8)
DEVICE = CLUSTER.device
MATRIX = Product("up", rows=1536, inputs=4096, outputs=14336, part=Part.COLUMNS)


def test_a_product_and_both_of_its_gradients_have_the_sizes_of_the_matrices_that_they_multiply():
    found = operation_seconds(MATRIX, DEVICE, Layout(2, tp=4))
    rows, inputs, outputs = 2 * 1536, 4096, 14336 // 4
    # y = x w;  the gradient of x is that of y times w', that of w is x' times that of y
    assert found.forward == product_seconds(DEVICE, "bf16", rows, inputs, outputs)
    assert found.input == product_seconds(DEVICE, "bf16", rows, outputs, inputs)
    assert found.weight == product_seconds(DEVICE, "bf16", inputs, rows, outputs)


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, tp=4, cp=2)])
def test_fused_attention_does_its_flop_at_its_share_of_the_peak_and_half_of_it_if_causal(layout):
    whole = Attention(4096, heads=32, kv_heads=8, key_width=128, value_width=128, causal=False)
    causal = dataclasses.replace(whole, causal=True)
    flop = 2 * 4096**2 * 32 * (128 + 128) * layout.microbatch / layout.tp / layout.cp
    for attention, done in ((whole, flop), (causal, flop / 2)):
        forward, backward = attention_seconds(attention, DEVICE, layout)
        peak = DEVICE.peak["bf16"]
        assert forward == pytest.approx(DEVICE.launch + done / (peak * DEVICE.attention_share))
        scores_again_and_two_for_each = 2.5 * done / (peak * DEVICE.attention_backward_share)
        assert backward == pytest.approx(2 * DEVICE.launch + scores_again_and_two_for_each)


def test_on_cores_a_communication_takes_the_core_besides_what_it_travels():
    cores = CLUSTER.replace(cores=CLUSTER.devices)
    assert host_seconds(CLUSTER) == 0.0
    assert host_seconds(cores) == pytest.approx(30 * DEVICE.launch)
    shape = ModelShape(layers=1, hidden=1024, ffn=4096, heads=16, vocab=8192, seq=1024)
    (layer,) = workload_of(shape).layers
    layout = Layout(1, cp=2, context="ulysses")
    slower = block_cost(layer, 1024, 1024, cores, layout).context[0]
    quicker = block_cost(layer, 1024, 1024, CLUSTER, layout).context[0]
    assert slower - quicker == pytest.approx(3 * host_seconds(cores))  # queries, keys with values, results
