"""Adapters in a Workload: held against the real model, and against what a step then does and holds."""

import pytest

from shoal.models import add_adapters, build
from shoal.predict.cost import memory_of
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.memory import kept_bytes
from shoal.predict.cost.time import workload_on
from shoal.predict.simulate import simulate
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.workload import from_json, shape, to_json, with_adapters

LAPTOP = Cluster.preset("laptop", 2)
WHOLE = workload_on(LAPTOP, shape("tiny"))


@pytest.mark.parametrize("targets", [["all-linear"], ["query", "value"], ["attention.output", "up", "down"]])
def test_it_has_the_parameters_of_the_real_model(targets):
    pytest.importorskip("peft")
    model = build("tiny", device="meta")
    add_adapters(model, rank=4, alpha=8, targets=targets, dropout=0.0, seed=0)
    found = with_adapters(WHOLE, 4, targets)
    assert found.parameters == sum(each.numel() for each in model.parameters())
    assert found.trained == sum(each.numel() for each in model.parameters() if each.requires_grad)


def test_it_is_read_back_from_its_text():
    found = with_adapters(WHOLE, 4)
    assert from_json(to_json(found)) == found


def test_a_frozen_model_trains_for_two_thirds_of_the_flop():
    found = with_adapters(WHOLE, 1)
    attention = sum(each.flop for piece in WHOLE.pieces for each in piece.attentions)
    products = WHOLE.flop - attention
    adapters = found.flop - WHOLE.flop
    assert found.training_flop == 2 * products + 3 * attention + 3 * adapters


@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3"])
def test_only_gradients_of_adapters_are_sent_and_cut_weights_are_gathered_whole(shard):
    found = with_adapters(WHOLE, 4)
    plan = SettledPlan.of(Plan.parse(f"dp=2,shard={shard}"), 4)
    timeline = simulate(found, LAPTOP, plan, 4).timeline
    sent = {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}
    for span in timeline.spans:
        operation = span.name.partition(":")[0]
        if operation in sent and span.rank == 0 and "bucket" in span.name:
            sent[operation] += span.bytes
    assert sent["all_reduce"] + sent["reduce_scatter"] == 4 * found.trained
    gathered = {"none": 0, "zero1": 4 * found.trained, "zero2": 4 * found.trained}
    assert sent["all_gather"] >= gathered.get(shard, 4 * found.parameters)
    if shard in gathered:
        assert sent["all_gather"] == gathered[shard]


@pytest.mark.parametrize(
    "text", ["dp=2", "dp=2,shard=zero1", "dp=2,shard=zero3", "dp=2,shard=zero3,precision=bf16"]
)
def test_a_frozen_parameter_is_a_weight_alone(text):
    found = with_adapters(WHOLE, 4)
    plan = SettledPlan.of(Plan.parse(text), 2)
    parts = memory_of(found, plan, 2)[0].parts
    cut = 2 if plan.sharding.cuts_weights else 1
    frozen = found.parameters - found.trained
    alone = memory_of(WHOLE, plan, 2)[0].parts["weights"] / WHOLE.parameters * found.trained
    assert parts["weights"] == pytest.approx(frozen * plan.element_bytes / cut + alone)
    assert parts["optimizer"] < 0.1 * memory_of(WHOLE, plan, 2)[0].parts["optimizer"]


def test_dropout_keeps_an_input_and_a_mask_for_each_adapter():
    plain, dropped = (with_adapters(WHOLE, 4, ["query", "value"], share) for share in (0.0, 0.1))
    layout = Layout(1, precision="fp32")
    before, after = (kept_bytes(each.layers[0], each, layout, is_layer=True) for each in (plain, dropped))
    read = WHOLE.length * WHOLE.hidden
    assert after - before == 2 * (4 + 4) * read - 4 * read
