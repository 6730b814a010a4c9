"""The host that starts a device's operations, and what a Plan's `compile` changes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ClusterError
from shoal.predict.cost import Costs, Layout, Memories
from shoal.predict.cost.time import settled_compile, workload_on
from shoal.predict.cost.time.compute import Stretch, starts_of, waits_of
from shoal.predict.simulate import played_parts, played_seconds
from shoal.predict.validate.programs import Program, program_workload
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import Pass, shape

H100 = Cluster.preset("dgx-h100", 1)
SMALL = shape("125m").replace(seq=1024)


def waits_one_by_one(stretches):
    """Of every piece: it runs when it is started and the one before is done."""
    host = device = busy = 0.0
    for number, starting, running in stretches:
        for _ in range(number):
            host += starting
            device = max(device, host) + running
            busy += running
    return device - busy


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=6))
def test_the_device_waits_as_long_as_pieces_that_are_played_one_by_one(pieces):
    stretches = [Stretch(*each) for each in pieces]
    assert waits_of(stretches) == pytest.approx(waits_one_by_one(stretches), abs=1e-9)


def test_an_eager_step_starts_as_many_kernels_as_were_counted_on_a_gpu():
    """2,152 in a step of the preset 1b. With compiled blocks 552 beside torch.compile's own kernels."""
    workload = program_workload(shape("1b"), Program("none", is_earlier=True))
    started = {
        kind: sum(sum(starts_of(piece, layout_of("microbatch=8,precision=bf16"))) for piece in pieces)
        for kind, pieces in (
            ("none", [piece.under("none") for piece in workload.pieces]),
            ("blocks", list(map(_of_libraries, workload.pieces))),
        )
    }
    assert started["none"] == pytest.approx(2152, rel=0.1)
    assert started["blocks"] == pytest.approx(552, rel=0.01)


def _of_libraries(piece):
    """Products and attention alone."""
    called = tuple(each for each in piece.operations if not isinstance(each, Pass))
    return replace(piece, operations=called, sums=0)


def layout_of(text):
    return Layout.of(SettledPlan.parse(text))


def seconds_of(text, cluster=H100, batch=1, model=SMALL):
    return played_seconds(Costs(workload_on(cluster, model), cluster), SettledPlan.parse(text), batch)


def test_auto_costs_the_quicker_of_eager_and_compiled_blocks():
    eager, blocks, auto = (
        seconds_of(f"microbatch=1,precision=bf16,compile={kind}") for kind in ("none", "blocks", "auto")
    )
    assert auto == blocks < eager
    slow = H100.replace(device=replace(H100.device, graph=0.1))
    assert seconds_of("microbatch=1,precision=bf16", slow) == pytest.approx(
        seconds_of("microbatch=1,precision=bf16,compile=none", slow)
    )


@pytest.mark.parametrize(
    ("cluster", "compile", "expected"),
    [
        (H100, "auto", "blocks"),
        (H100.replace(device=replace(H100.device, graph=0.1)), "auto", "none"),
        (Cluster.preset("laptop", 1), "auto", "none"),
        (H100, "none", "none"),
        (Cluster.preset("laptop", 1), "blocks", "blocks"),
    ],
)
def test_auto_is_settled_by_the_cost_model_on_gpus_and_none_on_cores(cluster, compile, expected):
    plan = SettledPlan(microbatch=1, precision="bf16", compile=compile)
    assert settled_compile(workload_on(cluster, SMALL), cluster, plan) == expected


@pytest.mark.parametrize("text", ["compile=none", "compile=blocks", "compile=none,recompute=full"])
def test_a_step_that_the_host_bounds_takes_as_long_as_its_bound(text):
    plan = SettledPlan.parse(f"microbatch=1,precision=bf16,{text}")
    least = Costs(workload_on(H100, SMALL), H100).least(plan, 4)
    assert seconds_of(str(plan), batch=4) == pytest.approx(least)


def test_a_step_that_the_host_bounds_takes_as_long_whatever_the_micro_batch():
    one, two = (seconds_of(f"microbatch={size},precision=bf16,compile=none", batch=size) for size in (1, 2))
    assert two == pytest.approx(one, rel=0.05)
    assert seconds_of("microbatch=64,precision=bf16,compile=none", batch=64) > 3 * one


def test_the_update_hides_waits_unless_the_program_synchronises_before_it():
    """Then a step takes the longer of the host's and of the device's seconds."""
    plan = SettledPlan(microbatch=1, precision="bf16", compile="none")
    free = workload_on(H100, SMALL)
    layout = Layout.of(plan)
    host = sum(sum(starts_of(piece.under("none"), layout)) for piece in free.pieces) * H100.device.dispatch
    quick = H100.replace(device=replace(H100.device, dispatch=0.0))
    assert host > played_seconds(Costs(free, quick), plan, 1)
    assert played_seconds(Costs(free, H100), plan, 1) == pytest.approx(host)
    assert played_seconds(Costs(replace(free, synchronises=True), H100), plan, 1) > host


def test_compiled_blocks_keep_less_and_their_loss_reads_logits_in_16_bits():
    memories = Memories(workload_on(H100, SMALL), H100)
    eager, blocks = (
        memories.fullest(SettledPlan(microbatch=8, precision="bf16", compile=kind), 8)
        for kind in ("none", "blocks")
    )
    tokens = 8 * 1024
    assert eager.kept - blocks.kept == 12 * 2 * tokens * 2048 + 2 * tokens * 50304
    assert eager.peak > blocks.peak > blocks.held > blocks.allocated


def test_gradients_in_16_bits_halve_what_data_parallel_ranks_send():
    node = Cluster.preset("dgx-h100", 8)
    level = replace(node.levels[0], bandwidth=1e9, setup=0.0, latency=0.0, half_size=0.0)
    slow = node.replace(levels=(level,), device=replace(node.device, contention=0.0))
    costs = Costs(replace(workload_on(slow, shape("1b")), synchronises=True), slow)
    plans = [SettledPlan(dp=8, microbatch=1, precision="bf16", reduce=kind) for kind in ("fp32", "bf16")]
    full, half = (played_parts(costs, plan, 8) for plan in plans)
    assert half["data"] == pytest.approx(full["data"] / 2, rel=0.02)
    assert half["optimizer"] > full["optimizer"]  # the casts


def test_a_device_without_a_type_computes_products_in_the_next_wider_one_and_says_so():
    a100 = Cluster.preset("dgx-a100", 1).device
    assert a100.flops("fp8") == a100.peak["bf16"]
    assert "predicted in bf16" in a100.computes_instead("fp8")
    assert a100.computes_instead("tf32") == ""
    core = Cluster.preset("laptop", 1).device
    assert core.flops("tf32") == core.peak["fp32"]
    with pytest.raises(ClusterError, match=r"the peak of .* in int4 is not known"):
        a100.flops("int4")


def test_products_of_layers_in_8_bits_are_quicker_by_less_than_their_rate_since_operands_are_cast():
    model = shape("llama3-8b").replace(layers=4)
    seconds = {
        kind: seconds_of(f"microbatch=2,precision={kind},compile=blocks", batch=2, model=model)
        for kind in ("fp32", "tf32", "bf16", "fp8")
    }
    assert seconds["fp32"] > seconds["tf32"] > seconds["bf16"] > seconds["fp8"] > seconds["bf16"] / 2
