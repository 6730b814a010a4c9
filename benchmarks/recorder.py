"""What recording costs: time per span with a recorder and with a NullRecorder, and per step.

    python benchmarks/recorder.py

Five rounds, on and off interleaved; median and range. A step has 40 spans, 30 of them in a `with` and 10
opened and closed, as collectives are; formatting and writing them is within the time of the step.

Where there is a GPU, a last row is a step in which it works for 20 ms in 25 spans, until it is done. There a
span has two events on the GPU's stream. Recording may cost 0.2 ms of it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from shoal.record import NullRecorder, Recorder, open_recorder
from shoal.spec.timeline import Kind, Lane

ROUNDS = 5
SPANS = 20_000
STEPS = 500
GPU_STEPS = 100
GROUP = tuple(range(8))
CYCLES = 1_400_000
"""Cycles of a GPU in 0.8 ms, about."""


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


def record_gpu_steps(recorder: Recorder) -> None:
    for index in range(GPU_STEPS):
        with recorder.step(index):
            for _ in range(25):
                # Held steps hold the GPU before forwards, and would be measured too.
                with recorder.span(Kind.OTHER):
                    torch.cuda._sleep(CYCLES)
        torch.cuda.synchronize()


WORK: list[tuple[str, Callable[[Recorder], None], int]] = [
    ("span", record_spans, SPANS),
    ("open and close", record_open_spans, SPANS),
    ("step of 40 spans, written", record_steps, STEPS),
]
GPU_WORK = ("step of 25 spans and 20 ms", record_gpu_steps, GPU_STEPS)


def microseconds(work: Callable[[Recorder], None], recorder: Recorder, count: int) -> float:
    start = time.perf_counter()
    work(recorder)
    elapsed = time.perf_counter() - start
    recorder.close()
    return elapsed / count * 1e6


def main() -> None:
    times: dict[tuple[str, str], list[float]] = {}
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda._sleep(CYCLES)  # the host loads a kernel when it is first started
        torch.cuda.synchronize()
    measured = [(*work, torch.device("cpu")) for work in WORK] + [(*GPU_WORK, device)] * has_gpu
    with tempfile.TemporaryDirectory() as directory:
        for round_index in range(ROUNDS):
            for name, work, count, where in measured:
                path = Path(directory) / f"{round_index} {name}.jsonl"
                recorders = {"on": open_recorder(path, 0, where), "off": NullRecorder()}
                for state, recorder in recorders.items():
                    times.setdefault((name, state), []).append(microseconds(work, recorder, count))
    print(f"{'microseconds for one':<28}{'recording':>10}{'median':>11}  range")
    for (name, state), values in times.items():
        print(f"{name:<28}{state:>10}{median(values):>11.2f}  {min(values):.2f} to {max(values):.2f}")


if __name__ == "__main__":
    main()
