"""Runs for the pages: written as the recorder writes them, with known times."""

from shoal.spec.run import metrics_line
from shoal.spec.timeline.span import header_line, span_line

GROUP = (0, 1)
LATE = 0.02
"""Seconds by which rank 1 comes later to each collective."""
SECOND = 1_000_000_000

DESCRIPTION = {
    "name": "tiny",
    "created": "2026-01-31T09:05:07+00:00",
    "plan": "dp=2",
    "world_size": 2,
    "model": {"name": "tiny", "parameters": 1_200_000, "flops_per_token": 7.2e6},
    "device": {"type": "cpu", "peak_flops": 1e12},
    "config": {
        "steps": 40,
        "batch": 8,
        "sequence": 128,
        "model": "tiny",
        "checkpoint": {"every": 10, "mtbf": 24.0},
    },
}


def step_lines(rank, index, start, name="bucket 0"):
    """The lines of a step of 0.3 s: forward, backward with an all-reduce of 1 MiB, optimizer."""
    ready, end = start + 0.15 + LATE * rank, start + 0.25
    return [
        span_line("forward", "compute", "", start, 0.1, 0, ()),
        span_line("wait", "compute", f"all_reduce:{name}", ready, end - ready, 0, (), "", "data"),
        span_line(
            "collective",
            "communication",
            f"all_reduce:{name}",
            ready,
            end - ready,
            1 << 20,
            GROUP,
            "ring",
            "data",
        ),
        span_line("backward", "compute", "", start + 0.1, end - start - 0.1, 0, ()),
        span_line("optimizer", "compute", "", end, 0.05, 0, ()),
        span_line("step", "compute", str(index), start, 0.3, 0, ()),
    ]


def write_timeline(run, steps, *, name="bucket 0", origin=1_700_000_000 * SECOND):
    for rank in GROUP:
        with run.timeline_file(rank).open("a") as file:
            file.write(header_line(rank, origin))
            for number, index in enumerate(steps):
                file.writelines(step_lines(rank, index, number * 0.31, name))


def write_metrics(run, steps):
    with run.metrics_file.open("a") as file:
        for step in steps:
            values = {"loss": 5.0 - step / 20, "tokens_per_second": 1000.0, "step_seconds": 0.3}
            file.write(metrics_line(step, values))
