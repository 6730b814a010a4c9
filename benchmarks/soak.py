"""A long training under random faults, beside one without: goodput, losses, and what leaks.

    python benchmarks/soak.py [--minutes 120] [--between 5,30] [--step 0.15] [--write benchmarks/soak.md]

Trainings run at the same time, each `shoal train --nproc 1:2` of a small model: one without faults, and one
for each mean time between failures. A step waits as long as a device would take, so that they hardly share
the cores. Between two faults is a time from the exponential distribution; each draws a kind and a rank, from
a generator with a seed:

    kill, segfault   the signal, to a rank
    exception        the user's code raises on a rank
    stop             SIGSTOP to a rank, which does not wake again
    pause            SIGSTOP to a rank for 3 s: a slow rank, which is not a dead one
    leave            SIGTERM to a rank
    all              SIGKILL to the launcher, with which all ranks end; this program starts it again

Goodput and the seconds lost are those of `shoal.account`. Losses are compared as means over each tenth of the
run. Every half minute the processes, descriptors, threads and private memory of each training are counted,
of which the table has medians of the first and of the last quarter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

import shoal
from shoal.machine.bench import describe
from shoal.spec.run import Run
from shoal.testing.words import write_words
from shoal.units import format_bytes, format_seconds

KINDS = ("kill", "segfault", "exception", "stop", "pause", "leave", "all")
MARK = "SOAK_MARK"
PAUSE, SAMPLE, LAUNCHES = 3.0, 30.0, 1000
USERS_CODE = """
import os, time
from pathlib import Path

MEMBER, STEP = os.environ.get("SHOAL_MEMBER", ""), float(os.environ["SOAK_STEP"])
FAULT = Path(os.environ["SOAK_FOLDER"]) / f"raise-{MEMBER}"


def constant(step, steps):
    time.sleep(STEP)
    if FAULT.exists():
        FAULT.unlink()
        raise RuntimeError("a fault of this rank")
    return 1.0
"""


@dataclass
class Soak:
    """One training.

    Attributes:
        folder: Where it runs.
        between: Mean seconds between two faults; infinite for none.
        steps: Steps to make.
        step: Seconds that a step waits.
        seed: Of what is drawn.
        faults: How often each kind struck.
        samples: Processes, descriptors, threads and bytes of private memory, in time.
        ended: Exit code of the last command.
        left: Processes that outlived the training.
    """

    folder: Path
    between: float
    steps: int
    step: float
    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[int, int, int, int]] = field(default_factory=list)
    ended: int | None = None
    left: int = 0

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.folder / "one"

    def soak(self, text: Path) -> None:
        """Train to the end, whatever happens."""
        self.folder.mkdir()
        (self.folder / "soak_at_home.py").write_text(USERS_CODE)
        over = threading.Event()
        works = [self._sample] if math.isinf(self.between) else [self._sample, self._strike]
        beside = [threading.Thread(target=work, args=(over,)) for work in works]
        for thread in beside:
            thread.start()
        for _ in range(LAUNCHES):
            self.ended = self._launch(text)
            if self.ended not in (-signal.SIGKILL, 75):
                break
            while family(self.folder):  # ranks end with their launcher, a moment later
                time.sleep(0.05)
        over.set()
        for thread in beside:
            thread.join()
        self.left = len(family(self.folder))

    def _launch(self, text: Path) -> int:
        settings = (
            f"data.source={text}",
            "model_options={layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, seq=32}",
            "sequence=32",
            "batch=4",
            "validation.samples=8",
            "validation.every=1000",
            f"steps={self.steps}",
            "optimizer.schedule=soak_at_home:constant",
            "checkpoint.every=auto",
            f"checkpoint.mtbf={min(self.between / 3600, 24.0):.4f}",
            "timeout=60",
        )
        words = [word for setting in settings for word in ("--set", setting)]
        begins = not (self.run / "run.json").exists()
        words += ["--run", "one"] if begins else ["--resume", "one"]
        with (self.folder / "output").open("a") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "shoal", "train", "--nproc", "1:2", "--restarts", "100000", *words],
                cwd=self.folder,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "SOAK_STEP": repr(self.step),
                    "SOAK_FOLDER": str(self.folder),
                    MARK: str(self.folder),
                },
                stdout=output,
                stderr=output,
            ).wait()

    def _strike(self, over: threading.Event) -> None:
        """Let faults happen until the training is over."""
        drawn = random.Random(self.seed)
        while not over.wait(drawn.expovariate(1 / self.between)):
            kind, place = drawn.choice(KINDS), drawn.random()
            ranks = ranks_of(self.folder)
            if not ranks or not (self.run / "metrics.jsonl").exists():
                continue
            member = sorted(ranks)[int(place * len(ranks))]
            if self._fault(kind, member, ranks[member]):
                self.faults[kind] += 1

    def _fault(self, kind: str, member: int, process: int) -> bool:
        """Let one fault happen; return whether it could."""
        numbers = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "leave": signal.SIGTERM}
        try:
            match kind:
                case "exception":
                    (self.folder / f"raise-{member}").touch()
                case "stop":
                    os.kill(process, signal.SIGSTOP)
                case "pause":
                    os.kill(process, signal.SIGSTOP)
                    time.sleep(PAUSE)
                    os.kill(process, signal.SIGCONT)
                case "all":
                    os.kill(launcher_of(self.folder), signal.SIGKILL)
                case _:
                    os.kill(process, numbers[kind])
        except ProcessLookupError:
            return False
        return True

    def _sample(self, over: threading.Event) -> None:
        while not over.wait(SAMPLE):
            found = family(self.folder)
            counts = [counts_of(process) for process in found]
            if found:
                descriptors, threads, memory = map(sum, zip(*counts, strict=True))
                self.samples.append((len(found), descriptors, threads, memory))


def family(folder: Path) -> list[int]:
    """Return the processes of a training."""
    mark, found = f"{MARK}={folder}\0".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes() + b"\0":
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def ranks_of(folder: Path) -> dict[int, int]:
    """Return the process of each rank that is running."""
    found = {}
    for process in family(folder):
        try:
            name = Path(f"/proc/{process}/comm").read_text().strip()
        except OSError:
            continue
        if name.startswith("shoal-rank-"):
            found[int(name.rpartition("-")[2])] = process
    return found


def launcher_of(folder: Path) -> int:
    """Return the process that this one started.

    Raises:
        ProcessLookupError: There is none now.
    """
    for process in family(folder):
        status = Path(f"/proc/{process}/status")
        if status.exists() and f"PPid:\t{os.getpid()}\n" in status.read_text():
            return process
    raise ProcessLookupError


def counts_of(process: int) -> tuple[int, int, int]:
    """Return the descriptors, threads and bytes of private memory of a process."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
        values = dict(line.split(":", 1) for line in status.splitlines())
        descriptors = len(list(Path(f"/proc/{process}/fd").iterdir()))
        return descriptors, int(values["Threads"]), 1024 * int(values.get("RssAnon", "0 kB").split()[0])
    except (OSError, KeyError):
        return 0, 0, 0


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step; the last one, if a step was made again."""
    return {each["step"]: each["loss"] for each in Run.open(run).metrics() if "loss" in each}


def growth(samples: list[tuple[int, int, int, int]]) -> str:
    """Return the medians of the first and of the last quarter of samples; "" if there are none."""
    if not samples:
        return ""
    quarter = max(1, len(samples) // 4)
    parts = samples[:quarter], samples[-quarter:]
    (*before, least), (*after, most) = (
        [median(column) for column in zip(*part, strict=True)] for part in parts
    )
    names = ("processes", "descriptors", "threads")
    counts = [f"{name} {x:g} to {y:g}" for name, x, y in zip(names, before, after, strict=True)]
    return ", ".join([*counts, f"memory {format_bytes(round(least))} to {format_bytes(round(most))}"])


def report(soaks: list[Soak], say: Callable[[str], None]) -> bool:
    """Say what became of the trainings, the first of which had no faults; return whether all is well."""
    unbroken = losses(soaks[0].run)
    steps, is_well = soaks[0].steps, True
    say("| between failures | faults | steps | wall | goodput | lost | loss differs | quarters |")
    say("| --- | --- | ---: | ---: | ---: | --- | ---: | --- |")
    for each in soaks:
        account, made = shoal.account(each.run), losses(each.run)
        assert account is not None
        tenths = [range(1 + tenth * steps // 10, 1 + (tenth + 1) * steps // 10) for tenth in range(10)]
        all_made = set(made) == set(range(1, steps + 1))
        differs = (
            max(abs(fmean(made[n] for n in t) / fmean(unbroken[n] for n in t) - 1) for t in tenths)
            if all_made
            else math.inf
        )
        lost = sorted(account.lost.items(), key=lambda item: -item[1])
        causes = ", ".join(f"{cause} {format_seconds(seconds)}" for cause, seconds in lost if seconds >= 0.5)
        struck = ", ".join(f"{kind} {count}" for kind, count in sorted(each.faults.items())) or "none"
        between = "none" if math.isinf(each.between) else format_seconds(each.between)
        say(
            f"| {between} | {struck} | {len(made)} of {steps} | {format_seconds(account.wall)} | "
            f"{account.goodput:.2%} | {causes} | {differs:.2%} | {growth(each.samples)} |"
        )
        if each.ended != 0 or each.left or not all_made:
            is_well = False
            say(f"\nexit code {each.ended}, {each.left} processes left, see {each.folder / 'output'}\n")
    return is_well


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120, help="about how long (default 120)")
    parser.add_argument("--between", default="5,30", help="mean minutes between failures (default 5,30)")
    parser.add_argument("--step", type=float, default=0.15, help="seconds that a step waits (default 0.15)")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--write", type=Path, help="file for the table too")
    options = parser.parse_args()
    steps = round(60 * options.minutes / (1.07 * options.step))
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    write_words(folder / "text", documents=400)
    times = [math.inf, *(60 * float(minutes) for minutes in options.between.split(","))]
    soaks = [
        Soak(folder / f"soak-{number}", between, steps, options.step, options.seed + number)
        for number, between in enumerate(times)
    ]
    shared = set(os.listdir("/dev/shm"))
    threads = [threading.Thread(target=each.soak, args=(folder / "text",)) for each in soaks]
    for thread in threads:
        thread.start()
        time.sleep(5)  # the first one tokenizes
    for thread in threads:
        thread.join()
    lines = [f"`python benchmarks/soak.py {' '.join(sys.argv[1:])}`", ""]
    is_well = report(soaks, lines.append)
    left = sorted(set(os.listdir("/dev/shm")) - shared)
    lines += ["", f"New in /dev/shm afterwards: {', '.join(left) or 'nothing'}.", "", f"    {describe()}"]
    print("\n".join(lines))
    if options.write:
        options.write.write_text("\n".join(["# A long training under random faults", "", *lines, ""]))
    (folder / "soaks.json").write_text(json.dumps([each.samples for each in soaks]))
    return int(not is_well)


if __name__ == "__main__":
    sys.exit(main())
