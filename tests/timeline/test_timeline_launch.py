"""Spans of a device: their lane of the host, and the time in which the device idles for the host."""

from __future__ import annotations

from pathlib import Path

from shoal.spec.timeline import Kind, Lane, Parts, Span, Timeline, chrome_trace, explain
from shoal.spec.timeline.span import header_line


def given(kind: Kind, start: float, stop: float, host: tuple[float, float], name: str = "") -> Span:
    """Work that the device did from start to stop, and that the host gave it between two other times."""
    return Span(0, Lane.COMPUTE, kind, name, start, stop - start, host=host)


def held(forward: float, *more: Span) -> list[Span]:
    """A held step, far behind the others, whose forward takes some seconds."""
    return [
        given(Kind.HELD_STEP, 900, 980, (900, 910), "9"),
        given(Kind.FORWARD, 920, 920 + forward, (900, 908)),
        *more,
    ]


def parts_of(*spans: Span) -> Parts:
    """The parts of step 1."""
    return explain(Timeline(spans)).of(0).steps[1]


def test_a_gap_is_launch_until_the_host_gives_the_next_span() -> None:
    parts = parts_of(
        given(Kind.STEP, 0, 30, (0, 25), "1"),
        given(Kind.FORWARD, 2, 10, (2, 4)),
        given(Kind.BACKWARD, 15, 20, (13, 14)),  # for 2 s the device had it, and did something else
    )
    assert (parts.launch, parts.other, parts.compute) == (2 + 3 + 5, 2 + 5, 8 + 5)


def test_work_is_launch_as_far_as_it_took_longer_than_when_held() -> None:
    step = given(Kind.STEP, 0, 10, (0, 10), "1")
    slow = given(Kind.FORWARD, 0, 10, (0, 10))
    assert parts_of(step, slow, *held(4)).launch == 6
    assert parts_of(step, slow, *held(12)).launch == 0
    assert parts_of(step, slow).launch == 0  # no step was held: it is not known
    several = held(
        4, given(Kind.HELD_STEP, 1900, 1990, (0, 0), "90"), given(Kind.FORWARD, 1900, 1908, (0, 0))
    )
    assert parts_of(step, slow, *several).launch == 4  # beside the median


def test_after_the_host_has_given_all_of_a_span_nothing_is_launch() -> None:
    step = given(Kind.STEP, 0, 10, (0, 3), "1")
    assert parts_of(step, given(Kind.FORWARD, 0, 10, (0, 3)), *held(4)).launch == 3
    assert parts_of(step, given(Kind.FORWARD, 0, 10, (-5, -1)), *held(4)).launch == 0


def test_waits_are_neither_work_nor_launch() -> None:
    def wait(start: float, wait: float = 2) -> list[Span]:
        """A collective of 2 s, and a wait that is as long or longer."""
        return [
            Span(0, Lane.COMMUNICATION, Kind.COLLECTIVE, "all_reduce:0", start, 2),
            given(Kind.WAIT, start, start + wait, (start, start + wait), "all_reduce:0"),
        ]

    step, forward = given(Kind.STEP, 0, 10, (0, 10), "1"), given(Kind.FORWARD, 0, 10, (0, 10))
    parts = parts_of(step, forward, *wait(5), *held(4))
    assert (parts.compute, parts.launch, parts.exposed_communication) == (4, 4, 2)
    parts = parts_of(step, forward, *wait(5), *held(6, *wait(921)))
    assert (parts.compute, parts.launch, parts.exposed_communication) == (4, 4, 2)
    # A wait that ends later than the collective: the host had not given its end.
    parts = parts_of(step, forward, *wait(5, wait=3), *held(4))
    assert (parts.compute, parts.launch, parts.exposed_communication) == (4, 4, 2)


def test_spans_of_a_kind_are_matched_in_their_order() -> None:
    parts = parts_of(
        given(Kind.STEP, 0, 20, (0, 20), "1"),
        given(Kind.FORWARD, 0, 10, (0, 10)),
        given(Kind.FORWARD, 10, 20, (10, 20)),
        *held(4, given(Kind.FORWARD, 930, 937, (0, 0))),
    )
    assert parts.launch == (10 - 4) + (10 - 7)


def test_a_held_step_is_no_step() -> None:
    timeline = Timeline([given(Kind.STEP, 0, 10, (0, 10), "1"), *held(4)])
    assert timeline.steps() == (1,)
    assert explain(timeline).of(0).counted == (1,)


def test_times_of_the_host_are_kept_in_files_and_moved_with_their_origin(tmp_path: Path) -> None:
    written = Timeline([given(Kind.FORWARD, 2.5, 3.5, (1.25, 1.75))], origin_unix_ns=5_000_000_000)
    written.write(tmp_path)
    assert Timeline.read(tmp_path).spans == written.spans
    (tmp_path / "rank-00001.jsonl").write_text(header_line(1, 3_000_000_000))
    (span,) = Timeline.read(tmp_path)
    assert (span.start, span.host) == (4.5, (3.25, 3.75))


def test_a_trace_has_a_lane_of_the_host_where_there_is_a_device() -> None:
    trace = chrome_trace(Timeline([given(Kind.FORWARD, 2.5, 3.5, (1.25, 1.75))]))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    times = {names[event["tid"]]: (event["ts"], event["dur"]) for event in trace if event["ph"] == "X"}
    assert times == {"compute": (2.5e6, 1e6), "host": (1.25e6, 0.5e6)}
    trace = chrome_trace(Timeline([Span(0, Lane.COMPUTE, Kind.FORWARD, "", 0, 1)]))["traceEvents"]
    assert "host" not in {event["args"].get("name") for event in trace}
