"""Rows of steps: how long they take, beside plain torch, beside predictions, and beside their targets."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from gpu_device import finish
from gpu_outcome import Found, Short
from gpu_peers import PEERS, Measured, Shape, measure, measure_in_turns, shoal_trainer
from torch.profiler import ProfilerActivity, profile

from shoal.errors import ClusterError
from shoal.predict.cost import Costs, Memories
from shoal.predict.cost.time import workload_on
from shoal.predict.simulate import measured_timeline, played_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.run import Run
from shoal.spec.timeline import explain
from shoal.spec.workload import Workload, transformer_shape, workload_of

__all__ = ["beside_plain_torch", "parts_of_a_step", "probed_file", "profiled", "recompute_in_order", "step"]

_ROUNDS, _STEPS = 5, 4
_OF_TIME, _OF_MEMORY = 0.10, 0.05  # errors of predictions that are on target
_SAME = 0.02  # two steps that differ by less take the same time
_SMALL = Shape("tiny", 2, 64, 2)


def step(
    device: torch.device,
    model: str,
    layers: int | None,
    length: int,
    samples: int,
    compile: str,
    plan: str = "",
    least_rate: float = 0.0,
    most_ms: float = 0.0,
) -> Iterator[Found]:
    """Measure steps of a shape, and predict them by the device's preset and by what a probe measured.

    Args:
        device: Where.
        model, layers, length, samples: The shape.
        compile: "none" or "blocks".
        plan: More settings of the Plan.
        least_rate: Target in tokens/s; 0 for none.
        most_ms: Target in milliseconds; 0 for none.
    """
    shape = _shape(device, model, layers, length, samples)
    found = _measured(shape, compile, plan, device)
    targets = _Targets(device)
    yield _beside_predictions(shape, compile, plan, device, found, targets)
    targets.rate(shape, found, least_rate)
    targets.milliseconds(found, most_ms)
    targets.judge()


def beside_plain_torch(
    device: torch.device,
    model: str,
    layers: int | None,
    length: int,
    samples: int,
    least_rate: float = 0.0,
    most_ms: float = 0.0,
) -> Iterator[Found]:
    """Measure compiled steps of Shoal, then in turns with those of plain torch.

    What Shoal's steps take is told before plain torch is built: it counts whatever becomes of that.
    """
    shape = _shape(device, model, layers, length, samples)
    compiled = device.type == "cuda"  # on a CPU it would take a minute
    ours, theirs = (
        ("Shoal, compile=blocks", "plain torch, blocks and loss compiled")
        if compiled
        else ("Shoal, compile=none", "plain torch, eager")
    )
    targets = _Targets(device)
    built = PEERS[ours](shape, device)
    alone = measure(built, device, bursts=_ROUNDS, steps=_STEPS)
    yield _beside_predictions(shape, ours.partition("=")[2], "", device, alone, targets)
    targets.rate(shape, alone, least_rate)
    targets.milliseconds(alone, most_ms)
    build = partial(PEERS[theirs], shape, device)
    timed = partial(measure_in_turns, device=device, bursts=_ROUNDS, steps=_STEPS)
    found: dict[str, Measured] = {}
    try:
        found = timed({ours: lambda: built, theirs: build})
    except torch.cuda.OutOfMemoryError:
        yield Found("there is no memory for both at once, so they ran one after another")
    except Exception as error:
        yield Found(f"plain torch was not measured: {type(error).__name__}: {str(error)[:300]}")
        targets.judge()
        return
    if not found:
        del built
        _forget(device)
        found = {ours: alone, **timed({theirs: build})}
    for name, each in found.items():
        yield Found(f"{shape}, {name}, in turns: {_told(shape, each)}", _times(shape, each))
    if found[ours].low > found[theirs].high:
        slower = found[ours].seconds / found[theirs].seconds - 1
        targets.misses.append(f"plain torch is quicker: Shoal {slower:+.1%}")
    targets.judge()


def recompute_in_order(
    device: torch.device, model: str, length: int, samples: int, compile: str
) -> Iterator[Found]:
    """Measure a step without recomputation, with selective and with full: time grows, memory falls."""
    shape = _shape(device, model, None, length, samples)
    found: dict[str, Measured] = {}
    targets = _Targets(device)
    for recompute in ("none", "selective", "full"):
        plan = f"recompute={recompute}"
        found[recompute] = _measured(shape, compile, plan, device)
        yield _beside_predictions(shape, compile, plan, device, found[recompute], targets)
        _forget(device)
    for less, more in (("none", "selective"), ("selective", "full")):
        if found[less].seconds > (1 + _SAME) * found[more].seconds:
            targets.misses.append(f"recompute={more} is quicker than {less}")
        if found[less].allocated < found[more].allocated:
            targets.misses.append(f"recompute={more} takes more memory than {less}")
    targets.judge()


def parts_of_a_step(
    device: torch.device, model: str, length: int, samples: int, compile: str
) -> Iterator[Found]:
    """The parts of a step by the Timeline, and the device's busy time by torch's profiler."""
    shape = _shape(device, model, None, length, samples)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        trainer = shoal_trainer(shape, _plan(shape, compile), device, run=run)
        measure(trainer.step, device, bursts=1, steps=12)
        busy, wall = profiled(trainer.step, device)
        trainer.settle()
        trainer.close()
        parts = explain(measured_timeline(Run.open(run))).parts
    fractions = {f"{name}, %": 100 * part / parts.wall for name, part in parts.disjoint().items() if part}
    told = ", ".join(f"{name} {share:.1f}" for name, share in fractions.items() if share >= 0.1)
    name = f"{shape}, compile={compile}"
    yield Found(f"{name}, Timeline: {parts.wall * 1e3:.1f} ms, {told}", {"ms": parts.wall * 1e3, **fractions})
    yield Found(
        f"{name}, profiler: {wall * 1e3:.1f} ms, the device busy {busy / wall:.1%}",
        {"ms": wall * 1e3, "compute, %": 100 * busy / wall},
    )


def profiled(step: Callable[[], object], device: torch.device, steps: int = 5) -> tuple[float, float]:
    """Return the seconds of a step in which the device computes, and its wall time, by torch's profiler.

    Exactly these steps run inside of the profile, from an idle device to an idle device.
    """
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    finish(device)
    with profile(activities=kinds) as recorded:
        for _ in range(steps):
            step()
        finish(device)
    on_device = "CUDA" if device.type == "cuda" else "CPU"
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if str(event.device_type).endswith(on_device)
        and event.time_range.end > event.time_range.start
        and not getattr(
            event, "is_user_annotation", False
        )  # a region of the host, gaps of the device included
    )
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    wall = reached - spans[0][0]
    return busy / steps / 1e6, wall / steps / 1e6


class _Targets:
    """Targets that a row misses; a trial on a CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self._is_trial = device.type == "cpu"
        self.misses: list[str] = []

    def rate(self, shape: Shape, found: Measured, least: float) -> None:
        """Compare tokens/s with a target; 0 for none."""
        rate = shape.tokens / found.seconds
        if rate < least:
            self.misses.append(f"{rate:,.0f} tokens/s, target {least:,.0f}")

    def milliseconds(self, found: Measured, most: float) -> None:
        """Compare the time of a step with a target; 0 for none."""
        if most and found.seconds * 1e3 > most:
            self.misses.append(f"{found.seconds * 1e3:.1f} ms, target {most:g} ms")

    def error(self, what: str, error: float, most: float) -> None:
        """Compare the error of a prediction with a target."""
        if abs(error) > most:
            self.misses.append(f"{what} is predicted {error:+.1%}, target {most:.0%}")

    def judge(self) -> None:
        """Raise `Short` if a target was missed."""
        if self.misses and not self._is_trial:
            raise Short("; ".join(self.misses))


def _measured(shape: Shape, compile: str, plan: str, device: torch.device) -> Measured:
    trainer = shoal_trainer(shape, _plan(shape, compile, plan), device)
    found = measure(trainer.step, device, bursts=_ROUNDS, steps=_STEPS)
    trainer.settle()
    trainer.close()
    return found


def _beside_predictions(
    shape: Shape, compile: str, plan: str, device: torch.device, found: Measured, targets: _Targets
) -> Found:
    """Return what was measured beside what is predicted; note misses of targets."""
    figures, told = _figures(shape, found), _told(shape, found)
    settled = SettledPlan.of(Plan.parse(_plan(shape, compile, plan)), shape.samples)
    name = ", ".join(filter(None, (str(shape), f"compile={compile}", plan)))
    for source, cluster in _clusters(device).items():
        seconds = played_seconds(Costs(_workload(shape, cluster), cluster), settled, shape.samples)
        error = seconds / found.seconds - 1
        figures |= {f"{source}, ms": seconds * 1e3, f"{source}, %": 100 * error}
        told += f", by the {source} {seconds * 1e3:.1f} ms ({error:+.1%})"
        targets.error(f"{name}: time by the {source}", error, _OF_TIME)
    if found.allocated:
        cluster = next(iter(_clusters(device).values()), None)
        (memory,) = Memories(_workload(shape, cluster), cluster).of(settled, shape.samples)
        error = memory.allocated / found.allocated - 1
        figures |= {"predicted GiB": memory.allocated / 2**30, "memory, %": 100 * error}
        told += f", memory predicted {memory.allocated / 2**30:.1f} GiB ({error:+.1%})"
        targets.error(f"{name}: memory", error, _OF_MEMORY)
    return Found(f"{name}: {told}", figures)


def _clusters(device: torch.device) -> Mapping[str, Cluster]:
    """Return what predicts: the preset of the device if there is one, and what a probe wrote if it ran."""
    found = {}
    if device.type == "cuda":
        with contextlib.suppress(ClusterError):  # no preset describes the device
            found["preset"] = Cluster.assemble(torch.cuda.get_device_name(device), 1, None, None)
    probed = probed_file(device)
    if probed.is_file():
        found["probe"] = Cluster.read(probed)
    return found


def probed_file(device: torch.device) -> Path:
    """Return where the row of the probe leaves what it measured of this device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    word = re.sub(r"[^a-z0-9]+", "-", name.lower())
    return Path(os.environ.get("GPU_FOLDER", ".")) / f"gpu_probed_{word}.toml"


def _workload(shape: Shape, cluster: Cluster | None) -> Workload:
    """Return the work of a shape, as Shoal trains it on a cluster's devices; None: on these cores."""
    described = transformer_shape(shape.config.model_dump()).replace(seq=shape.length)
    if cluster is None:
        return workload_of(described.replace(fused_passes=False))
    return workload_on(cluster, described)


def _shape(device: torch.device, model: str, layers: int | None, length: int, samples: int) -> Shape:
    return Shape(model, layers, length, samples) if device.type == "cuda" else _SMALL


def _plan(shape: Shape, compile: str, plan: str = "") -> str:
    precision = "" if "precision=" in plan else "precision=bf16"
    settings = (f"dp=1,microbatch={shape.samples},compile={compile}", precision, plan)
    return ",".join(filter(None, settings))


def _told(shape: Shape, found: Measured) -> str:
    span = f"{found.low * 1e3:.1f} to {found.high * 1e3:.1f}"
    rate = shape.tokens / found.seconds
    return f"{found.seconds * 1e3:.1f} ms ({span}), {rate:,.0f} tokens/s, {found.allocated / 2**30:.1f} GiB"


def _figures(shape: Shape, found: Measured) -> dict[str, float]:
    return {**_times(shape, found), "GiB": found.allocated / 2**30}


def _times(shape: Shape, found: Measured) -> dict[str, float]:
    return {
        "ms": found.seconds * 1e3,
        "low, ms": found.low * 1e3,
        "high, ms": found.high * 1e3,
        "tokens/s": shape.tokens / found.seconds,
    }


def _forget(device: torch.device) -> None:
    """Give memory and graphs of what was measured back."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
