"""Step time against memory, as more of a rank's state is kept in files; beside predictions and the disk.

    python benchmarks/tiers.py [--layers 16] [--rounds 5] [--folder DIR] [--svg benchmarks/tiers.svg]

One rank trains a transformer in fp32 under Plans that need less and less memory, each in a process of its
own with one compute thread. In each round every process makes its steps in turn, every other round in the
reverse order, beside the disk by itself (dd with direct I/O), the memory by itself (a copy), and the
optimizer alone over files.

Memory is the most private resident memory of a process (RssAnon) beyond what it had before the model was
made, in the steps after the first. Predicted memory is `shoal.predict.cost.memory_of`. Predicted seconds are
those of the step in memory, measured, with `shoal.predict.cost.time.offload` for the disk's and the memory's
own rates; a forward is taken for a third of the passes. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from shoal.data import as_samples
from shoal.machine.bench import describe
from shoal.models import build, preset
from shoal.parallel import OffloadedOptimizer, parallelize
from shoal.predict.cost import Layout, memory_of
from shoal.predict.cost.time.offload import offload_of, stored_bytes
from shoal.spec.cluster import Cluster, Host
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import transformer_shape, workload_of
from shoal.train import OptimizerConfig, Runtime, Trainer
from shoal.units import format_bytes

BATCH, SEQUENCE, STEPS = 2, 128, 2
ALL = "optimizer:file+gradients:file+parameters:file"
PLANS = {
    "all in memory": "shard=zero3",
    "optimizer": "shard=zero3,offload=optimizer:file",
    "and gradients": "shard=zero3,offload=optimizer:file+gradients:file",
    "and parameters": f"shard=zero3,offload={ALL}",
    "and activations": f"shard=zero3,offload={ALL}+activations:file",
    "those of 6 blocks alone": f"shard=zero3,offload={ALL}+activations:file:6",
    "with recompute=full": f"shard=zero3,recompute=full,offload={ALL}",
}
ALONE = 1 << 26
"""Elements of the optimizer alone: 512 MiB of moments."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=16, help="layers of 4.2 M parameters; default 16")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--folder", type=Path, help="folder of the files; a temporary one by default")
    parser.add_argument("--svg", type=Path, help="file for a picture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe(), end="\n\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(options.layers, options.rounds, Path(folder))
    report(rows, options.layers, options.svg)


# -- measured -----------------------------------------------------------------------------------------


class Contestant:
    """A process that makes steps when it is told to.

    Args:
        made: Called in the process with a folder and `argument`; returns the step.
        argument: A Plan's text, or nothing.
        folder: Folder of its files.
    """

    def __init__(self, made: Any, argument: Any, folder: Path) -> None:
        context = get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(made, argument, folder, there))
        self._process.start()
        self.run(1)  # state is made in the first step

    def run(self, steps: int) -> tuple[list[float], int, list[Any]]:
        """Return the seconds of each step, the most private bytes in them, and what they returned."""
        self._here.send(steps)
        found: tuple[list[float], int, list[Any]] = self._here.recv()
        return found

    def close(self) -> None:
        """End the process."""
        self._here.send(0)
        self._process.join()


def serve(made: Any, argument: Any, folder: Path, there: Connection) -> None:
    torch.set_num_threads(1)
    before, most = private_bytes(), 0

    def watch() -> None:
        nonlocal most
        while True:
            most = max(most, private_bytes())
            time.sleep(0.003)

    threading.Thread(target=watch, daemon=True).start()
    step = made(argument, folder)
    while steps := there.recv():
        seconds, results, most = [], [], 0
        for _ in range(steps):
            began = time.perf_counter()
            results.append(step())
            seconds.append(time.perf_counter() - began)
        there.send((seconds, most - before, results))


def training(spec: tuple[str, int], folder: Path) -> Any:
    plan, layers = spec
    tokens = torch.randint(64, (16, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    data = as_samples([(row[:-1], row[1:]) for row in tokens])
    return Trainer(
        build("tiny", overrides=shape_of(layers), device="meta"),
        data,
        plan,
        batch=BATCH,
        steps=1 << 20,
        optimizer=OptimizerConfig(warmup=1),
        runtime=Runtime(offload_folder=folder),
    ).step


def update_alone(spec: None, folder: Path) -> Any:
    model = nn.ParameterList([nn.Parameter(torch.zeros(ALONE // 64)) for _ in range(64)])
    parallel = parallelize(model, "offload=optimizer:file", offload_folder=folder)
    for parameter in parallel.parameters():
        parameter.grad = torch.ones_like(parameter)
    return OffloadedOptimizer(parallel, parallel.parameters(), torch.optim.AdamW, lr=1e-3, fused=True).step


def update_in_memory() -> float:
    """Bytes/s of torch's fused AdamW."""
    parameter = nn.Parameter(torch.zeros(ALONE))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    optimizer.step()
    return 28 * ALONE / fastest(optimizer.step)


def copied() -> float:
    """Bytes/s that a copy reads and writes."""
    source, target = torch.zeros(ALONE), torch.zeros(ALONE)
    return 8 * ALONE / fastest(lambda: target.copy_(source))


def fastest(action: Any) -> float:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def disk(folder: Path) -> tuple[float, float]:
    """Bytes/s of dd with direct I/O: written, read."""
    path, count = folder / "dd", 64
    rates = []
    for words in (
        ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"],
        [f"if={path}", "of=/dev/null", "iflag=direct"],
    ):
        began = time.perf_counter()
        subprocess.run(["dd", *words, "bs=8M", f"count={count}"], check=True, capture_output=True)
        rates.append(count * (8 << 20) / (time.perf_counter() - began))
    return rates[0], rates[1]


def measure(layers: int, rounds: int, folder: Path) -> dict[str, Any]:
    contestants = {name: Contestant(training, (plan, layers), folder) for name, plan in PLANS.items()}
    alone = Contestant(update_alone, None, folder)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    memory = dict.fromkeys(contestants, 0)
    rows: dict[str, Any] = {"seconds": seconds, "memory": memory}
    for name in ("written", "read", "copied", "adam", "stream", "share_of_disk", "share_of_memory"):
        rows[name] = []
    disk(folder)  # reserves its space
    for number in range(rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            took, most, _ = contestants[name].run(STEPS)
            seconds[name].append(median(took))
            memory[name] = max(memory[name], most)
        written, read = disk(folder)
        took, _, _ = alone.run(2)
        stream = 16 * ALONE / min(took)
        copy, adam = copied(), update_in_memory()
        for name, value in {
            "written": written,
            "read": read,
            "copied": copy,
            "adam": adam,
            "stream": stream,
            "share_of_disk": stream / by_turns(written, read),
            "share_of_memory": adam / copy,
        }.items():
            rows[name].append(value)
    for each in (*contestants.values(), alone):
        each.close()
    return rows


def by_turns(written: float, read: float) -> float:
    """Bytes/s of as many bytes written as read, one after the other."""
    return 2 / (1 / written + 1 / read)


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


# -- predicted ----------------------------------------------------------------------------------------


def shape_of(layers: int) -> dict[str, int]:
    return {
        "vocab_size": 64, "layers": layers, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 2048,
        "seq": SEQUENCE,
    }  # fmt: skip


def predicted(rows: dict[str, Any], layers: int) -> dict[str, tuple[float, float]]:
    """By Plan, bytes and seconds."""
    workload = workload_of(transformer_shape(preset("tiny").model_dump() | shape_of(layers)))
    rate = by_turns(median(rows["written"]), median(rows["read"]))
    cluster = Cluster.preset("laptop", 1).replace(host=Host(file_bandwidth=rate))
    update = 28 * workload.parameters / median(rows["adam"])
    passes = median(rows["seconds"]["all in memory"]) - update
    found = {}
    for name, text in PLANS.items():
        plan = SettledPlan.of(SettledPlan.parse(f"{text},microbatch={BATCH}"), BATCH)
        forward, backward = passes / 3, passes * (1 if plan.recompute == "full" else 2 / 3)
        whole = range(len(workload.pieces))
        stored = stored_bytes(workload, plan, (whole,), workload.pieces, Layout.of(plan), 0)
        extra = offload_of(cluster, plan, workload.parameters, (forward, backward), 1, update, stored).extra
        peak = memory_of(workload, plan, BATCH)[0].peak
        found[name] = peak, forward + backward + update + extra
    return found


# -- told ---------------------------------------------------------------------------------------------


def report(rows: dict[str, Any], layers: int, svg: Path | None) -> None:
    expected = predicted(rows, layers)
    parameters = workload_of(transformer_shape(preset("tiny").model_dump() | shape_of(layers))).parameters
    print(f"{parameters / 1e6:.0f} M parameters, state {format_bytes(round(16 * parameters))}; "
          f"{BATCH} x {SEQUENCE} tokens a step; load {os.getloadavg()[1]:.1f}.\n")  # fmt: skip
    print("| in files | memory | predicted | s a step | predicted | step over that in memory |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    base = rows["seconds"]["all in memory"]
    for name, (peak, took) in expected.items():
        seconds = rows["seconds"][name]
        ratio = [here / there for here, there in zip(seconds, base, strict=True)]
        print(
            f"| {name} | {format_bytes(rows['memory'][name])} | {format_bytes(round(peak))} | "
            f"{spread(seconds)} | {took:.2f} | {spread(ratio)} |"
        )
    print()
    for name, text in {
        "written": "dd writes, GB/s",
        "read": "dd reads, GB/s",
        "stream": "AdamW with moments in files reads and writes, GB/s",
        "share_of_disk": "this over as many bytes written and read by dd",
        "copied": "a copy reads and writes, GB/s",
        "adam": "fused AdamW in memory reads and writes, GB/s",
        "share_of_memory": "this over a copy",
    }.items():
        values = rows[name]
        print(f"- {text}: {spread([each / (1 if 'share' in name else 1e9) for each in values])}")
    if svg is not None:
        svg.write_text(picture(rows, expected), "utf-8")


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def picture(rows: dict[str, Any], expected: dict[str, tuple[float, float]]) -> str:
    """Step time against memory: dots with ranges for what was measured, a line for the prediction."""
    width, height, edge = 640, 360, 50
    most_memory = 1.05 * max([*rows["memory"].values(), *(peak for peak, _ in expected.values())])
    most_seconds = 1.1 * max([*map(max, rows["seconds"].values()), *(took for _, took in expected.values())])

    def at(nbytes: float, seconds: float) -> tuple[float, float]:
        across = edge + (width - 2 * edge) * nbytes / most_memory
        return across, height - edge - (height - 2 * edge) * seconds / most_seconds

    ordered = sorted(expected.values())
    line = " ".join("{:.0f},{:.0f}".format(*at(*each)) for each in ordered)
    parts = [
        f'<polyline points="{line}" fill="none" stroke="#999" stroke-dasharray="4 3"/>',
        f'<path d="M{edge},{edge} V{height - edge} H{width - edge}" fill="none" stroke="#333"/>',
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">private memory, GiB</text>',
        f'<text x="{edge}" y="{edge - 12}">s a step; dashed: predicted</text>',
    ]
    for tick in range(5):
        x, _ = at(most_memory * tick / 4, 0)
        _, y = at(0, most_seconds * tick / 4)
        parts.append(f'<text x="{x:.0f}" y="{height - edge + 16}" text-anchor="middle">'
                     f"{most_memory * tick / 4 / 2**30:.2f}</text>")  # fmt: skip
        parts.append(f'<text x="{edge - 6}" y="{y + 4:.0f}" text-anchor="end">'
                     f"{most_seconds * tick / 4:.1f}</text>")  # fmt: skip
    for index, (name, _) in enumerate(sorted(rows["memory"].items(), key=lambda item: item[1])):
        seconds = rows["seconds"][name]
        x, y = at(rows["memory"][name], median(seconds))
        low, high = at(0, min(seconds))[1], at(0, max(seconds))[1]
        parts.append(f'<path d="M{x:.0f},{low:.0f} V{high:.0f}" stroke="#1f6feb"/>')
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="#1f6feb"/>')
        side, anchor = (7, "start") if x < 0.8 * width else (-7, "end")
        below = (-6, 44, 22, 42, -18, 18)[index % 6]  # so that no label lies on another
        parts.append(f'<text x="{x + side:.0f}" y="{y + below:.0f}" text-anchor="{anchor}">{name}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12">\n<title>Step time against memory</title>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    main()
