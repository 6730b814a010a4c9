"""What recording costs: time per span with a SpanRecorder and with a NullRecorder, and per step.

    python benchmarks/recorder.py

Five rounds, on and off interleaved; median and range. A step has 40 spans, 30 of them in a `with` and 10
opened and closed, as collectives are; formatting and writing them is within the time of the step.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from shoal.record import NullRecorder, Recorder, SpanRecorder
from shoal.timeline import Kind, Lane

ROUNDS = 5
SPANS = 20_000
STEPS = 500
GROUP = tuple(range(8))


def record_spans(recorder: Recorder) -> None:
    for _ in range(SPANS):
        with recorder.span(Kind.FORWARD):
            pass


def record_open_spans(recorder: Recorder) -> None:
    for _ in range(SPANS):
        recorder.open(
            Kind.COLLECTIVE, "all_reduce:3", lane=Lane.COMMUNICATION, bytes=25 << 20, group=GROUP
        ).close()


def record_steps(recorder: Recorder) -> None:
    for index in range(STEPS):
        with recorder.step(index):
            for _ in range(10):
                for _ in range(3):
                    with recorder.span(Kind.FORWARD):
                        pass
                recorder.open(
                    Kind.COLLECTIVE, "all_reduce:3", lane=Lane.COMMUNICATION, bytes=25 << 20, group=GROUP
                ).close()
    recorder.close()


WORK: list[tuple[str, Callable[[Recorder], None], int]] = [
    ("span", record_spans, SPANS),
    ("open and close", record_open_spans, SPANS),
    ("step of 40 spans, written", record_steps, STEPS),
]


def microseconds(work: Callable[[Recorder], None], recorder: Recorder, count: int) -> float:
    start = time.perf_counter()
    work(recorder)
    elapsed = time.perf_counter() - start
    recorder.close()
    return elapsed / count * 1e6


def main() -> None:
    times: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for round_index in range(ROUNDS):
            for name, work, count in WORK:
                path = Path(directory) / f"{round_index} {name}.jsonl"
                recorders = {"on": SpanRecorder(path, 0), "off": NullRecorder()}
                for state, recorder in recorders.items():
                    times.setdefault((name, state), []).append(microseconds(work, recorder, count))
    print(f"{'microseconds for one':<28}{'recording':>10}{'median':>9}  range")
    for (name, state), values in times.items():
        print(f"{name:<28}{state:>10}{median(values):>9.2f}  {min(values):.2f} to {max(values):.2f}")


if __name__ == "__main__":
    main()
