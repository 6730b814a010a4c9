"""Exposed communication as Shoal reports it, beside Holistic Trace Analysis (HTA) on the same steps.

    python benchmarks/exposed.py drawn [--draws 60]    # drawn traces of GPUs in the profiler's form
    python benchmarks/exposed.py run RUN               # the timeline of a run, written in that form

`drawn` writes traces as PyTorch's profiler does on GPUs, one a rank: two streams of compute, two of NCCL and
one of copies, with gaps between kernels, overlaps of every kind, late ranks, waits for data, and
communication that the whole step waits for. Both tools read the same files. `run` writes the timeline of a
run of `shoal train` as such traces, so that HTA measures it too.

Exposed communication is a share of the time, in percent; the difference is in points. HTA's share is its
communication that its `get_comm_comp_overlap` finds not overlapped, of its kernel time. It does not know
when ranks arrive, so Shoal's straggler wait and its bubble, which are exposed communication of which more is
known, count with it.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from shoal.analyze.foreign import read_foreign
from shoal.predict.simulate import measured_timeline
from shoal.spec.run import Run
from shoal.spec.timeline import Kind, Lane, Parts, Timeline, explain
from shoal.spec.timeline.breakdown import WORK, blocked_in
from shoal.spec.timeline.intervals import subtract, union

__all__ = ["drawn_traces", "hta_shares", "shoal_shares", "write_as_traces"]

Kernel = tuple[int, str, float, float, dict[str, Any]]
"""Stream, name, start and duration in microseconds, and arguments."""

_COMPUTE, _SECOND, _COPIES, _DATA, _TENSOR = 7, 9, 13, 20, 24  # streams
_STEPS = 6
_FIRST = 100_000
"""The first correlation: HTA with pandas 3 fails where all of a small trace fit into a byte."""
_TARGET = 2.0  # points


def drawn_traces(folder: Path, seed: int) -> int:
    """Write the traces of a drawn training, one for each rank; return the number of ranks."""
    draw = random.Random(seed)
    ranks = draw.choice((1, 2, 4, 8))
    shape = {
        "layers": draw.randint(2, 12),
        "kernels": draw.randint(2, 8),
        "kernel": draw.uniform(15, 400),
        "gap": draw.choice((0.0, 0.5, 1.5, 4.0, 20.0)),
        "bucket": draw.uniform(50, 3000),
        "tensor": draw.choice((0.0, 0.0, draw.uniform(20, 300))),
        "second": draw.random() < 0.4,
        "copies": draw.random() < 0.5,
        "load": draw.choice((0.0, 0.0, draw.uniform(200, 3000))),
        "late": draw.choice((0.0, draw.uniform(0, 2000))),
        "clip": draw.random() < 0.5,
    }
    kernels: dict[int, list[Kernel]] = {rank: [] for rank in range(ranks)}
    steps: list[tuple[float, float]] = []
    now = 0.0
    for _ in range(_STEPS):
        stop = _draw_step(draw, shape, now, kernels)
        steps.append((now, stop))
        now = stop
    for rank, found in kernels.items():
        _write_trace(folder / f"rank-{rank}.json.gz", rank, ranks, found, steps, shape["load"])
    return ranks


def _draw_step(
    draw: random.Random, shape: Mapping[str, Any], begin: float, kernels: Mapping[int, list[Kernel]]
) -> float:
    """Add the kernels of a step of all ranks; return when it ends."""
    group = list(kernels)
    at = dict.fromkeys(kernels, begin + shape["load"])  # when the stream of compute is free
    at[draw.choice(group)] += shape["late"]
    sending = dict.fromkeys((_DATA, _TENSOR), 0.0)

    def compute(rank: int, name: str, share: float = 1.0) -> None:
        for _ in range(shape["kernels"]):
            duration = shape["kernel"] * share * draw.lognormvariate(0, 0.5)
            kernels[rank].append((_COMPUTE, name, at[rank], duration, {}))
            if shape["second"] and draw.random() < 0.3:
                beside = duration * draw.uniform(0.2, 1.5)
                kernels[rank].append(
                    (_SECOND, "elementwise", at[rank] + duration * draw.random(), beside, {})
                )
            if shape["copies"] and draw.random() < 0.1:
                kernels[rank].append((_COPIES, "Memcpy HtoD", at[rank], duration * draw.random(), {}))
            at[rank] += duration + shape["gap"] * draw.expovariate(1.0)

    def communicate(stream: int, name: str, seconds: float, *, blocks: bool) -> None:
        """NCCL's kernels begin when a rank comes and end together, after the last has come."""
        starts = {rank: max(at[rank], sending[stream]) for rank in kernels}
        stop = max(starts.values()) + seconds * draw.lognormvariate(0, 0.3)
        for rank, start in starts.items():
            told = {
                "Collective name": name,
                "In msg nelems": 1 << 20,
                "dtype": "Float",
                "Process Group Ranks": json.dumps(group),
            }
            end = stop + draw.uniform(0, 3)
            kernels[rank].append((stream, f"ncclDevKernel_{name}_RING_LL", start, end - start, told))
            if blocks:
                at[rank] = end + shape["gap"] * draw.random()
        sending[stream] = stop + 3

    for phase, share in (("forward", 1.0), ("backward", 2.0)):
        for _ in range(shape["layers"]):
            for rank in kernels:
                compute(rank, phase, share)
            if shape["tensor"]:
                communicate(_TENSOR, "AllReduce", shape["tensor"], blocks=True)
            if phase == "backward" and draw.random() < 0.6:
                communicate(_DATA, "ReduceScatter", shape["bucket"], blocks=False)
    communicate(_DATA, "AllReduce", shape["bucket"], blocks=False)
    for rank in kernels:  # the optimizer waits for the gradients
        at[rank] = max(at[rank], sending[_DATA])
    if shape["clip"]:
        communicate(_DATA, "AllReduce", 12.0, blocks=True)
    for rank in kernels:
        compute(rank, "optimizer", 0.3)
    return max(at.values())


def _write_trace(
    path: Path,
    rank: int,
    ranks: int,
    kernels: Sequence[Kernel],
    steps: Sequence[tuple[float, float]],
    load: float,
) -> None:
    """Write a trace as PyTorch's profiler does; the host launches each kernel 5 us before it begins."""
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, start: float, duration: float, thread: int, **args: Any) -> None:
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0 if category == "kernel" else 1, "tid": thread}
            | {"ts": round(start + 1e6, 3), "dur": round(duration, 3), "args": args}
        )

    for index, (start, stop) in enumerate(steps):
        add("user_annotation", f"ProfilerStep#{index}", start, stop - start, 1)
        if load:
            add("user_annotation", "enumerate(DataLoader)#_Iter.__next__", start, load, 1)
    ordered = sorted(kernels, key=lambda each: each[2])
    for number, (stream, name, start, duration, args) in enumerate(ordered, start=_FIRST):
        launch = "cudaMemcpyAsync" if name.startswith("Memcpy") else "cudaLaunchKernel"
        add("cuda_runtime", launch, max(start - 5.0, steps[0][0]), 1.0, 1, correlation=number)
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        add(
            category,
            name,
            start,
            duration,
            stream,
            stream=stream,
            correlation=number,
            device=rank,
            **args,
        )
    trace = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "traceEvents": events,
    }
    with gzip.open(path, "wt", compresslevel=1) as file:
        json.dump(trace, file)


def write_as_traces(timeline: Timeline, folder: Path) -> None:
    """Write a measured timeline as traces of GPUs: compute, and communication that may overlap it."""
    for rank in timeline.ranks:
        spans = list(timeline.of(rank))
        steps = sorted((span.start, span.stop) for span in spans if span.kind == Kind.STEP)
        first, last = steps[0][0], steps[-1][1]
        blocked = blocked_in(spans)
        working = union(
            (span.start, span.stop) for span in spans if span.lane == Lane.COMPUTE and span.kind in WORK
        )
        sending = union(
            [*blocked, *((span.start, span.stop) for span in spans if span.lane == Lane.COMMUNICATION)]
        )
        kernels: list[Kernel] = [
            (stream, name, (start - first) * 1e6, (stop - start) * 1e6, {})
            for stream, name, moments in (
                (_COMPUTE, "gemm", subtract(working, blocked)),
                (_DATA, "ncclDevKernel_AllReduce_RING_LL", sending),
            )
            for start, stop in moments
            if first <= start and stop <= last
        ]
        bounds = [((start - first) * 1e6, (stop - first) * 1e6) for start, stop in steps]
        _write_trace(folder / f"rank-{rank}.json.gz", rank, len(timeline.ranks), kernels, bounds, 0.0)


def hta_shares(folder: Path) -> dict[int, float]:
    """Return the exposed communication of each rank as HTA finds it, in percent of its kernel time."""
    try:
        from hta.trace_analysis import TraceAnalysis
        from hta.utils.utils import KernelType, get_kernel_type, merge_kernel_intervals
    except ImportError as error:
        sys.exit(f"needs HolisticTraceAnalysis: pip install -r benchmarks/requirements.txt ({error})")
    logging.getLogger("hta").setLevel(logging.ERROR)
    files = {int(path.name.split("-")[1].split(".")[0]): str(path) for path in folder.glob("rank-*.json.gz")}
    with contextlib.redirect_stdout(io.StringIO()):
        analysis = TraceAnalysis(trace_files=files, trace_dir="", include_last_profiler_step=True)
        overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
        breakdown = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    symbols = analysis.t.symbol_table.get_sym_table()
    shares = {}
    for rank, trace in analysis.t.traces.items():
        kernels = trace[trace["stream"].ne(-1)].copy()
        kinds = kernels["name"].map(lambda name: get_kernel_type(symbols[name]))
        merged = merge_kernel_intervals(kernels[kinds == KernelType.COMMUNICATION.name].copy())
        communication = float((merged["end"] - merged["ts"]).sum())
        exposed = communication * (1 - overlap.loc[rank, "comp_comm_overlap_pctg"] / 100)
        shares[int(rank)] = 100 * exposed / float(breakdown.loc[rank, "kernel_time(us)"])
    return shares


def shoal_shares(timeline: Timeline) -> dict[int, float]:
    """Return the exposed communication of each rank as Shoal finds it, in percent of its steps."""

    def exposed(parts: Parts) -> float:
        return parts.exposed_communication + parts.straggler_wait + parts.bubble

    return {
        each.rank: 100
        * sum(exposed(parts) for parts in each.steps.values())
        / sum(parts.wall for parts in each.steps.values())
        for each in explain(timeline).ranks
    }


def off_sum(timeline: Timeline) -> float:
    """Return by how much the parts of a step differ from its wall time, in percent, at most."""
    steps = [parts for each in explain(timeline).ranks for parts in each.steps.values()]
    return max(100 * abs(sum(each.disjoint().values()) / each.wall - 1) for each in steps)


def _compared(folders: Iterator[tuple[str, Path, Callable[[], Timeline]]]) -> None:
    differences: list[float] = []
    shares: list[float] = []
    off = 0.0
    for name, folder, read in folders:
        timeline = read()
        ours, theirs = shoal_shares(timeline), hta_shares(folder)
        off = max(off, off_sum(timeline))
        for rank, share in sorted(theirs.items()):
            differences.append(ours[rank] - share)
            shares.append(share)
            if abs(differences[-1]) > _TARGET:
                print(f"{name}, rank {rank}: Shoal {ours[rank]:.2f} %, HTA {share:.2f} %", file=sys.stderr)
    sizes = sorted(abs(each) for each in differences)
    within = sum(each <= _TARGET for each in sizes)
    print(
        f"{len(sizes)} timelines of ranks; exposed communication by HTA {min(shares):.1f} to "
        f"{max(shares):.1f} %, mean {fmean(shares):.1f} %\n"
        f"difference in points: mean {fmean(differences):+.3f}, median size {sizes[len(sizes) // 2]:.3f}, "
        f"largest {sizes[-1]:.3f}; {within} of {len(sizes)} within {_TARGET:g}\n"
        f"parts sum to the wall time within {off:.2g} %"
    )


def _drawn(draws: int, seed: int) -> Iterator[tuple[str, Path, Callable[[], Timeline]]]:
    for number in range(seed, seed + draws):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            drawn_traces(folder, number)
            yield f"draw {number}", folder, lambda folder=folder: read_foreign(folder)


def _of_run(path: Path) -> Iterator[tuple[str, Path, Callable[[], Timeline]]]:
    timeline = measured_timeline(Run.open(path))
    with tempfile.TemporaryDirectory() as name:
        write_as_traces(timeline, Path(name))
        yield str(path), Path(name), lambda: timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    drawn = commands.add_parser("drawn", help="compare on drawn traces of GPUs")
    drawn.add_argument("--draws", type=int, default=60)
    drawn.add_argument("--seed", type=int, default=0)
    recorded = commands.add_parser("run", help="compare on a run")
    recorded.add_argument("path", type=Path)
    args = parser.parse_args()
    _compared(_drawn(args.draws, args.seed) if args.command == "drawn" else _of_run(args.path))


if __name__ == "__main__":
    main()
