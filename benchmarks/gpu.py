"""Shoal on one GPU: every layout, steps beside plain torch and Hugging Face, and predictions beside both.

    python benchmarks/gpu.py [--write benchmarks/gpu.md] [--only layouts,peers,rows,report] [--device cuda]

Takes under eight minutes on one H100. Four parts:

    layouts   `shoal check --device cuda --ranks 4`: Plans that share the GPU, beside one rank
    peers     a step beside plain torch and Hugging Face, eager and compiled (`gpu_peers.py`): five bursts
              each, in turns where all fit into memory together
    rows      steps of many shapes and Plans, beside what the device's preset predicts, and what `shoal probe`
              of this machine predicts: seconds, and bytes that tensors take
    report    the parts of a step as the Timeline has them, beside torch's profiler

`--device cpu` runs small shapes of each part, to try the program; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import torch
from gpu_peers import PEERS, Measured, Shape, measure, measure_in_turns, shoal_trainer
from torch.profiler import ProfilerActivity, profile

from shoal.cluster import Cluster
from shoal.cost import Costs, Memories
from shoal.cost.time import workload_on
from shoal.errors import ClusterError
from shoal.plan import Plan, SettledPlan
from shoal.run import Run
from shoal.simulate import measured_timeline, played_seconds
from shoal.timeline import explain
from shoal.units import format_bytes
from shoal.workload import Workload, transformer_shape, workload_of

_PARTS = ("layouts", "peers", "rows", "report")
_ROUNDS, _STEPS = 5, 4

_PEERS = (Shape("125m", None, 1024, 1), Shape("1b", None, 2048, 8), Shape("llama3-8b", 4, 4096, 2))

_ROWS = (
    *(
        ("125m", None, 1024, samples, "none", compile)
        for samples in (1, 16)
        for compile in ("none", "blocks")
    ),
    *(
        ("350m", None, 2048, 8, recompute, compile)
        for recompute in ("none", "selective", "full")
        for compile in ("none", "blocks")
    ),
    *(("350m", None, 1024, samples, "none", "blocks") for samples in (2, 16)),
    *(
        ("1b", None, 2048, samples, recompute, compile)
        for samples, recompute in ((1, "none"), (8, "none"), (8, "full"))
        for compile in ("none", "blocks")
    ),
    ("1b", None, 8192, 2, "none", "blocks"),
    ("1b", None, 512, 16, "selective", "blocks"),
    *(("llama2-7b", 8, 2048, 2, "none", compile) for compile in ("none", "blocks")),
    ("llama2-7b", 12, 2048, 2, "selective", "blocks"),
    *(("llama3-8b", 4, 4096, 2, "none", compile) for compile in ("none", "blocks")),
    ("llama2-70b", 2, 2048, 2, "none", "blocks"),
)
"""Model, its layers, length, samples, recompute, compile."""

_SMALL = (Shape("tiny", 2, 64, 2),)
_SMALL_ROWS = (("tiny", 2, 64, 2, "none", "none"),)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it runs.

    Attributes:
        device: The device.
        preset: The preset cluster with that device; None if there is none.
        name: Device, driver's memory, torch, host.
    """

    device: torch.device
    preset: Cluster | None
    name: str

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        """This machine."""
        torch_and_host = f"torch {torch.__version__}, Python {platform.python_version()}"
        if device.type == "cpu":
            return cls(device, None, f"CPU, {torch_and_host}: a trial of the program, no measurement")
        facts = torch.cuda.get_device_properties(device)
        preset = None
        with contextlib.suppress(ClusterError):  # a device that no preset describes
            preset = Cluster.assemble(facts.name, 1, None, None)
        return cls(device, preset, f"{facts.name}, {format_bytes(facts.total_memory)}, {torch_and_host}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts and prints the page."""
    parser = argparse.ArgumentParser(description="Shoal on one GPU; see the top of this file")
    parser.add_argument("--only", default=",".join(_PARTS), help="parts to run, separated by commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--write", type=Path, help="file for the page")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU: run this where one is, or try the program with --device cpu", file=sys.stderr)
        return 2
    machine = Machine.here(torch.device(options.device))
    pages = [
        "# One GPU",
        f"Written by `benchmarks/gpu.py`, which says how it is measured, at commit {_commit()}.",
        f"{machine.name}.",
    ]
    parts: dict[str, Callable[[Machine], str]] = {
        "layouts": _layouts,
        "peers": _peers,
        "rows": _rows,
        "report": _report,
    }
    for name in options.only.split(","):
        print(f"-- {name}", file=sys.stderr, flush=True)
        pages.append(parts[name](machine))
        text = "\n\n".join(pages) + "\n"
        if options.write is not None:  # after each part, for a machine that is taken away
            options.write.write_text(text, encoding="utf-8")
    print(text)
    return 0


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _layouts(machine: Machine) -> str:
    """Check Plans of four ranks that share the device."""
    sample = "24" if machine.device.type == "cuda" else "2"
    command = [sys.executable, "-m", "shoal", "check", "--device", machine.device.type, "--all"]
    command += ["--ranks", "4", "--sample", sample]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    verdict = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
    outcome = "All agree" if done.returncode == 0 else f"Exit code {done.returncode}"
    shown = " ".join(["shoal", *command[3:]])
    return f"## Layouts\n\n`{shown}`, ranks that share one device. {outcome}:\n\n```\n{verdict}\n```"


def _peers(machine: Machine) -> str:
    """Time a step of each peer on each shape."""
    lines = ["## Steps beside peers", "", "| step | ms | range | k tokens/s | peak, GiB |"]
    lines.append("| --- | ---: | --- | ---: | ---: |")
    notes = []
    names = [name for name in PEERS if find_spec("transformers") or "Hugging Face" not in name]
    for shape in _PEERS if machine.device.type == "cuda" else _SMALL:
        builds = {name: partial(PEERS[name], shape, machine.device) for name in names}
        timed = partial(measure_in_turns, device=machine.device, bursts=_ROUNDS, steps=_STEPS)
        found: dict[str, Measured] = {}
        try:
            found = timed(builds)
        except torch.cuda.OutOfMemoryError:
            notes.append(f"{shape}: there is no memory for all at once, so they ran one after another.")
        for name in builds if not found else ():
            _forget(machine.device)
            found |= timed({name: builds[name]})
        lines += [_peer_row(f"{shape}: {name}", shape, each) for name, each in found.items()]
        _forget(machine.device)
    return "\n".join([*lines, "", *notes]).rstrip()


def _peer_row(name: str, shape: Shape, found: Measured) -> str:
    rate = shape.tokens / found.seconds / 1e3
    span = f"{found.low * 1e3:.1f} to {found.high * 1e3:.1f}"
    return f"| {name} | {found.seconds * 1e3:.1f} | {span} | {rate:.1f} | {found.allocated / 2**30:.1f} |"


def _rows(machine: Machine) -> str:
    """Measure steps, and predict each by the preset and by a probe."""
    clusters = {} if machine.preset is None else {"preset": machine.preset}
    if machine.device.type == "cuda":
        clusters["probe"] = _probed()
    head = "".join(f" {name}, ms | error |" for name in clusters)
    lines = ["## Predictions", "", f"| step | measured, ms | peak, GiB | predicted, GiB | error |{head}"]
    lines.append("| --- | ---: | ---: | ---: | ---: |" + " ---: | ---: |" * len(clusters))
    errors: dict[str, list[float]] = {}
    for model, layers, length, samples, recompute, compile in (
        _ROWS if machine.device.type == "cuda" else _SMALL_ROWS
    ):
        shape = Shape(model, layers, length, samples)
        plan = f"dp=1,precision=bf16,microbatch={samples},recompute={recompute},compile={compile}"
        trainer = shoal_trainer(shape, plan, machine.device)
        found = measure(trainer.step, machine.device, bursts=_ROUNDS, steps=_STEPS)
        trainer.close()
        del trainer
        _forget(machine.device)
        cells = [f"{shape}, {recompute}, {compile}", f"{found.seconds * 1e3:.1f}"]
        settled = SettledPlan.of(Plan.parse(plan), samples)
        predicted = _predicted_bytes(shape, clusters, settled)
        cells += _beside(found.allocated / 2**30, predicted / 2**30, errors, "memory")
        for name, cluster in clusters.items():
            seconds = played_seconds(Costs(_workload(shape, cluster), cluster), settled, samples)
            cells += _beside(found.seconds * 1e3, seconds * 1e3, errors, name)[1:]
        lines.append("| " + " | ".join(cells) + " |")
    means = ", ".join(f"{name} {fmean(map(abs, each)):.1%}" for name, each in errors.items())
    return "\n".join([*lines, "", f"Mean errors: {means}."])


def _probed() -> Cluster:
    """Return what `shoal probe` says of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probed.toml"
        command = [sys.executable, "-m", "shoal", "probe", "--ranks", "1", "--out", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return Cluster.read(file)


def _workload(shape: Shape, cluster: Cluster | None) -> Workload:
    """Return the work of a shape, as Shoal trains it on a cluster's devices; None: on these cores."""
    described = transformer_shape(shape.config.model_dump()).replace(seq=shape.length)
    if cluster is None:
        return workload_of(described.replace(fused_passes=False))
    return workload_on(cluster, described)


def _predicted_bytes(shape: Shape, clusters: dict[str, Cluster], plan: SettledPlan) -> float:
    cluster = next(iter(clusters.values()), None)
    (found,) = Memories(_workload(shape, cluster), cluster).of(plan, shape.samples)
    return found.allocated


def _beside(measured: float, predicted: float, errors: dict[str, list[float]], kind: str) -> list[str]:
    error = predicted / measured - 1 if measured else 0.0
    errors.setdefault(kind, []).append(error)
    return [f"{measured:.1f}", f"{predicted:.1f}", f"{error:+.1%}"]


def _report(machine: Machine) -> str:
    """Beside each other: a step's parts by the Timeline, and the device's busy time by torch's profiler."""
    lines = ["## The parts of a step", "", "| step | by | ms | compute | launch | other parts |"]
    lines.append("| --- | --- | ---: | ---: | ---: | --- |")
    for shape in _PEERS[:2] if machine.device.type == "cuda" else _SMALL:
        for compile in ("none", "blocks"):
            plan = f"dp=1,precision=bf16,microbatch={shape.samples},compile={compile}"
            with tempfile.TemporaryDirectory() as folder:
                trainer = shoal_trainer(shape, plan, machine.device, run=Path(folder) / "run")
                measure(trainer.step, machine.device, bursts=1, steps=12)
                busy, wall = _profiled(trainer.step, machine.device)
                trainer.settle()
                trainer.close()
                parts = explain(measured_timeline(Run.open(Path(folder) / "run"))).parts
            del trainer
            _forget(machine.device)
            shares = {name: part / parts.wall for name, part in parts.disjoint().items()}
            rest = ", ".join(
                f"{name} {share:.1%}"
                for name, share in shares.items()
                if name not in ("compute", "launch") and share >= 0.001
            )
            name = f"{shape}, compile={compile}"
            lines.append(
                f"| {name} | Timeline | {parts.wall * 1e3:.1f} | {shares.get('compute', 0):.1%} | "
                f"{shares.get('launch', 0):.1%} | {rest} |"
            )
            lines.append(f"| | profiler | {wall * 1e3:.1f} | {busy / wall:.1%} | {1 - busy / wall:.1%} | |")
    return "\n".join(lines)


def _profiled(step: Callable[[], object], device: torch.device, steps: int = 5) -> tuple[float, float]:
    """Return the seconds of a step in which the device computes, and its wall time, by torch's profiler."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as recorded:
        measure(step, device, bursts=1, steps=steps, warm_up=0)
    on_device = "CUDA" if device.type == "cuda" else "CPU"
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if str(event.device_type).endswith(on_device) and event.time_range.end > event.time_range.start
    )
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    wall = reached - spans[0][0]
    return busy / steps / 1e6, wall / steps / 1e6


def _forget(device: torch.device) -> None:
    """Give memory and graphs of what was measured back."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
