"""The experts of a layer: who starts their kernels, what waits for that, and what ranks send each other."""

from dataclasses import replace

import pytest

from shoal.predict.cost.layout import Layout
from shoal.predict.cost.time import block_cost
from shoal.predict.cost.time.compute import operation_seconds, starts_of, waits_for_experts
from shoal.predict.validate.programs import program_workload
from shoal.spec.cluster import Cluster
from shoal.spec.workload import Pass, Product, shape, workload_of

NODES = Cluster.preset("dgx-h100", 64)
MODEL = shape("1b").replace(seq=1024, experts=64, experts_per_token=4, expert_ffn=512)


def block_of(casts=0):
    return program_workload(MODEL, None, casts).layers[0]


def experts_of(block):
    return [each for each in block.operations if isinstance(each, Product | Pass) and each.copies > 1]


@pytest.mark.parametrize("casts", [0, 1, 3])
def test_the_host_starts_each_product_and_cast_of_each_expert_of_a_rank(casts):
    """Forward has two products and two casts of an expert, backward four and two."""
    known, dense = block_of(casts), workload_of(MODEL.replace(experts=0)).layers[0]
    for ep in (1, 8):
        forward, backward = starts_of(known, Layout(1, ep=ep))
        fewer = starts_of(known, Layout(1, ep=2 * ep))
        assert forward - fewer[0] == 64 // ep // 2 * (2 + 2 * casts)
        assert backward - fewer[1] == 64 // ep // 2 * (4 + 2 * casts)
    assert starts_of(dense, Layout(1)) == starts_of(dense, Layout(1, ep=8))


@pytest.mark.parametrize("samples", [1, 64])
def test_a_device_waits_for_its_experts_as_long_as_the_host_takes_beyond_its_own_work(samples):
    block, layout, device = block_of(1), Layout(samples, ep=8), NODES.device
    works = [operation_seconds(each, device, layout) for each in experts_of(block)]
    host = [8 * started * device.dispatch for started in (2 + 2, 4 + 2)]
    expected = (
        max(0.0, host[0] - sum(each.forward for each in works)),
        max(0.0, host[1] - sum(each.backward for each in works)),
    )
    assert waits_for_experts(block, device, layout) == pytest.approx(expected)
    assert (expected[0] > 0) == (samples == 1)
    at_once = block_cost(block, MODEL.hidden, 1024, _with_dispatch(0.0), layout).compute
    assert block_cost(block, MODEL.hidden, 1024, NODES, layout).compute == pytest.approx(
        (at_once.forward + expected[0], at_once.input + expected[1], at_once.weight)
    )


def _with_dispatch(seconds):
    return NODES.replace(device=replace(NODES.device, dispatch=seconds))


def test_a_selective_recompute_casts_no_rows_again():
    cluster = _with_dispatch(0.0)
    again = [
        block_cost(
            block_of(casts), MODEL.hidden, 1024, cluster, Layout(8, ep=8, recompute=kind)
        ).compute.input
        for casts in (0, 1)
        for kind in ("none", "selective")
    ]
    assert again[1] - again[0] == pytest.approx(again[3] - again[2])
    assert again[2] > again[0]


@pytest.mark.parametrize(("ep", "nodes"), [(8, 1), (16, 2), (64, 8)])
def test_a_token_crosses_the_network_once_to_each_node_with_its_experts(ep, nodes):
    """Of four experts, each on any node alike; a program that sends to each expert sends four times."""
    block, layout = block_of(), Layout(16, ep=ep)
    cluster = NODES.replace(
        levels=tuple(replace(each, setup=0.0, latency=0.0, half_size=0.0) for each in NODES.levels)
    )
    once, each = (
        block_cost(replace(block, once_to_node=k), MODEL.hidden, 1024, cluster, layout).expert[0]
        for k in (block.once_to_node, 0)
    )
    share = nodes * (1 - (1 - 1 / nodes) ** 4) / 4 if nodes > 1 else 1.0
    assert once == pytest.approx(share * each, rel=0.02)
