"""Recompute in some of the blocks: memory and seconds between those of none and of all, block by block."""

import pytest

from shoal.predict.cost import Costs, Memories
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.memory.activations import kept_bytes
from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import ModelShape, workload_of

WORKLOAD = workload_of(ModelShape(layers=8, hidden=512, ffn=2048, heads=8, vocab=1024, seq=256))
CLUSTER = Cluster.preset("laptop", 4)


@pytest.mark.parametrize("plan", ["dp=4,shard=zero1", "dp=2,pp=2", "dp=1,tp=2,pp=2,schedule=zb-v"])
@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("number", [2, 4, 8])
def test_each_recomputed_block_keeps_less_and_takes_longer(plan, policy, number):
    none = SettledPlan.of(SettledPlan.parse(f"{plan},microbatch=1,split=count"), 16)
    some, every = (none.replace(recompute=text) for text in (f"{policy}:{number}", policy))
    costs = Costs(WORKLOAD, CLUSTER)
    count = none.microbatches_of(16)
    for place in range(none.pp):
        kept, mixed, again = (costs.stages(each, count)[place] for each in (none, some, every))
        layers = 8 // none.pp
        share = some.recomputed.count(8 // none.stages, 8) * (none.stages // none.pp) / layers
        assert mixed.forward == pytest.approx(kept.forward)
        assert mixed.input == pytest.approx(kept.input + share * (again.input - kept.input))
    memories = Memories(WORKLOAD, CLUSTER)
    peaks = [memories.fullest(each, 16).parts["activations"] for each in (none, some, every)]
    assert peaks == sorted(peaks, reverse=True)
    seconds = [simulate(WORKLOAD, CLUSTER, each, 16).seconds for each in (none, some, every)]
    assert seconds == sorted(seconds)
    if number == 8:
        assert (peaks[1], seconds[1]) == (peaks[2], seconds[2])


def test_the_peak_of_activations_is_what_both_kinds_of_blocks_keep():
    some = SettledPlan.parse("dp=1,microbatch=4,recompute=full:3")
    found = Memories(WORKLOAD).fullest(some, 4)
    kept, again = (
        kept_bytes(WORKLOAD.layers[0], WORKLOAD, Layout.of(plan), is_layer=True)
        for plan in (some.replace(recompute="none"), some)
    )
    ends = Memories(WORKLOAD).fullest(some.replace(recompute="none"), 4).kept - 8 * kept
    assert found.kept == pytest.approx(ends + 5 * kept + 3 * again)
