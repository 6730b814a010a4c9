"""Predictions beside measurements: what is predicted, and what the errors are over many rows."""

import csv
import statistics
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ClusterError, UserError
from shoal.predict.cost.collectives.network import collective_seconds
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.memory.memory import Memories
from shoal.predict.cost.time.compute import attention_seconds, product_seconds
from shoal.predict.cost.time.step import Costs
from shoal.predict.planner.space import usual_bucket
from shoal.predict.simulate import played_seconds
from shoal.predict.validate.cells import Comparison, accuracy_of
from shoal.predict.validate.predictions import is_fitted, validate
from shoal.predict.validate.steps import machine_of, read_table
from shoal.spec.cluster import Cluster, Device
from shoal.spec.plan.group import Group
from shoal.spec.workload import Attention, workload_of

HEAD = (
    "family,model,layers,hidden,ffn,heads,kv_heads,vocab,seq,gated_mlp,device,devices_per_node,"
    "network_gbps_per_node,num_devices,tp,pp,dp,cp,virtual_stages,microbatch,global_batch,sharding,recompute,"
    "sequence_parallel,precision,attention,step_s,memory_gib\n"
)
SMALL = (
    "one,small,12,1024,4096,16,16,51200,1024,0,A100-80GB,8,1600,8,2,2,2,1,1,{size},32,none,none,0,bf16,flash,"
    "{s},\n"
)


def table(tmp_path, *lines, head=HEAD):
    path = tmp_path / "table.csv"
    path.write_text(head + "".join(lines))
    return path


def errors_of(values):
    return accuracy_of(
        Comparison(
            line=2, family="f", name="n", quantity="step", measured=2.0, predicted=2 + 2 * e, fitted=True
        )
        for e in values
    )


def test_a_step_is_what_the_cost_model_says_of_the_rows_plan_on_the_rows_machine(tmp_path):
    path = table(tmp_path, SMALL.format(size=4, s=0.1))
    (row,) = read_table(path)
    cluster = Cluster.assemble("A100-80GB", 8, 8, 200e9)
    plan = row.plans[0].replace(bucket=usual_bucket(cluster, row.plans[0]))  # no table says how large
    expected = played_seconds(Costs(workload_of(row.shape), cluster), plan, 32)
    (found,) = (each for each in validate(path) if each.quantity == "step")
    assert found.predicted == pytest.approx(expected)
    assert found.measured == 0.1
    assert found.error == pytest.approx(expected / 0.1 - 1)
    assert found.plan == str(plan)


def test_a_blank_setting_takes_the_value_that_is_predicted_quickest(tmp_path):
    sizes = (1, 2, 4, 8, 16)
    path = table(tmp_path, *(SMALL.format(size=size, s=0.1) for size in (*sizes, "")))
    *each, best = (found for found in validate(path) if found.quantity == "step")
    assert best.predicted == pytest.approx(min(found.predicted for found in each))
    assert best.plan == min(each, key=lambda found: found.predicted).plan


def test_a_layers_forward_and_backward_are_those_of_its_block(tmp_path):
    config = "one layer of 22B: h=6144 a=64 s=2048 mbs=4 TP=8 A100-80GB"
    path = table(
        tmp_path, f"selective,7.7,13.2,{config}\n", head="experiment,forward_ms,backward_ms,config\n"
    )
    forward, backward, both = validate(path)
    assert (forward.quantity, backward.quantity, both.quantity) == ("forward", "backward", "layer")
    assert both.measured == pytest.approx(0.0209)
    assert both.predicted == pytest.approx(forward.predicted + backward.predicted)
    plain = table(
        tmp_path, f"baseline,7.7,11.9,{config}\n", head="experiment,forward_ms,backward_ms,config\n"
    )
    assert validate(plain)[1].predicted < backward.predicted


def test_a_collective_is_what_the_network_model_says(tmp_path):
    head = "op,platform,nodes,ranks,size_bytes,time_us,note\n"
    path = table(tmp_path, "all_reduce,DGX A100,1,8,1073741824,8000,\n", head=head)
    (found,) = validate(path)
    cluster = Cluster.preset("dgx-a100", 8)
    assert found.predicted == pytest.approx(collective_seconds("all_reduce", 2**30, Group(8), cluster))


def test_a_device_that_is_not_known_is_named_with_its_line(tmp_path):
    path = table(tmp_path, SMALL.format(size=4, s=0.1).replace("A100-80GB", "Z9000"))
    with pytest.raises(ClusterError, match=r"line 2.*Z9000"):
        validate(path)


def test_memory_alone_is_compared_where_no_step_was_measured(tmp_path):
    both = SMALL.format(size=4, s=0.1).replace("0.1,\n", "0.1,3\n")
    alone = both.replace(",0.1,3", ",,3")
    step, memory, again = validate(table(tmp_path, both, alone))
    assert (step.quantity, memory.quantity) == ("step", "memory")
    assert (again.quantity, again.predicted) == ("memory", memory.predicted)


@pytest.mark.parametrize(("products", "faster"), [("bf16", 1.0), ("fp8", 2.0)])
def test_products_alone_run_at_the_rate_of_what_they_compute_in(tmp_path, products, faster):
    line = SMALL.format(size=4, s=0.1).replace("A100-80GB", "H100-80GB").replace("bf16", products)
    (row,) = read_table(table(tmp_path, line))
    device, plain = machine_of(row).device, Device.preset("h100")
    layout = Layout.of(row.plans[0])
    operations = workload_of(row.shape).layers[0].operations
    attention = next(each for each in operations if isinstance(each, Attention))
    assert attention_seconds(attention, device, layout) == pytest.approx(
        attention_seconds(attention, plain, layout)
    )
    # so many inputs that no depth is lost: what is left is the rate
    size = 2**20
    large = [product_seconds(each, "bf16", size, size, size) for each in (plain, device)]
    sustained = {each: replace(plain, product_depth=0.0).product_rate(each) for each in ("bf16", "fp8")}
    feed = 2 / (1 / 256 + 1 / 128) * plain.fp8_tile_bandwidth * plain.units * plain.sustained
    rates = {"bf16": sustained["bf16"], "fp8": (sustained["fp8"] ** -4 + feed**-4) ** -0.25}
    assert large[0] / large[1] == pytest.approx(rates[products] / rates["bf16"], rel=2e-3)
    assert large[0] / large[1] == pytest.approx(faster, rel=0.15)
    # a tile begins and ends in as many seconds
    assert device.product_depth / device.peak["bf16"] == pytest.approx(
        plain.product_depth / plain.peak["bf16"], rel=1e-3
    )


def test_tf32_is_half_as_quick_as_16_bit_where_devices_have_it_and_else_refused(tmp_path):
    line = SMALL.format(size=4, s=0.1).replace("bf16", "tf32")
    (row,) = read_table(table(tmp_path, line))
    device = machine_of(row).device
    assert device.flops(row.plans[0].precision) == Device.preset("a100-80").peak["bf16"] / 2
    with pytest.raises(ClusterError, match=r"line 2: V100.* tf32"):
        validate(table(tmp_path, line.replace("A100-80GB", "V100-32GB")))


def test_other_rows_are_predicted_where_a_refusal_is_kept(tmp_path):
    small = SMALL.format(size=4, s=0.1)
    path = table(tmp_path, small, small.replace("A100-80GB", "Z9000"), small.replace(",12,", ",x,", 1), small)
    refused = []
    found = validate(path, refused.append)
    assert [each.line for each in found] == [2, 5]
    assert sorted(error.given.partition(":")[0][:6] for error in refused) == ["line 3", "line 4"]


@pytest.mark.parametrize("batch", [8, 64])
@pytest.mark.parametrize("layers", [4, 48])
def test_blank_settings_take_what_is_quickest_of_all_that_fit_as_trying_each_says(tmp_path, batch, layers):
    blanks = SMALL.replace(",8,2,2,2,1,1,{size},32,none,none,0,", f",8,,,,,,,{batch},,,,").replace(
        ",12,1024,4096,", f",{layers},6144,24576,"
    )
    path = table(tmp_path, blanks.format(s=1))
    (row,) = read_table(path)
    costs = Costs(workload_of(row.shape), Cluster.assemble("A100-80GB", 8, 8, 200e9))
    memories = Memories(costs.workload, costs.cluster, costs)
    every = [
        plan.replace(recompute=recompute, bucket=usual_bucket(costs.cluster, plan))
        for plan in row.plans
        for recompute in row.recomputes
    ]
    fitting = [plan for plan in every if memories.fullest(plan, batch).fits(costs.cluster)]
    quickest = min(played_seconds(costs, plan, batch) for plan in fitting or every)
    (found,) = validate(path)
    assert found.predicted == pytest.approx(quickest, rel=1e-12)


def test_devices_that_fill_no_nodes_are_named_with_their_line(tmp_path):
    line = (
        SMALL.format(size=4, s=0.1).replace(",8,2,2,2,1,1,", ",12,2,2,3,1,1,").replace(",32,none", ",36,none")
    )
    with pytest.raises(UserError, match="line 2"):
        validate(table(tmp_path, line))


def test_rows_that_ask_for_the_same_prediction_are_in_the_same_half(tmp_path):
    once, again = read_table(table(tmp_path, SMALL.format(size=4, s=0.1), SMALL.format(size=4, s=0.2)))
    assert is_fitted(once) == is_fitted(again)


def test_the_halves_are_near_to_halves(tmp_path):
    rows = read_table(
        table(
            tmp_path, *(SMALL.format(size=1, s=1).replace(",12,1024,", f",{n},1024,") for n in range(2, 402))
        )
    )
    # of 400 fair draws the standard deviation is 10
    assert 150 < sum(map(is_fitted, rows)) < 250


@given(st.lists(st.floats(-0.9, 5), min_size=1, max_size=40))
def test_errors_are_summed_up_as_numpy_does(values):
    found = errors_of(values)
    absolute = numpy.abs(values)
    assert found.rows == len(values)
    assert found.mean == pytest.approx(absolute.mean(), abs=1e-12)
    assert found.median == pytest.approx(numpy.median(absolute), abs=1e-12)
    assert found.ninth_decile == pytest.approx(numpy.percentile(absolute, 90), abs=1e-12)
    assert found.bias == pytest.approx(statistics.fmean(values), abs=1e-12)


def test_of_no_rows_there_are_no_errors():
    assert errors_of([]) is None


def test_every_published_step_of_the_repository_names_its_source_and_is_predicted():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "published_steps.csv"
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [row for row in rows if "://" not in row["source"]] == []
    assert [each.line for each in validate(path)] == list(range(2, len(rows) + 2))


def test_a_layer_on_a_device_that_is_not_known_does_not_end_the_others(tmp_path):
    config = "one layer of 22B: h=6144 a=64 s=2048 mbs=4 TP=8"
    lines = [f"baseline,7.7,11.9,{config} {device}\n" for device in ("Z9000", "A100-80GB")]
    path = table(tmp_path, *lines, head="experiment,forward_ms,backward_ms,config\n")
    refused = []
    assert {each.line for each in validate(path, refused.append)} == {3}
    assert "line 2" in refused[0].given


def test_memory_decides_how_many_layers_a_fused_program_recomputes_whole(tmp_path):
    line = SMALL.format(size=4, s=1).replace(",12,1024,4096,", ",34,6144,24576,")
    path = table(tmp_path, line.replace(",none,none,0,", ",none,,0,"))
    (row,) = read_table(path)
    costs = Costs(workload_of(row.shape), Cluster.assemble("A100-80GB", 8, 8, 200e9))
    memories = Memories(costs.workload, costs.cluster, costs)
    plan = row.plans[0].replace(bucket=usual_bucket(costs.cluster, row.plans[0]))
    lighter, whole = (plan.replace(recompute=kind) for kind in ("selective", "full"))
    over, under = (memories.fullest(each, 32).peak for each in (lighter, whole))
    limit = costs.cluster.device.memory
    assert under < limit < over
    quick, slow = (played_seconds(costs, each, 32) for each in (lighter, whole))
    (found,) = validate(path)
    assert found.predicted == pytest.approx(quick + (slow - quick) * (over - limit) / (over - under))
    assert "recompute=full" in found.plan
