"""Seconds of single operations, against formulas spelled out here."""

import pytest

from shoal.predict.cost.layout import Layout
from shoal.predict.cost.time.block import block_cost
from shoal.predict.cost.time.compute import host_seconds, operation_seconds, product_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.workload import ModelShape, Part, Product, workload_of

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
