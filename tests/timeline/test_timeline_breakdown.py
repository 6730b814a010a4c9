"""The breakdown, against a reference that asks of each moment what it was."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.spec.timeline import Kind, Lane, Span, Timeline, explain

COMPUTE_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER)
PARTS = ("compute", "exposed_communication", "bubble", "data_wait", "file_wait", "straggler_wait", "other")
HORIZON = 40


def step(rank: int, index: int, start: float, stop: float) -> Span:
    return Span(rank, Lane.COMPUTE, Kind.STEP, str(index), start, stop - start)


def compute(rank: int, kind: Kind, start: float, stop: float, name: str = "") -> Span:
    return Span(rank, Lane.COMPUTE, kind, name, start, stop - start)


def collective(
    rank: int, start: float, stop: float, name: str = "all_reduce:0", bytes: int = 0, group=(0, 1)
) -> Span:
    return Span(rank, Lane.COMMUNICATION, Kind.COLLECTIVE, name, start, stop - start, bytes, group)


# --- the reference -------------------------------------------------------------------------------------


def naive_parts(timeline: Timeline, rank: int, index: int) -> dict[str, int]:
    """Counts the moments 0.5, 1.5, ... of a step by what they are; spans have whole bounds."""
    window = timeline.step(rank, index)
    assert window is not None
    counts = dict.fromkeys([*PARTS, "communication", "overlapped_communication"], 0)
    completions = [
        (span, complete)
        for span, complete in naive_completions(timeline, rank)
        if span.start < window.stop and (span.stop > window.start or span.start >= window.start)
    ]
    names = {span.name for span, _ in completions}
    for cell in range(int(window.start), int(window.stop)):
        here = [s for s in timeline.of(rank) if s.start <= cell < s.stop]
        on_compute = {s.kind for s in here if s.lane == Lane.COMPUTE}
        blocked = bool(on_compute & {Kind.WAIT, Kind.COLLECTIVE})
        busy = bool(on_compute & set(COMPUTE_KINDS)) and not blocked
        communicates = blocked or any(s.lane == Lane.COMMUNICATION for s in here)
        counts["communication"] += communicates
        if Kind.FILE_WAIT in on_compute and not blocked:
            part = "file_wait"
        elif busy:
            part = "compute"
        elif Kind.DATA_WAIT in on_compute:
            part = "data_wait"
        elif Kind.BUBBLE in on_compute:
            part = "bubble"
        elif communicates:
            waits = [s for s in here if s.lane == Lane.COMPUTE and s.kind in (Kind.WAIT, Kind.COLLECTIVE)]
            meant = {s.name for s in waits} & names or names
            late = any(s.start <= cell < complete and s.name in meant for s, complete in completions)
            part = "straggler_wait" if late else "exposed_communication"
        else:
            part = "other"
        counts[part] += 1
        counts["overlapped_communication"] += communicates and part in ("compute", "data_wait", "file_wait")
    return counts


def naive_completions(timeline: Timeline, rank: int) -> list[tuple[Span, float]]:
    """The collectives of a rank that start in a step, and when the last member of each was there."""
    return [
        (span, max([span.start, *(min(other.start, span.stop) for other in naive_members(timeline, span))]))
        for span in timeline.of(rank)
        if span.kind == Kind.COLLECTIVE and naive_step(timeline, span) is not None
    ]


def naive_members(timeline: Timeline, span: Span) -> list[Span]:
    """The spans of all members of a collective; none if one is missing or ran the step another time."""
    index = naive_step(timeline, span)
    windows = [timeline.step(member, index) for member in span.group]
    if not windows or None in windows:
        return []
    if max(window.start for window in windows) >= min(window.stop for window in windows):
        return []
    occurrence = naive_alike(timeline, span, span.rank).index(span)
    alike = [naive_alike(timeline, span, member) for member in timeline.ranks]
    found = [spans[occurrence] for spans in alike if len(spans) > occurrence]
    return found if sorted(other.rank for other in found) == sorted(span.group) else []


def naive_alike(timeline: Timeline, span: Span, rank: int) -> list[Span]:
    """The collectives of a rank with the step, group and name of the span."""
    index = naive_step(timeline, span)
    return [
        other
        for other in timeline.of(rank)
        if other.kind == Kind.COLLECTIVE
        and (other.group, other.name) == (span.group, span.name)
        and naive_step(timeline, other) == index
    ]


def naive_step(timeline: Timeline, span: Span) -> int | None:
    for index in timeline.steps():
        window = timeline.step(span.rank, index)
        if window is not None and window.start <= span.start < window.stop:
            return index
    return None


@st.composite
def whole_timelines(draw: st.DrawFn) -> Timeline:
    """Up to three ranks, steps and gaps of any size, spans of any kind anywhere; all bounds whole."""
    spans: list[Span] = []
    for rank in range(draw(st.integers(1, 3))):
        bounds = sorted(draw(st.sets(st.integers(0, HORIZON), min_size=2, max_size=6)))
        pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
        spans += [step(rank, index, start, stop) for index, (start, stop) in enumerate(pairs)]
        for _ in range(draw(st.integers(0, 10))):
            # As many collectives as all else, so that some of them match.
            others = st.sampled_from([kind for kind in Kind if kind != Kind.STEP])
            kind = draw(st.just(Kind.COLLECTIVE) | others)
            lane = draw(st.sampled_from(Lane))
            start, duration = draw(st.integers(0, HORIZON)), draw(st.integers(0, 15))
            group = draw(st.sampled_from([(), (0,), (0, 1), (0, 1, 2)]))
            name = draw(st.sampled_from(["all_reduce:0", "all_reduce:1", "all_gather"]))
            # Bytes tell apart spans that are otherwise the same.
            spans.append(Span(rank, lane, kind, name, start, duration, len(spans), group))
    return Timeline(spans)


@given(whole_timelines())
@settings(max_examples=200, deadline=None)
def test_each_part_is_the_number_of_moments_that_are_it(timeline: Timeline) -> None:
    for rank in explain(timeline).ranks:
        for index, parts in rank.steps.items():
            reference = naive_parts(timeline, rank.rank, index)
            assert {name: getattr(parts, name) or 0 for name in reference} == reference


@given(whole_timelines())
@settings(max_examples=200, deadline=None)
def test_the_collectives_of_an_average_step_are_those_that_start_in_the_counted_ones(
    timeline: Timeline,
) -> None:
    for rank in explain(timeline).ranks:
        started = [
            (span, complete)
            for span, complete in naive_completions(timeline, rank.rank)
            if naive_step(timeline, span) in rank.counted
        ]
        steps = len(rank.counted)
        assert rank.parts.bytes * steps == pytest.approx(sum(span.bytes for span, _ in started))
        assert set(rank.collectives) == {span.name.split(":")[0] for span, _ in started}
        for operation, figures in rank.collectives.items():
            members = [(s, complete) for s, complete in started if s.name.split(":")[0] == operation]
            assert figures.count * steps == pytest.approx(len(members))
            assert figures.bytes * steps == pytest.approx(sum(span.bytes for span, _ in members))
            assert figures.seconds * steps == pytest.approx(sum(span.duration for span, _ in members))
            assert figures.transfer_seconds * steps == pytest.approx(
                sum(span.stop - complete for span, complete in members)
            )


bounded = st.floats(0, 10, allow_subnormal=False)


@given(st.lists(st.tuples(st.sampled_from(Kind), st.sampled_from(Lane), bounded, bounded), max_size=30))
@settings(deadline=None)
def test_the_parts_sum_to_the_wall_time(spans: list[tuple[Kind, Lane, float, float]]) -> None:
    inside = [
        Span(0, lane, kind, "x", start, duration, 0, (0,))
        for kind, lane, start, duration in spans
        if kind != Kind.STEP
    ]
    breakdown = explain(Timeline([step(0, 0, 1.0, 9.0), *inside]))
    # Sums of some sixty differences of doubles up to 20: each is off by at most 20 * 2**-52.
    assert math.isclose(sum(breakdown.parts.disjoint().values()), breakdown.parts.wall, abs_tol=1e-12)


# --- each definition, by example -----------------------------------------------------------------------


def test_communication_under_backward_is_overlapped_and_the_rest_exposed() -> None:
    timeline = Timeline(
        [
            step(0, 0, 0, 10),
            compute(0, Kind.FORWARD, 0, 3),
            compute(0, Kind.BACKWARD, 3, 7),
            collective(0, 5, 9, group=(0,)),
            compute(0, Kind.WAIT, 7, 9),
            compute(0, Kind.OPTIMIZER, 9, 10),
        ]
    )
    parts = explain(timeline).parts
    assert (parts.compute, parts.exposed_communication, parts.other) == (8, 2, 0)
    assert (parts.communication, parts.overlapped_communication) == (4, 2)


def test_a_wait_inside_a_compute_span_is_not_compute() -> None:
    timeline = Timeline(
        [step(0, 0, 0, 10), compute(0, Kind.FORWARD, 0, 10), compute(0, Kind.WAIT, 4, 6)],
    )
    parts = explain(timeline).parts
    assert (parts.compute, parts.exposed_communication) == (8, 2)


def test_a_wait_for_files_is_a_part_of_its_own_and_only_there_if_there_is_one() -> None:
    spans = [step(0, 0, 0, 10), compute(0, Kind.BACKWARD, 0, 10), collective(0, 5, 9, group=(0,))]
    assert "file_wait" not in explain(Timeline(spans)).parts.disjoint()
    parts = explain(Timeline([*spans, compute(0, Kind.FILE_WAIT, 4, 6)])).parts
    assert (parts.compute, parts.file_wait, parts.exposed_communication) == (8, 2, 0)
    assert parts.overlapped_communication == 4


def test_waiting_for_a_late_rank_is_straggler_wait_of_the_early_one_only() -> None:
    timeline = Timeline(
        [
            step(0, 0, 0, 10),
            compute(0, Kind.FORWARD, 0, 4),
            collective(0, 4, 10, bytes=300),
            step(1, 0, 0, 10),
            compute(1, Kind.FORWARD, 0, 7),
            collective(1, 7, 10, bytes=300),
        ]
    )
    breakdown = explain(timeline)
    early, late = breakdown.of(0), breakdown.of(1)
    assert (early.parts.straggler_wait, early.parts.exposed_communication) == (3, 3)
    assert (late.parts.straggler_wait, late.parts.exposed_communication) == (0, 3)
    assert breakdown.parts.straggler_wait == 1.5
    # Both ranks move 300 bytes in the 3 s in which both are there.
    assert breakdown.collectives["all_reduce"].algbw == 100
    assert breakdown.collectives["all_reduce"].seconds == 4.5


def test_collectives_of_one_name_are_matched_in_their_order() -> None:
    timeline = Timeline(
        [
            step(0, 0, 0, 20),
            collective(0, 0, 4),
            collective(0, 10, 14),
            step(1, 0, 0, 20),
            collective(1, 1, 4),
            collective(1, 12, 14),
        ]
    )
    assert explain(timeline).of(0).parts.straggler_wait == 1 + 2


def test_a_send_that_ends_before_its_receive_waits_no_longer_than_it_lasts() -> None:
    timeline = Timeline(
        [
            step(0, 0, 0, 20),
            collective(0, 0, 2, "send"),
            collective(0, 3, 5, "barrier", group=(0,)),
            step(1, 0, 0, 20),
            collective(1, 8, 10, "send"),
        ]
    )
    sender = explain(timeline).of(0)
    assert (sender.parts.straggler_wait, sender.parts.exposed_communication) == (2, 2)
    assert sender.collectives["send"].transfer_seconds == 0


def test_a_wait_is_not_laid_to_a_message_that_is_merely_under_way() -> None:
    timeline = Timeline(
        [
            step(0, 0, 0, 10),
            compute(0, Kind.FORWARD, 0, 8),
            collective(0, 0, 10, "activation:F1"),  # asked for at once, sent at 9
            collective(0, 2, 6, "all_reduce:row", group=(0, 2)),
            compute(0, Kind.WAIT, 2, 6, "all_reduce:row"),
            step(1, 0, 0, 10),
            collective(1, 9, 10, "activation:F1"),
            step(2, 0, 0, 10),
            collective(2, 3, 6, "all_reduce:row", group=(0, 2)),
        ]
    )
    parts = explain(timeline).of(0).parts
    assert (parts.compute, parts.straggler_wait, parts.exposed_communication) == (4, 1 + 1, 3 + 1)


def test_no_straggler_is_named_while_a_member_is_missing() -> None:
    timeline = Timeline(
        [
            step(0, 0, 0, 10),
            collective(0, 4, 10, group=(0, 1, 2)),
            step(1, 0, 0, 10),
            collective(1, 7, 10, group=(0, 1, 2)),
        ]
    )
    parts = explain(timeline).of(0).parts
    assert (parts.straggler_wait, parts.exposed_communication) == (0, 6)


def test_a_step_from_before_a_crash_is_not_matched_with_one_from_after() -> None:
    timeline = Timeline(
        [step(0, 0, 0, 10), collective(0, 4, 10), step(1, 0, 500, 510), collective(1, 505, 510)]
    )
    assert explain(timeline).parts.straggler_wait == 0


def test_the_last_run_of_a_repeated_step_counts() -> None:
    timeline = Timeline([step(0, 0, 0, 10), step(0, 1, 10, 20), step(0, 1, 100, 103)])
    assert {index: parts.wall for index, parts in explain(timeline).of(0).steps.items()} == {0: 10, 1: 3}


def test_operations_are_grouped_by_the_name_before_the_colon() -> None:
    timeline = Timeline(
        [
            step(0, 0, 0, 10),
            collective(0, 1, 3, "all_reduce:0", 10, (0,)),
            collective(0, 2, 5, "all_reduce:1", 20, (0,)),
            collective(0, 6, 7, "barrier", 0, (0,)),
        ]
    )
    collectives = explain(timeline).collectives
    assert sorted(collectives) == ["all_reduce", "barrier"]
    all_reduce = collectives["all_reduce"]
    assert (all_reduce.count, all_reduce.bytes) == (2, 30)
    assert (all_reduce.seconds, all_reduce.exposed_seconds, all_reduce.algbw) == (5, 4, 6)
    assert collectives["barrier"].algbw == 0


def test_averages_leave_out_warm_up_and_outliers_and_still_sum_to_the_wall_time() -> None:
    walls = [90.0, 50.0, 10.0, 11.0, 12.0, 13.0, 14.0, 70.0, 10.5, 12.5]
    starts = [100.0 * index for index in range(len(walls))]
    steps = [step(0, index, starts[index], starts[index] + wall) for index, wall in enumerate(walls)]
    forwards = [compute(0, Kind.FORWARD, start, start + 8) for start in starts]
    rank = explain(Timeline(steps + forwards)).of(0)
    # After warm-up, by wall time: 10, 10.5, [11, 12, 12.5, 13], 14, 70.
    assert rank.counted == (3, 4, 5, 9)
    assert rank.parts.wall == pytest.approx(12.125)
    assert rank.parts.compute == pytest.approx(8)
    assert sum(rank.parts.disjoint().values()) == pytest.approx(rank.parts.wall)


def test_few_steps_are_all_counted() -> None:
    timeline = Timeline([step(0, index, 10 * index, 10 * index + 5) for index in range(3)])
    assert explain(timeline).of(0).counted == (0, 1, 2)


def test_a_timeline_without_a_finished_step_cannot_be_explained() -> None:
    with pytest.raises(ShoalError, match="no finished step"):
        explain(Timeline([compute(0, Kind.FORWARD, 0, 1)]))
