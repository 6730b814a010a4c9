"""Memory of a rank: held against measured tables, published formulas, schedules' tables and plain sums."""

import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.memory.activations import block_memory, every_second_product
from shoal.predict.cost.memory.memory import Memories, activation_peaks, memory_of, state_bytes
from shoal.predict.cost.memory.smallest_fit import smallest_fit, too_large
from shoal.spec.cluster import Cluster, Device, Level
from shoal.spec.plan import SHARDINGS, Plan, SettledPlan
from shoal.spec.plan.schedules import NAMES, Work, make
from shoal.spec.workload import (
    Block,
    Keep,
    ModelShape,
    Parameters,
    Part,
    Saved,
    compilable_workload_of,
    workload_of,
)

GIB = 2**30
SMALL = ModelShape(layers=8, hidden=64, ffn=256, heads=4, vocab=128, seq=32)


def cluster_of(memory, devices=8, reserved=0.0):
    peak = {"bf16": 1e14, "fp32": 1e13}
    device = Device(name="device", memory=memory, bandwidth=1e12, peak=peak, units=100)
    level = Level(name="link", devices=devices, bandwidth=1e11)
    return Cluster(name="machine", device=device, levels=(level,), reserved=reserved)


# Measured: benchmarks/memory.md

DENSE = ModelShape(
    layers=4, hidden=256, ffn=1024, heads=4, vocab=1024, seq=512, is_own=True, fused_passes=False
)
MODELS = {
    "": (DENSE, False),
    "experts": (DENSE.replace(experts=8, expert_ffn=256, experts_per_token=2), False),
    "gloo": (DENSE, True),
}


def measured_rows():
    """Plan, model, and MiB of states, kept and peak, of each row of the table."""
    table = (Path(__file__).parents[2] / "benchmarks/memory.md").read_text("utf-8")
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 12 and cells[1] in ("none", "selective", "full"):
            model, _, text = cells[0].rpartition(": ")
            yield (
                f"{text},recompute={cells[1]},microbatch=2",
                model,
                *(float(cells[each]) for each in (2, 5, 8)),
            )


def test_rows_that_were_measured_are_met():
    """To a tenth of a percent what is counted, to 6 % the peaks, which are off by less than 1 % in the mean.

    States are padded to buckets. Experts got unequal numbers of rows, so what is kept is to a percent and
    peaks are to 8 %. Peaks hold what operators make on the way.
    """
    models = {name: Memories(workload_of(shape), copies=copies) for name, (shape, copies) in MODELS.items()}
    errors = []
    for text, model, states, kept, peak in measured_rows():
        plan = Plan.parse(text)
        (found,) = models[model].of(plan, 2 * plan.dp)
        assert found.states / 2**20 == pytest.approx(states, rel=1e-3), text
        exact = 0.01 if model == "experts" else 1e-3
        assert found.kept / 2**20 == pytest.approx(kept, rel=exact, abs=0.005), text  # the table's rounding
        assert found.peak / 2**20 == pytest.approx(peak, rel=0.08 if model == "experts" else 0.06), text
        errors.append(abs(found.peak / 2**20 / peak - 1))
    assert len(errors) == 93
    assert sum(errors) / len(errors) < 0.01


# Published

TITAN = ModelShape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, seq=8192)


@pytest.mark.parametrize(("devices", "measured"), [(8, (82.4, 77.0)), (128, (67.0, 62.0))])
def test_what_torchtitan_reserves_for_llama_3_8b_is_met_within_8_percent(devices, measured):
    """Eager and compiled; docs of torchtitan, December 2024."""
    plan = SettledPlan(dp=devices, shard="zero3", recompute="selective", precision="bf16", microbatch=2)
    memories = Memories(every_second_product(workload_of(TITAN)), cluster_of(96 * GIB, 8, reserved=GIB))
    found = memories.fullest(plan, 2 * devices)
    assert [found.held / GIB] * 2 == pytest.approx(measured, rel=0.08)


def test_blocks_that_run_eager_make_every_second_product_again_too():
    layer = every_second_product(compilable_workload_of(TITAN)).layers[0]
    assert (layer.remade, layer.under("none").remade) == (0.5, 0.5)
    assert layer.under("none") is not layer


def test_to_make_every_second_product_again_changes_nothing_of_what_is_kept_without_recompute():
    layout = Layout(2, recompute="none")
    kept = [
        block_memory(each.layers[0], each, layout, is_layer=True).kept
        for each in (workload_of(TITAN), every_second_product(workload_of(TITAN)))
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("layout", "fused", "formula"),
    [
        (Layout(3, recompute="none"), False, lambda s, h, a, t: 34 + 5 * a * s / h),
        (Layout(3, recompute="none"), True, lambda s, h, a, t: 34),
        (Layout(3, tp=4, tensor="plain"), False, lambda s, h, a, t: 10 + 24 / t + 5 * a * s / (h * t)),
        (Layout(3, tp=4), False, lambda s, h, a, t: (34 + 5 * a * s / h) / t),
        (Layout(3, tp=4), True, lambda s, h, a, t: 34 / t),
        (Layout(3, recompute="full"), False, lambda s, h, a, t: 2),
    ],
)
def test_a_layer_of_a_gpt_keeps_what_korthikanti_et_al_count(layout, fused, formula):
    """arXiv:2205.05198; but for means and deviations of norms, and log-sum-exp, which they leave out."""
    seq, hidden, heads = 2048, 4096, 32
    workload = workload_of(
        ModelShape(
            layers=1, hidden=hidden, ffn=4 * hidden, heads=heads, vocab=1000, seq=seq, gated=False,
            rotary=False, biases=True, dropout=True, fused_attention=fused,
        )
    )  # fmt: skip
    found = block_memory(workload.layers[0], workload, layout, is_layer=True).kept
    assert found == pytest.approx(seq * 3 * hidden * formula(seq, hidden, heads, layout.tp), rel=0.005)


@pytest.mark.parametrize(
    ("shard", "fp32", "bf16"),
    [
        ("none", lambda d: 16, lambda d: 18),
        ("zero1", lambda d: 8 + 8 / d, lambda d: 6 + 12 / d),
        ("zero3-once", lambda d: 4 + 12 / d, lambda d: 4 + 12 / d),
        ("zero2", lambda d: 4 + 12 / d, lambda d: 2 + 16 / d),
        ("zero3", lambda d: 16 / d, lambda d: 16 / d),
    ],
)
def test_states_of_a_parameter_are_those_of_the_documentation(shard, fp32, bf16):
    for ranks in (2, 8, 64):
        for precision, formula in (("fp32", fp32), ("bf16", bf16)):
            plan = Plan(dp=ranks, shard=shard, precision=precision)
            assert state_bytes(plan, ranks) == pytest.approx(formula(ranks))


# Pipelines


def numbers():
    """Of each schedule, for a few ranks, virtual stages and micro-batches that it takes."""
    for name, ranks, virtual, count in itertools.product(NAMES, (2, 3, 4), (1, 2, 3), (1, 2, 6, 8, 12, 24)):
        try:
            yield make(name, ranks, virtual, count)
        except PlanError:
            continue


def weighed(table, rank, whole, half):
    """The most after a forward, going through a rank's row with bytes by stage."""
    held = most = 0.0
    for action in table.table[rank]:
        stage = action.stage
        held += {
            Work.FORWARD: whole[stage],
            Work.BACKWARD: -whole[stage],
            Work.INPUT: half[stage] - whole[stage],
            Work.WEIGHT: -half[stage],
        }[action.work]
        most = max(most, held)
    return most


def test_ranks_hold_what_the_tables_of_the_schedules_say():
    checked = set()
    for table in numbers():
        found = activation_peaks(table.name, table.ranks, table.virtual, table.microbatches)
        for rank in range(table.ranks):
            for whole, half in ((3.0, 2.0), (3.0, 0.0), (1.0, 1.0)):
                stages = table.stages_of(rank)
                by_stage = [dict.fromkeys(stages, each) for each in (whole, half)]
                sums = [whole * sum(held.whole) + half * sum(held.halves) for held in found[rank]]
                assert max(sums) == pytest.approx(weighed(table, rank, *by_stage)), (table.name, rank)
        checked.add(table.name)
    assert checked == set(NAMES)


@settings(deadline=None)
@given(
    st.sampled_from(["zb-v", "dualpipe-v"]),
    st.integers(1, 9),
    st.integers(1, 40),
    st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_schedules_in_a_v_hold_what_their_tables_say_whatever_their_stages_keep(name, ranks, count, kept):
    if name == "dualpipe-v":
        count = max(count, 2 * ranks)
    table = make(name, ranks, 2, count)
    for rank, moments in enumerate(activation_peaks(name, ranks, 2, count)):
        whole = dict(zip(table.stages_of(rank), kept, strict=True))
        found = max(sum(map(math.prod, zip(held.whole, kept, strict=True))) for held in moments)
        assert found == weighed(table, rank, whole, whole)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 6))
def test_interleaved_holds_what_its_table_says(ranks, virtual, rounds):
    if virtual == 1:
        table = make("1f1b", ranks, 1, rounds * ranks)
    else:
        table = make("interleaved", ranks, virtual, rounds * ranks)
    for rank, (held,) in enumerate(activation_peaks(table.name, ranks, virtual, table.microbatches)):
        assert held.whole == tuple(table.held_by_stage[stage] for stage in table.stages_of(rank))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 5), st.integers(0, 5))
def test_zb_h1_holds_what_its_table_says(ranks, count, whole, half):
    half = min(whole, half)
    table = make("zb-h1", ranks, 1, count)
    for rank, (held,) in enumerate(activation_peaks("zb-h1", ranks, 1, count)):
        found = whole * held.whole[0] + half * held.halves[0]
        assert found == weighed(table, rank, {rank: whole}, {rank: half})


def test_by_stage_too_ranks_hold_what_the_table_of_interleaved_says():
    for table in numbers():
        if table.name in ("1f1b", "interleaved"):
            found = activation_peaks(table.name, table.ranks, table.virtual, table.microbatches)
            for rank in range(table.ranks):
                expected = tuple(table.held_by_stage[stage] for stage in table.stages_of(rank))
                assert found[rank][0].whole == expected


def test_a_searched_schedule_holds_what_it_was_allowed():
    (held,) = activation_peaks("search", 4, 2, 16, 6)[0]
    assert sum(held.whole) == 6


def test_the_first_rank_of_1f1b_holds_most_activations_and_gpipe_holds_those_of_all():
    workload = workload_of(SMALL)
    plan = SettledPlan(pp=4, microbatch=1, split="count", schedule="1f1b")
    kept = [rank.kept for rank in memory_of(workload, plan, 16)]
    assert kept[:3] == sorted(kept[:3], reverse=True)
    all_of_them = [rank.kept for rank in memory_of(workload, plan.replace(schedule="gpipe"), 16)]
    assert all_of_them[0] == pytest.approx(kept[0] * 16 / 4)


def test_a_tied_embedding_counts_on_both_ranks_that_have_it():
    shape = SMALL.replace(tied=True)
    plan = SettledPlan(pp=2, microbatch=1, split="count")
    apart, together = (
        memory_of(workload_of(shape), plan.replace(schedule=name), 8) for name in ("1f1b", "zb-v")
    )
    table = 16 * shape.vocab * shape.hidden
    assert sum(rank.states for rank in apart) - sum(rank.states for rank in together) == pytest.approx(table)


# Plans


@st.composite
def plans(draw):
    def one_of(*values):
        return draw(st.sampled_from(values))

    schedule = one_of("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "looped-bfs")
    shard = one_of(*SHARDINGS)
    return SettledPlan(
        dp=one_of(1, 2, 4),
        tp=one_of(1, 2, 4),
        pp=one_of(1, 2, 4),
        cp=one_of(1, 2),
        shard=shard,
        tensor=one_of("sequence", "plain"),
        context=one_of("ring", "ulysses"),
        schedule=schedule,
        split=one_of("count", "cost"),
        microbatch=one_of(1, 2),
        recompute=one_of("none", "selective", "full"),
        precision=one_of("fp32", "bf16"),
    )


@given(plans(), st.booleans())
def test_the_fullest_rank_is_the_highest_of_all(plan, on_cluster):
    workload, batch = workload_of(SMALL), plan.dp * 16
    memories = Memories(workload, cluster_of(GIB) if on_cluster else None)
    found, every = memories.fullest(plan, batch), memories.of(plan, batch)
    assert [rank.rank for rank in every] == list(range(plan.pp))
    assert found.peak == pytest.approx(max(rank.peak for rank in every))
    assert found.peak == pytest.approx(memory_of(workload, plan, batch, memories.cluster)[found.rank].peak)


@given(plans())
def test_no_part_is_below_zero_and_states_add_up_to_those_of_the_model(plan):
    workload = workload_of(SMALL)
    found = memory_of(workload, plan, plan.dp * 16)
    assert all(part >= 0 for rank in found for part in rank.parts.values())
    whole = sum(each.parameters.whole for each in workload.pieces)
    divided = sum(each.parameters.divided for each in workload.pieces)
    states = state_bytes(plan, plan.shards * plan.cp) * (whole + divided / plan.tp)
    assert sum(rank.states for rank in found) == pytest.approx(states)


@given(plans())
def test_recompute_and_sharding_never_take_more(plan):
    """Of what is kept, and of states; for a moment a gathered block may."""
    workload = workload_of(SMALL)
    batch = plan.dp * 16

    def most(field, **changes):
        return max(getattr(rank, field) for rank in memory_of(workload, plan.replace(**changes), batch))

    kept = [most("kept", recompute=each, shard="none") for each in ("full", "selective", "none")]
    assert kept == sorted(kept)
    for more_and_more in (("zero3", "zero2", "zero1", "none"), ("zero3", "zero3-once", "zero1")):
        states = [most("states", shard=each) for each in more_and_more]
        assert states == sorted(states)


def test_any_module_s_saved_tensors_count_as_they_are_listed():
    """Such as those of a traced module, of which only names and sizes are known."""
    block = Block("layer", (), Parameters(whole=10), (Saved("x", 100.0, Part.WHOLE, Keep.REST),))
    workload = workload_of(SMALL)
    layout = Layout(4, cp=2, tp=2, precision="bf16")
    assert block_memory(block, workload, layout, is_layer=True).kept == 100 * 4 / 2 * 2


# Room


def test_a_rank_that_does_not_fit_is_told_by_how_much_and_for_what():
    workload = workload_of(TITAN)
    cluster = cluster_of(80 * GIB, reserved=GIB)
    (rank,) = memory_of(workload, SettledPlan(precision="bf16", microbatch=1), 1, cluster)
    assert not rank.fits(cluster)
    text = too_large(rank, cluster)
    needed, more = (float(each) for each in re.findall(r"([\d.]+)GiB", text)[:2])
    assert needed - more == pytest.approx(80, abs=0.2)
    assert f"largest part is {rank.largest}" in text
    assert rank.largest == "optimizer"


def test_a_margin_is_left_free():
    workload = workload_of(SMALL)
    (rank,) = memory_of(workload, SettledPlan(microbatch=1), 1, cluster_of(GIB))
    tight = cluster_of(rank.peak * 1.05)
    assert rank.fits(tight)
    assert not rank.fits(tight, margin=0.1)
    assert "with 10% left free" in too_large(rank, tight, margin=0.1)


def test_the_smallest_fit_holds_the_states_and_half_of_it_does_not():
    workload = workload_of(TITAN)
    cluster = cluster_of(24 * GIB)
    found = smallest_fit(workload, cluster, 64)
    assert found is not None
    assert found.plan.ranks == found.devices
    assert found.memory.fits(cluster)
    states = 16 * workload.parameters
    assert states < found.devices * 24 * GIB < 4 * states
    assert smallest_fit(workload, cluster_of(48 * GIB), 64).devices < found.devices


def test_no_number_of_devices_fits_what_one_layer_does_not():
    assert smallest_fit(workload_of(TITAN), cluster_of(1e8), 1) is None
