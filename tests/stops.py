"""Sends each signal to a small training in each phase, and keeps what became of it: `python tests/stops.py`.

Each cell starts `shoal train` on two ranks in one of four ways, waits for a phase, sends a signal to the
launcher, to its process group, or to every process of the run, and waits until all processes have ended.
Lines are written to docs/reference/signals.jsonl, from which docs/generate.py makes the table of a page.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from repeat import ROOT, git

from shoal.checkpoint import checkpoints, step_of
from shoal.spec.run import Run

LINES = ROOT / "docs" / "reference" / "signals.jsonl"
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
TARGETS = ("launcher", "group", "every process")
PHASES = ("start", "data", "compile", "step", "validation", "save")
LAUNCHERS = ("--nproc 2", "--nproc 1:2", "torchrun", "srun")
MARK = "SHOAL_TEST_MARK"
STEPS = 5
PATIENCE = 240.0

SRUN = """
import os, signal, subprocess, sys
tasks = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: [task.send_signal(number) for task in tasks])
for rank in range(2):
    names = {"STEP_NUM_TASKS": "2", "PROCID": str(rank), "LOCALID": str(rank), "STEP_NODELIST": "localhost"}
    names = {"SLURM_" + name: value for name, value in names.items()}
    tasks.append(subprocess.Popen(sys.argv[1:], env={**os.environ, **names}, start_new_session=True))
sys.exit(max(task.wait() for task in tasks))
"""
"""What srun does of interest here: it starts the tasks, passes signals on, and ends with the highest code."""

SETTINGS = {
    "start": (),
    "data": ("data.source=text", "data.tokenizer=tokenizer.json", "data.workers=2", "data.cache=cache"),
    "compile": (),
    "step": (),
    "validation": (f"validation.every={STEPS}", "validation.samples=1000000"),
    "save": (f"checkpoint.every={STEPS}", "checkpoint.background=false", "model_options.hidden=768"),
}


def main() -> int:
    """Run the cells; return 1 if one lost a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    every = {"signal": SIGNALS, "target": TARGETS, "phase": PHASES, "launcher": LAUNCHERS}
    for name, possible in every.items():
        parser.add_argument(f"--{name}", choices=possible, nargs="+", default=possible)
    parser.add_argument("--lines", type=Path, default=LINES, help="the file that the lines are kept in")
    parser.add_argument("--new", action="store_true", help="leave out cells that are kept")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the processes of the cell
    for ignored in (signal.SIGINT, signal.SIGHUP):  # by a shell that starts this in the background, or nohup
        signal.signal(ignored, signal.SIG_DFL)
    kept = [json.loads(each) for each in given.lines.open()] if given.lines.exists() else []
    is_right = True
    for launcher, phase, target, name in itertools.product(
        given.launcher, given.phase, given.target, given.signal
    ):
        cell = {"launcher": launcher, "phase": phase, "target": target, "signal": name}
        if given.new and any(cell.items() <= each.items() for each in kept):
            continue
        line = {**cell, **become_of(launcher, phase, target, name)}
        print(json.dumps(line), flush=True)
        is_right &= line["right"]
        kept = [each for each in kept if any(each[key] != cell[key] for key in cell)] + [line]
        given.lines.write_text("".join(json.dumps(each) + "\n" for each in kept), encoding="utf-8")
    return 0 if is_right else 1


def become_of(launcher: str, phase: str, target: str, name: str) -> dict[str, Any]:
    """Run one cell; return what became of it."""
    with tempfile.TemporaryDirectory(prefix="shoal-stops-") as directory:
        folder = Path(directory)
        if phase == "data":
            write_data(folder)
        mark, run = uuid.uuid4().hex, Run(folder / "run")
        environment = {
            **os.environ,
            MARK: mark,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(20000 + os.getpid() % 9000),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        }
        with (folder / "out").open("w") as out:
            process = subprocess.Popen(
                command(launcher, phase),
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(lambda: process.poll() is not None or has_begun(phase, mark, run))
            began, number = time.monotonic(), getattr(signal, name)
            if process.poll() is None and target == "launcher":
                process.send_signal(number)
            elif process.poll() is None and target == "group":
                os.killpg(process.pid, number)
            else:
                for each in family(mark):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, number)
            wait_until(lambda: process.poll() is not None and not family(mark))
            seconds = time.monotonic() - began
        finally:
            for each in family(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        code = process.wait()
        steps = [values["step"] for values in run.metrics() if "loss" in values]
        saved = [step_of(path) for path in checkpoints(run.checkpoints)]
        made, newest = max(steps, default=0), max(saved, default=0)
        told = [line for line in (folder / "out").read_text().splitlines() if "stopped by" in line]
    is_known = launcher != "torchrun"  # which has codes of its own
    return {
        "code": code,
        "made": made,
        "saved": newest,
        "seconds": round(seconds, 1),
        "told": told[:1],
        "right": made == newest and (code == 75 or not is_known),
        "commit": git("rev-parse", "--short=8", "HEAD"),
    }


def command(launcher: str, phase: str) -> list[str]:
    """The command line of a training."""
    plan = "dp=2,compile=blocks" if phase == "compile" else "dp=2"
    settings = ("batch=4", "sequence=64", "steps=100000", "model_options.layers=1", "device=cpu")
    settings += ("validation.samples=8", "validation.every=0", "checkpoint.every=0", *SETTINGS[phase])
    train = [sys.executable, "-m", "shoal", "train", "--run", "run", "--plan", plan]
    train += [word for setting in settings for word in ("--set", setting)]
    if launcher.startswith("--nproc"):
        return [*train, *launcher.split()]
    if launcher == "srun":
        return [sys.executable, "-c", SRUN, *train]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    torchrun += ["--signals-to-handle", ",".join(SIGNALS)]  # by itself it does not heed SIGUSR1
    return [*torchrun, "--master-port", str(20000 + os.getpid() % 9000), "--", *train]


def has_begun(phase: str, mark: str, run: Run) -> bool:
    """Whether a training is in a phase."""
    if phase == "start":  # a rank, or the launcher of Shoal, imports torch
        return any("libtorch" in read(each, "maps") for each in family(mark) if is_shoal(each))
    if phase == "data":
        return any("shoal.data.workers" in read(each, "cmdline") for each in family(mark))
    if phase == "compile":
        return any(read(each, "comm").strip() in ("cc1plus", "g++") for each in family(mark))
    if phase == "save":
        return any(not path.name[-1].isdigit() for path in run.checkpoints.glob("*"))
    if len(run.metrics()) < STEPS:
        return False
    time.sleep(1.0 if phase == "validation" else 0.0)  # the save before it takes less
    return True


def write_data(folder: Path) -> None:
    """Write a text that takes some seconds to encode, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", *(f"w{number}" for number in range(300))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text").mkdir()
    for number in range(200):
        (folder / "text" / f"{number}.txt").write_text(" ".join(words[1 + at % 300] for at in range(100_000)))


def family(mark: str) -> list[int]:
    """The processes of a run, from the launcher on."""
    return [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/environ")
        if f"{MARK}={mark}" in read(int(path.parent.name), "environ")
    ]


def is_shoal(process: int) -> bool:
    """Whether a process is the command `shoal`."""
    return read(process, "cmdline").split("\0")[1:3] == ["-m", "shoal"]


def read(process: int, name: str) -> str:
    """A file of /proc of a process; empty if it has ended."""
    try:
        return Path("/proc", str(process), name).read_text(errors="replace")
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, at most some minutes."""
    until = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
