"""Rows of whole trainings: saving beside steps, stopping, resuming, and what makes the host wait."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from gpu_device import finish
from gpu_outcome import Found, Lacking, Short
from gpu_peers import Shape, shoal_trainer
from gpu_sources import CORE_FAILURE
from gpu_steps import probed_file

from shoal.collectives import is_built
from shoal.launch.submit import EXIT_STOPPED
from shoal.models import Transformer, preset
from shoal.train import OptimizerConfig, Trainer, TrainingData

__all__ = [
    "check_plan",
    "check_plans",
    "command",
    "dropout_compiled",
    "experts",
    "offload",
    "probe",
    "save_and_resume",
    "tests",
]

_STEPS, _SAVED = 20, 10
_WATCHED = 4  # from this step on the host waits for nothing
_TOLERANCE = 5e-3  # of losses in bf16: backward of attention adds in no fixed order


def save_and_resume(device: torch.device, compile: str) -> Iterator[Found]:
    """Train 20 steps, save beside step 11, go on from that save in another Trainer; the losses agree."""
    shape = Shape("125m", None, 1024, 4) if device.type == "cuda" else Shape("tiny", 2, 64, 2)
    plan = f"dp=1,precision=bf16,microbatch={shape.samples},compile={compile}"
    with tempfile.TemporaryDirectory() as folder:
        trainer = shoal_trainer(shape, plan, device)
        results, waits = [], dict[str, int]()
        for number in range(1, _STEPS + 1):
            is_watched = number >= _WATCHED and device.type == "cuda"
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if is_watched:
                    torch.cuda.set_sync_debug_mode("warn")
                results.append(trainer.step())
                if is_watched:
                    torch.cuda.set_sync_debug_mode("default")
            for each in caught:
                if "called a synchronizing CUDA operation" in str(each.message):
                    place = f"{Path(each.filename).name}:{each.lineno}"
                    waits[place] = waits.get(place, 0) + 1
            if number == _SAVED:
                began = time.perf_counter()
                begun = trainer.save_in_background(Path(folder))
                stalled = time.perf_counter() - began
        trainer.settle()
        losses = [float(result.loss) for result in results]
        trainer.finish_saving()
        trainer.close()
        figures = {"stall, ms": 1e3 * begun.stalled}
        beside = f"in the step: {begun.in_step}" if begun.in_step else "beside the steps"
        yield Found(f"saved {beside}, the call took {stalled * 1e3:.0f} ms", figures)
        del trainer
        (checkpoint,) = Path(folder).glob("step-*")
        resumed = shoal_trainer(shape, plan, device)
        began = time.perf_counter()
        resumed.load(checkpoint)
        seconds = time.perf_counter() - began
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        yield Found(f"loaded {size / 1e9:.2f} GB in {seconds:.2f} s", {"load, GB/s": size / seconds / 1e9})
        again = [resumed.step() for _ in range(_STEPS - _SAVED)]
        resumed.settle()
        _require_same([float(result.loss) for result in again], losses[_SAVED:])
        resumed.close()
    yield Found(f"losses {losses[0]:.3f} to {losses[-1]:.3f}; resumed ones agree")
    if waits:
        told = ", ".join(f"{place} {times} times" for place, times in waits.items())
        raise Short(f"from step {_WATCHED} on the host waited for the device: {told}")


def command(device: torch.device) -> Iterator[Found]:
    """`shoal train`, which is asked to stop, saves, and is resumed to its end."""
    is_gpu = device.type == "cuda"
    steps, stop_at = (200, 60) if is_gpu else (60, 20)
    settings = [f"model={'125m' if is_gpu else 'tiny'}", f"sequence={1024 if is_gpu else 64}", "batch=4"]
    settings += [f"steps={steps}", "checkpoint.every=50", f"device={device.type}"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        shoal = [sys.executable, "-m", "shoal", "train", "--nproc", "1"]
        given = [word for setting in settings for word in ("--set", setting)]
        plan = ["--plan", "precision=bf16,compile=none"]
        with subprocess.Popen([*shoal, *given, *plan, "--run", str(run)]) as training:
            metrics = run / "metrics.jsonl"
            while training.poll() is None and _last_step(metrics) < stop_at:
                time.sleep(0.05)
            ended = training.poll()
            assert ended is None, (
                f"it ended with {ended} at step {_last_step(metrics)}, before it was to stop"
            )
            training.send_signal(signal.SIGTERM)
            code = training.wait()
        assert code == EXIT_STOPPED, f"it ended with {code} after SIGTERM, wanted {EXIT_STOPPED}"
        made = _last_step(metrics)
        yield Found(f"stopped after step {made} of {steps}")
        done = subprocess.run([*shoal, "--resume", str(run)], check=False)
        assert done.returncode == 0, f"the resumed run ended with {done.returncode}"
        assert _last_step(metrics) == steps, f"step {_last_step(metrics)} is the last, wanted {steps}"
        report = [sys.executable, "-m", "shoal", "report", str(run)]
        shown = subprocess.run(report, check=True, capture_output=True, text=True).stdout
        print(shown)
        yield Found(f"resumed to step {steps}; its report has {len(shown.splitlines())} lines")


def dropout_compiled(device: torch.device) -> Iterator[Found]:
    """Compiled blocks with dropout and full recomputation: layers share graphs, and none is made later."""
    from torch._dynamo.utils import counters

    torch._logging.set_logs(recompiles=True)
    trainer = _small_trainer(device, "recompute=full,compile=blocks", {"layers": 6, "dropout": 0.1})
    began = time.perf_counter()
    results = [trainer.step()]
    float(results[0].loss)
    first = time.perf_counter() - began
    results += [trainer.step() for _ in range(2)]
    trainer.settle()
    early = counters["stats"]["unique_graphs"]
    results += [trainer.step() for _ in range(5)]
    trainer.settle()
    late = counters["stats"]["unique_graphs"]
    _require_finite(results)
    trainer.close()
    yield Found(f"{late} graphs for 6 layers and the loss, first step {first:.1f} s", {"graphs": late})
    assert late == early, f"{late - early} graphs were compiled after step 3"
    assert late <= 4, f"{late} graphs for six equal layers and the loss, wanted at most 4"


def experts(device: torch.device) -> Iterator[Found]:
    """A model with experts in bf16 has the losses that it has in fp32, as far as bf16 goes."""
    losses = {}
    for precision in ("bf16", "fp32"):
        trainer = _small_trainer(device, f"precision={precision}", {}, model="tiny-experts")
        results = [trainer.step() for _ in range(5)]
        trainer.settle()
        losses[precision] = [float(result.loss) for result in results]
        trainer.close()
    _require_same(losses["bf16"], losses["fp32"], tolerance=2e-2)
    yield Found(f"losses in bf16 {losses['bf16'][-1]:.4f}, in fp32 {losses['fp32'][-1]:.4f}")


def offload(device: torch.device) -> Iterator[Found]:
    """The optimizer's state in the host's memory: the same losses, and what a step takes."""
    shape = Shape("125m", None, 1024, 4) if device.type == "cuda" else Shape("tiny", 2, 64, 2)
    losses = {}
    for place in ("none", "optimizer:host"):
        plan = f"dp=1,precision=bf16,microbatch={shape.samples},compile=none,offload={place}"
        trainer = shoal_trainer(shape, plan, device)
        results = [trainer.step() for _ in range(4)]
        trainer.settle()
        began = time.perf_counter()
        results += [trainer.step() for _ in range(4)]
        trainer.settle()
        finish(device)
        milliseconds = (time.perf_counter() - began) / 4 * 1e3
        losses[place] = [float(result.loss) for result in results]
        trainer.close()
        del trainer
        yield Found(f"offload={place}: {milliseconds:.1f} ms", {"ms": milliseconds})
    _require_same(losses["optimizer:host"], losses["none"])


def probe(device: torch.device) -> Iterator[Found]:
    """`shoal probe --quick` of this machine; rows after it compare with its predictions."""
    file = probed_file(device)
    file.unlink(missing_ok=True)
    backend = [] if device.type == "cuda" else ["--backend", "gloo"]
    printed = _tee(["probe", "--ranks", "1", "--quick", *backend, "--out", str(file)])
    warned = [line for line in printed if "warning" in line.lower()]
    yield Found(f"{len(printed)} lines, {len(warned)} warnings" + "".join(f"; {line}" for line in warned))
    assert file.is_file(), "it wrote no description"


def check_plan(device: torch.device, plan: str) -> Iterator[Found]:
    """`shoal check` of a Plan on ranks that share the device, with buckets that stay in its memory."""
    _require_core()
    sizes = ("hidden=256", "ffn=512", "vocab_size=1024")
    larger = [word for size in sizes for word in ("--option", size)]
    printed = _tee(["check", "--device", device.type, "--steps", "2", "--plan", plan, *larger])
    yield Found(printed[-1])


def check_plans(device: torch.device, ranks: int, sample: int) -> Iterator[Found]:
    """`shoal check --all` on ranks that share the device."""
    _require_core()
    command = ["check", "--device", device.type, "--all", "--ranks", str(ranks), "--sample", str(sample)]
    yield Found(_tee(command)[-1])


def tests(device: torch.device, files: Sequence[str]) -> Iterator[Found]:
    """The tests of this repository that need a GPU; none of them may be skipped."""
    import pytest

    class Counts:
        """Counts what became of tests."""

        def __init__(self) -> None:
            self.passed, self.failed, self.skipped = 0, list[str](), 0

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.passed += report.when == "call" and report.passed
            self.skipped += report.skipped
            if report.failed:
                self.failed.append(report.nodeid)

    root, counts = Path(__file__).resolve().parent.parent, Counts()
    os.chdir(root)
    pytest.main(["-p", "no:cacheprovider", "-q", "-k", "gpu or cuda", *files], plugins=[counts])
    yield Found(f"{counts.passed} passed, {counts.skipped} skipped")
    assert not counts.failed, f"failed: {', '.join(counts.failed)}"
    assert counts.passed, "no test ran"
    assert device.type == "cpu" or not counts.skipped, f"{counts.skipped} were skipped, though a GPU is here"


def _tee(arguments: Sequence[str]) -> list[str]:
    """Run a command of Shoal, print its lines as they come, and return them.

    Raises:
        AssertionError: It ended with another exit code than 0.
    """
    lines = []
    command = [sys.executable, "-m", "shoal", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **pipes) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    last = "; ".join(lines[-3:])
    assert running.returncode == 0, f"shoal {' '.join(arguments)} ended with {running.returncode}: {last}"
    return [line for line in lines if line]


def _small_trainer(
    device: torch.device, plan: str, options: dict[str, object], model: str = "tiny"
) -> Trainer:
    config = preset(model).model_copy(update=options)
    tokens = torch.randint(config.vocab_size, (8, 129), generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):
        built = Transformer(config)
    return Trainer(
        built,
        TrainingData([(sample[:-1], sample[1:]) for sample in tokens], sequence=128),
        f"dp=1,microbatch=4,{plan}",
        batch=4,
        steps=100,
        optimizer=OptimizerConfig(warmup=0, learning_rate=1e-3),
        device=device,
    )


def _require_core() -> None:
    if not is_built():
        why = os.environ.get(CORE_FAILURE, "the native core is not built")
        raise Lacking(f"ranks cannot share the GPU: {why}")


def _require_same(given: Sequence[float], wanted: Sequence[float], tolerance: float = _TOLERANCE) -> None:
    for number, (one, other) in enumerate(zip(given, wanted, strict=True)):
        is_same = math.isclose(one, other, rel_tol=tolerance)
        assert is_same, f"loss {number} is {one:.5f}, wanted {other:.5f} within {tolerance:g} of it"


def _require_finite(results: Sequence[object]) -> None:
    losses = [float(result.loss) for result in results]  # type: ignore[attr-defined]
    assert all(map(math.isfinite, losses)), f"losses {losses}"


def _last_step(metrics: Path) -> int:
    """Return the last step of a file of metrics, whose last line may be torn; 0 for none."""
    steps = [0]
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        with contextlib.suppress(ValueError):
            steps.append(json.loads(line).get("step", 0))
    return max(steps)
