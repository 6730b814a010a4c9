"""Communications of tensor parallelism, against what the runtime sends and the products beside them."""

import dataclasses
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.models import TransformerConfig
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.time.block import block_cost, joins_of
from shoal.predict.cost.time.compute import operation_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.workload import ModelShape, Part, Product, workload_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "docs"))

from sent import SENT, bytes_sent

SHAPE = ModelShape(layers=2, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32000, seq=2048, gated=True)
WORKLOAD = workload_of(SHAPE)
CLUSTER = Cluster.preset("dgx-h100", 8)
WIDTH = 2
SHARE_OF_RING = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "shift": 1.0}


def on(**fields):
    return CLUSTER.replace(device=dataclasses.replace(CLUSTER.device, **fields))


def joins(block, layout, cluster=CLUSTER):
    stream = float(WIDTH) * layout.microbatch * SHAPE.seq * SHAPE.hidden
    return joins_of(block, stream, cluster, layout)


def names(found):
    return [each.name for join in found for each in (*join.before, *join.behind)]


def sent(found, ranks):
    """Bytes of a ring, without the loss's few."""
    return sum(
        SHARE_OF_RING[each.name.partition(":")[0]] * each.nbytes * (ranks - 1) / ranks
        for join in found
        for each in (*join.before, *join.behind)
        if each.name != "all_gather:loss"
    )


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("tensor", ["plain", "sequence", "async"])
def test_a_layer_sends_what_the_running_code_is_counted_to_send(tensor, ranks):
    config = TransformerConfig(
        vocab_size=32000, hidden=4096, layers=2, heads=32, kv_heads=8, ffn=14336, seq=SHAPE.seq
    )
    found = joins(WORKLOAD.layers[0], Layout(1, tp=ranks, tensor=tensor))
    for each, formula in zip(found, SENT[f"tensor={tensor}"], strict=True):
        expected = bytes_sent(formula, config, ranks=ranks, tokens=SHAPE.seq, width=WIDTH)
        assert sent(each, ranks) == pytest.approx(expected)


def test_the_ends_send_once_where_a_layer_sends_there_and_back():
    layout = Layout(1, tp=4, tensor="sequence")
    forward, backward = joins(WORKLOAD.embedding, layout)
    assert (names(forward), names(backward)) == (["reduce_scatter:embed"], ["all_gather:embed"])
    forward, backward = joins(WORKLOAD.end, layout)
    assert names(forward) == ["all_gather:column", "all_gather:loss"]
    assert names(backward) == ["all_gather:column", "reduce_scatter:column"]
    plain = Layout(1, tp=4, tensor="plain")
    forward, backward = joins(WORKLOAD.embedding, plain)
    assert (names(forward), names(backward)) == (["all_reduce:embed"], [])
    forward, backward = joins(WORKLOAD.end, plain)
    assert (names(forward), names(backward)) == (["all_gather:loss"], ["all_reduce:column"])


@given(st.floats(0, 0.95), st.sampled_from([2, 4, 8]), st.sampled_from([1, 4]))
def test_async_hides_no_more_than_the_products_beside_it_and_no_more_than_its_share(
    overlap, ranks, microbatch
):
    cluster = on(overlap=overlap)
    layer = WORKLOAD.layers[0]
    asynchronous, plain = (
        joins(layer, Layout(microbatch, tp=ranks, tensor=tensor), cluster)[0]
        for tensor in ("async", "sequence")
    )
    whole = sum(join.seconds for join in plain)
    hidden = whole - sum(join.seconds for join in asynchronous)
    products = sum(
        operation_seconds(each, cluster.device, Layout(microbatch, tp=ranks)).forward
        for each in layer.operations
        if isinstance(each, Product) and each.part is not Part.WHOLE
    )
    rounding = 1e-12
    assert -rounding <= hidden <= min(overlap * whole, (ranks - 1) / ranks * products) + rounding


def test_slow_links_leave_exposed_all_but_what_products_take():
    level = dataclasses.replace(CLUSTER.levels[0], bandwidth=1e9)
    slow = on(overlap=0.95).replace(levels=(level, *CLUSTER.levels[1:]))
    found = joins(WORKLOAD.layers[0], Layout(1, tp=8, tensor="async"), slow)[0]
    whole = joins(WORKLOAD.layers[0], Layout(1, tp=8, tensor="sequence"), slow)[0]
    # With shares alone a twentieth would be left.
    assert sum(join.seconds for join in found) > 0.9 * sum(join.seconds for join in whole)


def test_a_layer_is_recomputed_with_its_communications_and_the_ends_are_not():
    def cost(block, recompute, *, is_layer):
        layout = Layout(1, tp=4, recompute=recompute)
        return block_cost(block, SHAPE.hidden, SHAPE.seq, CLUSTER, layout, is_layer=is_layer)

    none, full = (cost(WORKLOAD.layers[0], each, is_layer=True) for each in ("none", "full"))
    assert full.backward == pytest.approx(none.backward + none.forward)
    for end in (WORKLOAD.embedding, WORKLOAD.end):
        assert cost(end, "full", is_layer=False) == cost(end, "none", is_layer=False)
