"""The trace for Chrome and Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shoal.spec.timeline import Kind, Lane, Span, Timeline, chrome_trace, write_chrome_trace

TIMELINE = Timeline(
    [
        Span(1, Lane.COMMUNICATION, Kind.COLLECTIVE, "all_reduce:0", 0.25, 0.5, 64, (0, 1)),
        Span(0, Lane.COMPUTE, Kind.STEP, "3", 0.0, 1.0),
        Span(0, Lane.COMPUTE, Kind.FORWARD, "", 0.0, 0.5),
    ]
)


def events(trace: dict, phase: str) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_times_are_in_microseconds_and_ranks_are_processes() -> None:
    [step, forward, collective] = events(chrome_trace(TIMELINE), "X")
    assert (step["name"], step["pid"], step["ts"], step["dur"]) == ("step 3", 0, 0.0, 1e6)
    assert (forward["name"], forward["tid"]) == ("forward", step["tid"])
    assert (collective["pid"], collective["ts"], collective["dur"]) == (1, 250_000.0, 500_000.0)
    assert collective["args"] == {"bytes": 64, "group": [0, 1]}


def test_ranks_and_lanes_are_named() -> None:
    names = {
        (event["pid"], event["name"], event["args"].get("name"))
        for event in events(chrome_trace(TIMELINE), "M")
    }
    assert (0, "process_name", "rank 0") in names
    assert (0, "thread_name", "compute") in names
    assert (1, "thread_name", "communication") in names


def test_the_written_trace_is_the_same_object(tmp_path: Path) -> None:
    write_chrome_trace(TIMELINE, tmp_path / "new" / "trace.json")
    assert json.loads((tmp_path / "new" / "trace.json").read_text()) == chrome_trace(TIMELINE)


def test_an_empty_timeline_gives_a_valid_trace(tmp_path: Path) -> None:
    write_chrome_trace(Timeline([]), tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_rounding_puts_no_span_on_a_further_thread() -> None:
    # 0.1 + 0.2 is a little more than 0.3: the forward span ends just after its step, and after the next one
    # starts.
    timeline = Timeline(
        [
            Span(0, Lane.COMPUTE, Kind.STEP, "0", 0.0, 0.3),
            Span(0, Lane.COMPUTE, Kind.FORWARD, "", 0.1, 0.2),
            Span(0, Lane.COMPUTE, Kind.STEP, "1", 0.3, 0.3),
        ]
    )
    assert {event["tid"] for event in events(chrome_trace(timeline), "X")} == {0}


@given(st.lists(st.tuples(st.sampled_from(Lane), st.integers(0, 20), st.integers(0, 10)), max_size=25))
def test_spans_of_one_thread_nest(drawn: list[tuple[Lane, int, int]]) -> None:
    # Starts in seconds are multiples of 1/8, so that microseconds are exact.
    timeline = Timeline(Span(0, lane, Kind.OTHER, "", start / 8, length / 8) for lane, start, length in drawn)
    threads: dict[int, list[dict]] = defaultdict(list)
    for event in events(chrome_trace(timeline), "X"):
        threads[event["tid"]].append(event)
    assert sum(map(len, threads.values())) == len(drawn)
    for members in threads.values():
        for first in members:
            for second in members:
                start, stop = second["ts"], second["ts"] + second["dur"]
                crosses = first["ts"] < start < first["ts"] + first["dur"] < stop
                assert not crosses
