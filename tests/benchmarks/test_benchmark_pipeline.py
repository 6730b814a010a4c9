"""What the contestants of benchmarks/pipeline.py compute, what its tables say, what its formulas count."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from pipeline import balance_row, entries, flop_times, played_row
from pipeline_memory import Sizes, held_by_table, measure_held, sizes_of
from pipeline_played import played_steps
from pipeline_step import MODELS, TORCH_SCHEDULES, PipelineTask, TorchStage, alone, shoal_step, torch_step
from rounds import Burst

from shoal.models import TransformerConfig
from shoal.parallel.pipeline.pieces import cut_pieces
from shoal.spec.plan import Plan
from shoal.spec.plan.schedules import NAMES, Times, Work, make, play
from shoal.spec.timeline import Kind, Lane, Span, Timeline

STEPS, SEQ, MICRO_BATCHES = 3, 16, 8
SHAPE = TransformerConfig(
    vocab_size=61, layers=4, hidden=32, heads=4, kv_heads=4, ffn=48, seq=SEQ, tie_embeddings=False
)


class SmallTask(PipelineTask):
    """On tokens of its own."""

    def batches(self, rank):
        generator = torch.Generator().manual_seed(1)
        while True:
            tokens = torch.randint(SHAPE.vocab_size, (self.batch, SEQ + 1), generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]


@pytest.fixture
def task(tmp_path):
    return SmallTask("even", SEQ, MICRO_BATCHES, 1, tmp_path, MICRO_BATCHES, SHAPE)


MAKERS = {"shoal": shoal_step, "torch": torch_step}


def losses(maker, plan, task):
    torch.manual_seed(0)
    step = MAKERS[maker](plan, task, dist.get_rank())
    return [step() for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("maker", "schedule"),
    [*(("torch", name) for name in TORCH_SCHEDULES), ("shoal", "1f1b"), ("shoal", "zb-v")],
)
def test_a_step_has_the_losses_of_one_rank(ranks, task, maker, schedule):
    by_rank = ranks.run(losses, 2, maker, f"pp={{ranks}},schedule={schedule}", task)
    step = alone(task, 0)
    expected = [step() for _ in range(STEPS)]
    mean = [sum(each) / 2 for each in zip(*by_rank, strict=True)]
    # fp32 sums in another order, over a few steps of AdamW
    assert mean == pytest.approx(expected, rel=1e-5)


def test_the_stages_of_torch_are_the_model_in_pieces(task):
    model = task.model()
    tokens, _ = next(task.batches(0))
    expected = model(tokens)
    hidden = tokens
    for pieces in cut_pieces(model, Plan(pp=2, split="1-3")).ranges:
        hidden = TorchStage(model, pieces)(hidden)
    assert torch.equal(hidden, expected)


def test_every_schedule_is_beside_torchs():
    assert set(TORCH_SCHEDULES) == set(NAMES)
    found = [entry.contestant for entry in entries(["1f1b", "zb-v"])]
    names = {each.name for each in found}
    assert len(names) == len(found) == 6
    assert {each.peer for each in found} - names == {"one rank"}


# -- measured steps beside their tables -----------------------------------------------------------------


def recorded(schedule, times, *, late=0.0, waits=True):
    """The spans of a step that went as the table says, but for a last action that came so much later.

    With `waits` ranks wait for messages between actions; else they do something that is not recorded.
    """
    played = play(schedule, times)
    spans = []
    for rank, row in enumerate(schedule.table):
        spans.append(Span(rank, Lane.COMPUTE, Kind.STEP, "0", 0.0, 100.0))
        before = None
        for action, start in zip(row, played.starts[rank], strict=True):
            kind = Kind.FORWARD if action.work is Work.FORWARD else Kind.BACKWARD
            begins = start + (late if action == row[-1] else 0.0)
            if waits and before is not None and begins > before:
                spans.append(Span(rank, Lane.COMPUTE, Kind.WAIT, f"for {action}", before, begins - before))
            spans.append(Span(rank, Lane.COMPUTE, kind, str(action), begins, times.of(action)))
            before = begins + times.of(action)
    return Timeline(spans), played


@pytest.mark.parametrize("schedule", NAMES)
def test_a_step_that_went_by_its_table_departs_by_nothing(schedule):
    table = make(schedule, 2, 2 if schedule not in ("gpipe", "1f1b", "zb-h1") else 1, 8)
    stages = table.stages
    times = Times(
        tuple(1.0 + stage / 8 for stage in range(stages)),
        tuple(1.5 - stage / 8 for stage in range(stages)),
        (1.25,) * stages,
        (0.0,) * (stages - 1),
    )
    timeline, played = recorded(table, times)
    (step,) = played_steps(timeline, table)
    assert step.ratio == pytest.approx(1)
    assert step.bubble == pytest.approx(played.bubble)
    assert step.played.bubble == pytest.approx(played.bubble)
    assert step.unequal_bubble == pytest.approx(played.bubble)
    assert step.between == pytest.approx(0)


def test_what_a_rank_does_between_actions_is_no_bubble():
    table = make("interleaved", 2, 2, 4)
    timeline, played = recorded(table, Times.equal(4), waits=False)
    (step,) = played_steps(timeline, table)
    assert step.bubble + step.between == pytest.approx(played.bubble)
    assert step.between > 0


def test_what_is_late_shows_in_the_ratio_and_in_the_bubble():
    table = make("1f1b", 2, 1, 4)
    timeline, played = recorded(table, Times.equal(2), late=3.0)
    (step,) = played_steps(timeline, table)
    assert step.ratio == pytest.approx((played.makespan + 3) / played.makespan)
    assert step.bubble > played.bubble
    assert step.whole == 100


def test_a_message_takes_from_when_both_ends_began_it():
    table = make("gpipe", 2, 1, 1)
    timeline, _ = recorded(table, Times.equal(2))

    def message(rank, start, stop):
        return Span(
            rank, Lane.COMMUNICATION, Kind.COLLECTIVE, "activation:1F0", start, stop - start, 8, (0, 1)
        )

    spans = [*timeline, message(0, 1.0, 1.75), message(1, 0.25, 1.5)]
    (step,) = played_steps(Timeline(spans), table)
    assert step.played.times.transfer == (0.5,)
    assert played_row("ours", [step])[-2:] == ["500000", f"{(100 - step.seconds) * 1e3:.1f}"]


# -- balance --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [name for name in MODELS if name != "even"])
def test_the_uneven_models_gain_by_the_split_by_cost(tmp_path, model):
    task = PipelineTask(model, SEQ, MICRO_BATCHES, 1, tmp_path, MICRO_BATCHES)
    table = make("1f1b", 2, 1, MICRO_BATCHES)
    by_count, by_cost = (
        play(table, flop_times(task, Plan(pp=2, split=split))).makespan for split in ("count", "cost")
    )
    assert by_count > 1.15 * by_cost
    names = ("split=count", "split=cost")
    bursts = {name: [Burst([seconds], [2.0], 1)] for name, seconds in zip(names, (3.0, 2.0), strict=True)}
    steps = {name: played_steps(recorded(table, Times.equal(2))[0], table) for name in names}
    row = balance_row(task, bursts, steps, 2)
    assert row[1:6] == ["3000.0", "2000.0", "1.500", "1.500 to 1.500", "1.000"]
    assert row[6] == f"{by_count / by_cost:.3f}"


# -- memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_without_messages_the_table_holds_its_peak_of_activations(schedule):
    plan = Plan(pp=4, schedule=schedule)
    table = plan.schedule_for(8)
    sizes = Sizes((1.0,) * plan.stages, (1.0,) * plan.stages, 0.0)
    for rank in range(4):
        assert held_by_table(table, rank, sizes) == table.peak_activations(rank)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_a_rank_holds_what_the_table_says(ranks, schedule):
    plan = Plan(pp=2, schedule=schedule)
    shape = SHAPE.model_copy(update={"hidden": 64, "ffn": 256, "seq": 64})
    tokens = torch.zeros(4, shape.seq + 1, dtype=torch.long)
    sizes = sizes_of(shape, plan, 1)
    for rank, held in enumerate(ranks.run(measure_held, 2, str(plan), shape, tokens, 4)):
        # what a layer keeps beside the formula's tensors, such as the random generator's state of attention
        assert held.after_forward == pytest.approx(held_by_table(plan.schedule_for(4), rank, sizes), rel=0.05)
        assert held.peak > held.after_forward


def test_a_task_keeps_its_micro_batches_in_another_folder(task, tmp_path):
    assert replace(task, folder=tmp_path / "other").micro_batches == MICRO_BATCHES
