"""Memory as a run measures it: held to the formulas of shoal/predict/cost, and to plain sums."""

import pytest
import torch
from run_stand_ins import train
from step_memory_stand_ins import measured_in_second_step

from shoal.models import TransformerConfig
from shoal.predict.cost import Memories, memory_of
from shoal.predict.cost.memory import by_piece
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.run import OUTSIDE, Run
from shoal.spec.workload import transformer_shape, workload_of
from shoal.train.config import TrainConfig
from shoal.train.out_of_memory import does_not_fit, is_out_of_memory

SHAPE = TransformerConfig(vocab_size=512, layers=3, hidden=128, heads=4, kv_heads=4, ffn=512, seq=256)
MICROBATCH = 2
WORK = workload_of(transformer_shape(SHAPE.model_dump()).replace(fused_passes=False))

FORMULA = {"rel": 0.1}
"""What benchmarks/memory.py holds the formulas to: operators have tensors of their own, which are small."""


@pytest.mark.parametrize(
    "text",
    [
        "dp=1",
        "dp=1,recompute=full",
        "dp=1,recompute=full:1",
        "dp=2,shard=zero1,precision=bf16",
        "dp=2,shard=zero3",
        "tp=2",
        "cp=2",
    ],
)
def test_memory_is_as_the_formulas_say(ranks, text):
    plan = SettledPlan.of(Plan.parse(text).replace(microbatch=MICROBATCH), Plan.parse(text).dp * MICROBATCH)
    batch = plan.dp * MICROBATCH
    expected = memory_of(WORK, plan, batch)[0]
    pieces = by_piece(Memories(WORK), plan, batch)
    for rank in ranks.run(measured_in_second_step, plan.ranks, text, SHAPE, MICROBATCH):
        assert rank.peak == pytest.approx(expected.peak, **FORMULA)
        assert rank.parts["weights"] == pytest.approx(expected.parts["weights"], rel=1e-3)
        assert rank.parts["optimizer"] == pytest.approx(expected.parts["optimizer"], rel=1e-3)
        assert sum(rank.parts.values()) == rank.peak
        blocks = [unit for unit in rank.units if unit.name != OUTSIDE]
        assert len(blocks) == SHAPE.layers
        for unit, piece in zip(blocks, pieces[1:-1], strict=True):
            assert unit.weights == pytest.approx(piece.states.weights, rel=1e-3)
            assert unit.optimizer == pytest.approx(piece.states.optimizer, rel=1e-3)
            assert unit.activations == pytest.approx(piece.activations, **FORMULA)


@pytest.mark.parametrize(
    "text",
    [
        "dp=4,shard=zero1",
        "dp=2,tp=2,shard=zero3",
        "pp=2,dp=2,schedule=1f1b,microbatch=1",
        "pp=3,microbatch=2,precision=bf16",
        "dp=4,ep=2,shard=zero2",
    ],
)
def test_pieces_sum_to_the_states_of_their_ranks(text):
    shape = transformer_shape(SHAPE.model_dump()).replace(layers=7)
    if "ep=" in text:
        shape = shape.replace(experts=4, expert_ffn=128, experts_per_token=2)
    workload, plan = workload_of(shape), SettledPlan.of(Plan.parse(text), 8)
    pieces = by_piece(Memories(workload), plan, 8)
    for rank in memory_of(workload, plan, 8):
        here = sum(sum(piece.states) for piece in pieces if piece.place == rank.rank)
        assert here == pytest.approx(rank.states)


def test_a_run_measures_its_second_step_on_each_rank(ranks, tiny_run, tmp_path):
    train(
        ranks, [*tiny_run, "--plan", "dp=2,shard=zero1", "--set", "steps=3", "--run", "one"], tmp_path, on=2
    )
    memory = Run.open(tmp_path / "one").memory()
    assert [(each.rank, each.step) for each in memory] == [(0, 2), (1, 2)]
    parameters = Run.open(tmp_path / "one").description["model"]["parameters"]
    for each in memory:
        assert each.parts["weights"] == 4 * parameters
        assert each.resident > each.peak > each.parts["weights"]
    # Adam's moments are cut over both ranks; each parameter also has a count of its steps, of 4 bytes.
    both = sum(each.parts["optimizer"] for each in memory)
    assert 8 * parameters <= both <= 8 * parameters + 4 * 2 * 100


def test_a_run_can_leave_its_memory_unmeasured(ranks, tiny_run, tmp_path):
    train(ranks, [*tiny_run, "--set", "record.memory=false", "--set", "steps=3", "--run", "one"], tmp_path)
    assert Run.open(tmp_path / "one").memory() == []


def test_an_allocation_that_fails_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 50)
    assert is_out_of_memory(failed.value)
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_a_step_without_memory_names_a_plan_that_needs_less():
    config = TrainConfig(model="125m", batch=16, sequence=512)
    plan = SettledPlan.of(Plan.parse("dp=2,microbatch=8"), 16)
    error = does_not_fit(config, plan, None, 1, 3, MemoryError("Cannot allocate 3 GiB\nmore"))
    assert error.given.startswith(
        f"step 3 does not fit in the memory of rank 1, under {plan}: Cannot allocate 3 GiB;"
    )
    assert "the largest part is " in error.given
    proposed = SettledPlan.of(Plan.parse(error.change.split()[3].rstrip(",")), 16)
    shape = workload_of(transformer_shape({**SHAPE.model_dump(), "layers": 12, "hidden": 768}))
    assert max(each.peak for each in memory_of(shape, proposed, 16)) < max(
        each.peak for each in memory_of(shape, plan, 16)
    )
