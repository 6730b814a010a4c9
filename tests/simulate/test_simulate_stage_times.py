"""How long stages work, and which steps of a run are explained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.predict.simulate import measured_timeline, stage_times
from shoal.spec.plan.schedules import Action, Times, Work, make, play
from shoal.spec.run import Run
from shoal.spec.timeline import Kind, Lane, Span, Timeline, explain

MICRO_BATCHES = 4


def pipeline_step(
    index: int, begin: float, ranks: tuple[int, ...], times: Times, name: str = "1f1b"
) -> Iterator[Span]:
    """A step as the schedule, played with these times, would have it recorded."""
    virtual = len(times.forward) // len(ranks)
    schedule = make(name, len(ranks), virtual, MICRO_BATCHES)
    played = play(schedule, times)
    for place, rank in enumerate(ranks):
        yield Span(rank, Lane.COMPUTE, Kind.STEP, str(index), begin, played.makespan)
        for action, start, stop in zip(
            schedule.table[place], played.starts[place], played.stops[place], strict=True
        ):
            kind = Kind.FORWARD if action.work is Work.FORWARD else Kind.BACKWARD
            yield Span(rank, Lane.COMPUTE, kind, str(action), begin + start, stop - start)
    for micro_batch, (sender, receiver) in itertools.product(range(MICRO_BATCHES), itertools.pairwise(ranks)):
        message = f"activation:{Action(Work.FORWARD, 1, micro_batch)}"
        for rank in (sender, receiver):
            yield Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, message, begin, 0.0, 8, (sender, receiver))


def test_each_stage_has_its_own_times_and_ranks() -> None:
    times = Times((1.0, 3.0), (0.5, 2.0), (0.5, 1.0), (0.0,))
    spans = [
        span
        for index in range(3)
        for ranks in ((0, 2), (1, 3))  # dp=2: two pipelines
        for span in pipeline_step(index, 100.0 * index, ranks, times)
    ]
    first, last = stage_times(Timeline(spans))
    assert (first.stage, first.ranks, last.stage, last.ranks) == (0, (0, 1), 1, (2, 3))
    assert (first.forward, first.backward, last.forward, last.backward) == pytest.approx((1, 1, 3, 3))
    assert first.input is first.weight is None
    assert first.step == pytest.approx(MICRO_BATCHES * (1 + 1))
    assert last.step == pytest.approx(MICRO_BATCHES * (3 + 3))


def test_halves_of_a_backward_are_told_apart() -> None:
    times = Times.equal(4, forward=1.0, input=0.75, weight=0.25)
    found = stage_times(Timeline(pipeline_step(0, 0.0, (0, 1), times, "zb-v")))
    assert [stage.ranks for stage in found] == [(0,), (1,), (1,), (0,)]  # a V
    for stage in found:
        assert stage.backward is None
        assert (stage.forward, stage.input, stage.weight) == pytest.approx((1, 0.75, 0.25))


def test_without_a_pipeline_there_are_no_stages() -> None:
    spans = [
        Span(0, Lane.COMPUTE, Kind.STEP, "0", 0.0, 1.0),
        Span(0, Lane.COMPUTE, Kind.FORWARD, "", 0.0, 1.0),
    ]
    assert stage_times(Timeline(spans)) == ()


@pytest.fixture
def changed(tmp_path: Path) -> Run:
    """A run of two steps under dp=2,pp=2 and, after a crash in the third, of steps 2 to 4 under pp=2."""
    times = Times.equal(2, forward=1.0, input=0.5, weight=0.5)
    spans = [
        *(span for ranks in ((0, 2), (1, 3)) for span in pipeline_step(1, 0.0, ranks, times)),
        *(span for ranks in ((0, 2), (1, 3)) for span in pipeline_step(2, 100.0, ranks, times)),
        *(span for index in (2, 3, 4) for span in pipeline_step(index, 100.0 + 100 * index, (0, 1), times)),
    ]
    run = Run.create(tmp_path / "run", {"since_step": 2})
    Timeline(spans).write(run.timeline)
    return run


def test_a_run_that_goes_on_under_another_plan_is_explained_from_there_on(changed: Run) -> None:
    timeline = measured_timeline(changed)
    assert timeline.ranks == (0, 1)
    assert timeline.steps() == (2, 3, 4)
    breakdown = explain(timeline)
    # The ideal step of 1F1B: (p - 1)(F + B) of (p - 1 + m)(F + B) are bubble.
    assert breakdown.parts.bubble / breakdown.parts.wall == pytest.approx(1 / (1 + MICRO_BATCHES))
    assert [stage.ranks for stage in stage_times(timeline)] == [(0,), (1,)]


def test_a_step_that_was_never_finished_leaves_nothing_to_explain(changed: Run) -> None:
    changed.describe({"since_step": 5})
    assert len(measured_timeline(changed)) == 0
    changed.describe({"since_step": None})
    assert measured_timeline(changed).ranks == (0, 1, 2, 3)
