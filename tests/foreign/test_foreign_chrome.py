"""Traces of PyTorch's profiler: parts of a step are those that were put in, and torn traces are named."""

import gzip
import json
import tracemalloc

import pytest
import torch

from shoal.analyze.foreign import read_foreign
from shoal.analyze.foreign.chrome import events_of
from shoal.errors import RunError
from shoal.spec.timeline import Kind, explain

MS = 1e-3


def event(category, name, start, duration, thread=1, **args):
    """Times in milliseconds."""
    times = {"ts": start * 1e3, "dur": duration * 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, **times, "args": args}


def gzip_file(path, text):
    path.write_bytes(gzip.compress(text))


def gpu_trace(rank, late=0.0, steps=4):
    """Steps of 100 ms: 5 load, 20 forward, 40 backward, all-reduce until 90 (10 hidden), 5 optimizer."""
    events, number = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "x"}}], 0
    for step in range(steps):
        base = 100.0 * step

        def kernel(start, duration, thread, name="gemm", base=base, **args):
            nonlocal number
            number += 1
            events.append(
                event("cuda_runtime", "cudaLaunchKernel", base + start - 1, 0.01, thread, correlation=number)
            )
            events.append(event("kernel", name, base + start, duration, 7, correlation=number, **args))

        events.append(event("user_annotation", f"ProfilerStep#{step}", base, 100))
        events.append(event("user_annotation", "enumerate(DataLoader)#_Iter.__next__", base, 5))
        events.append(event("cpu_op", "autograd::engine::evaluate_function: MmBackward", base + 20, 50, 2))
        events.append(event("user_annotation", "Optimizer.step#AdamW.step", base + 88, 10))
        kernel(5 + late, 20, 1)
        kernel(25 + late, 40, 2)
        nccl = {
            "Collective name": "allreduce",
            "In msg nelems": 1000,
            "dtype": "Float",
            "Process Group Ranks": "[0, 1]",
        }
        kernel(55 + late, 35 - late, 3, "ncclDevKernel_AllReduce_Sum_f32", **nccl)
        kernel(90, 5, 1)
    return {
        "distributedInfo": {"rank": rank, "world_size": 2},
        "baseTimeNanoseconds": 10**18,
        "traceEvents": events,
    }


def test_the_parts_of_a_step_are_those_of_its_kernels(tmp_path):
    for rank, late in ((0, 0.0), (1, 5.0)):
        with gzip.open(tmp_path / f"worker{rank}.pt.trace.json.gz", "wt") as file:
            json.dump(gpu_trace(rank, late), file)
    timeline = read_foreign(tmp_path)
    assert timeline.clock_error is None
    parts = explain(timeline).of(0).parts
    assert parts.wall == pytest.approx(100 * MS)
    assert parts.compute == pytest.approx(65 * MS, abs=0.1 * MS)
    assert parts.data_wait == pytest.approx(5 * MS, abs=0.1 * MS)
    # Exposed from 65 to 90; the other rank arrives at 60, when compute still hides it.
    assert parts.exposed_communication + parts.straggler_wait == pytest.approx(25 * MS, abs=0.1 * MS)
    kinds = {kind: sum(s.duration for s in timeline.of(0) if s.kind == kind) for kind in Kind}
    assert kinds[Kind.FORWARD] == pytest.approx(80 * MS, abs=0.1 * MS)
    assert kinds[Kind.BACKWARD] == pytest.approx(160 * MS, abs=0.1 * MS)
    assert kinds[Kind.OPTIMIZER] == pytest.approx(20 * MS, abs=0.1 * MS)
    collectives = [span for span in timeline if span.kind == Kind.COLLECTIVE]
    assert {(span.group, span.bytes) for span in collectives} == {((0, 1), 4000)}


def test_a_trace_that_pytorch_writes_is_read(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(40, 64)), batch_size=8)
    path = tmp_path / "rank-3.json"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=0, active=5, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    timeline = read_foreign(tmp_path)
    assert timeline.ranks in ((3,), (0,))
    assert len(timeline.steps()) >= 4
    (rank,) = explain(timeline).ranks
    assert rank.parts.compute > 0
    kinds = {span.kind for span in timeline}
    assert {Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.DATA_WAIT} <= kinds


def test_a_list_without_an_object_around_it_is_a_trace_too(tmp_path):
    (tmp_path / "rank-5.json").write_text(json.dumps(gpu_trace(0)["traceEvents"]))
    assert read_foreign(tmp_path / "rank-5.json").ranks == (5,)


@pytest.mark.parametrize("write", [lambda path, text: path.write_bytes(text), gzip_file])
def test_a_trace_may_begin_with_the_mark_of_an_editor(tmp_path, write):
    events = [event("cpu_op", "aten::mm", 0, 1)]
    path = tmp_path / ("trace.json.gz" if write is gzip_file else "trace.json")
    write(path, b"\xef\xbb\xbf" + json.dumps(events).encode())
    assert list(events_of(path))[1:] == events


def test_a_trace_that_is_cut_anywhere_is_refused_with_the_place(tmp_path):
    whole = json.dumps(gpu_trace(0, steps=1))
    path = tmp_path / "rank-0.json"
    for length in range(0, len(whole) - 2, 97):
        path.write_text(whole[:length])
        with pytest.raises(RunError, match="at character"):
            list(events_of(path))


@pytest.mark.parametrize(
    "text",
    [
        '{"traceEvents": 5}',
        "[1, 2]",
        "[[[[",
        "[" * 100_000,
        '{"a": ' * 50_000,
        "no trace",
        '{"traceEvents": [{"ph": "X", "ts": "soon", "name": "x"}]}',
        '{"traceEvents": [{"ph": "X", "name": "x"}]}',
        '{"traceEvents": [{"ph": "X", "ts": 1e999, "name": "ProfilerStep#1", "cat": "user_annotation"}]}',
        '{"traceEvents": []}',
    ],
    ids=range(10),
)
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "rank-0.json").write_text(text)
    with pytest.raises(RunError):
        read_foreign(tmp_path)


def test_a_compressed_trace_that_is_torn_is_refused(tmp_path):
    whole = gzip.compress(json.dumps(gpu_trace(0)).encode())
    (tmp_path / "rank-0.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match="cannot be read"):
        read_foreign(tmp_path)


def test_two_traces_of_one_rank_are_refused(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(gpu_trace(0)))
    with pytest.raises(RunError, match="second trace of rank 0"):
        read_foreign(tmp_path)


def test_reading_takes_little_memory_whatever_the_size_of_the_file(tmp_path):
    path = tmp_path / "rank-0.json"
    noise = json.dumps(event("python_function", "x" * 400, 1, 1))
    with path.open("w") as file:
        file.write('{"traceEvents": [' + json.dumps(event("user_annotation", "ProfilerStep#0", 0, 9)))
        for _ in range(30_000):
            file.write("," + noise)
        file.write("]}")
    tracemalloc.start()
    try:
        assert len(read_foreign(path)) == 1
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 2
    finally:
        tracemalloc.stop()
