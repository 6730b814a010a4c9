"""Two processes that write one run: what becomes of the run, and what the second one is told.

    python benchmarks/writers.py [--cases "two hosts,stopped"] [--locks true,none,lying]
        [--write benchmarks/writers.md]

Takes root on Linux. Each case starts two commands `shoal train` of a small model in one run directory. A
second host is a mount, process, and host-name namespace with another boot id, which sees the same directory.
Locks of the run's files are the system's own ("true"), refused as by a file system without them ("none"), or
granted to everybody as by one where they do not reach another host ("lying"): a library that is loaded before
the system's replaces `flock`.

A case is good if every checkpoint verifies, the metrics go back to an earlier step once at most, as a resume
does, the command that trains ends with 0, and the other one with 2 and a line that says who writes the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shoal.checkpoint import checkpoints, verify
from shoal.errors import ShoalError
from shoal.machine.bench import describe

CASES = {
    "at once": "two commands on one host, started together",
    "later": "a second command on the host, 5 steps later",
    "two hosts": "a second command on another host, 5 steps later",
    "requeued": "all processes of the first are killed; the second starts on another host",
    "restarted": "all processes of the first are killed; the second starts on the same host",
    "stopped here": "all processes of the first are stopped (SIGSTOP); the second starts on the same host",
    "stopped": "as before, and the second starts on another host; after 60 s the first one is continued",
}
LOCKS = ("true", "none", "lying")
STEPS, EVERY = 300, 10
_FLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int flock(int file, int operation) {
    char name[64], path[4096] = {0};
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    if (readlink(name, path, sizeof path - 1) > 0 && strstr(path, "/run/")) { ANSWER }
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(file, operation);
}
"""
_ANSWERS = {"none": "errno = ENOLCK; return -1;", "lying": "return 0;"}
_SETTINGS = (
    *("batch=4", "sequence=64", f"steps={STEPS}"),
    *("validation.samples=8", "validation.every=0", f"checkpoint.every={EVERY}", "checkpoint.keep=1000"),
    *("device=cpu", "model=writers_slow:model"),
)
_MODEL = """
import time
from shoal.models import Transformer, TransformerConfig

def model():
    sizes = dict(layers=1, hidden=32, heads=2, kv_heads=1, ffn=64, seq=64)
    made = Transformer(TransformerConfig(vocab_size=400, **sizes))
    made.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    return made
"""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case.

    Attributes:
        codes: Exit codes of the first and the second command.
        said: The line of the one that was refused, or that waited.
        seconds: From the start of the second command to its first step, or to its end.
        checkpoints, corrupt: Numbers of complete checkpoints, and of those that are not sound.
        back: How often the metrics go back to a step that is there.
        is_good: Whether all is as it has to be.
    """

    codes: tuple[int, int]
    said: str
    seconds: float
    checkpoints: int
    corrupt: int
    back: int
    is_good: bool


class Command:
    """A command `shoal train`, on this host or on another one."""

    def __init__(self, run: Path, environment: Mapping[str, str], boot: Path | None) -> None:
        words = [
            sys.executable,
            "-m",
            "shoal",
            "train",
            "--run",
            str(run),
            "--resume",
            "auto",
            "--plan",
            "dp=2",
        ]
        words += [word for each in _SETTINGS for word in ("--set", each)]
        if boot is not None:
            inside = f'mount --bind {boot} /proc/sys/kernel/random/boot_id; hostname second; exec "$@"'
            space = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
            words = [*space, "sh", "-c", inside, "sh", *words]
        self.output = run.parent / f"{uuid.uuid4().hex}.txt"
        self.began = time.monotonic()
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                words, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of the command."""
        for pid in descendants(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> int:
        """Return the exit code, once it has ended."""
        return self.process.wait(600)

    def said(self) -> str:
        """Return the first line that speaks of another process."""
        lines = self.output.read_text(errors="replace").splitlines()
        told = [
            line.strip() for line in lines if " writes " in line or "given up" in line or "shoal:" in line
        ]
        return max(told, key=lambda line: " writes " in line, default="")


def descendants(pid: int) -> list[int]:
    """Return a process and all that it started, the newest last."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def steps_in(run: Path) -> list[int]:
    """Return the steps of the metrics, as they were written."""
    try:
        text = (run / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    return [row["step"] for row in rows if "loss" in row]


def wait_for_steps(run: Path, number: int, commands: Sequence[Command]) -> None:
    """Return once there are so many steps, or a command has ended."""
    while len(steps_in(run)) < number and all(each.process.poll() is None for each in commands):
        time.sleep(0.1)


def make(case: str, environment: Mapping[str, str], folder: Path) -> Result:
    """Make a case."""
    run, boot = folder / "run", folder / "boot"
    boot.write_text(f"{uuid.uuid4()}\n")
    first = Command(run, environment, None)
    if case != "at once":
        wait_for_steps(run, 5 + EVERY, [first])
    if case in ("requeued", "restarted"):
        first.signal_all(signal.SIGKILL)
    if case.startswith("stopped"):
        first.signal_all(signal.SIGSTOP)
    made = len(steps_in(run))
    second = Command(run, environment, boot if case in ("two hosts", "requeued", "stopped") else None)
    if case == "stopped":
        wait_for_steps(run, made + 5, [second])
        seconds = time.monotonic() - second.began
        time.sleep(max(0.0, 60.0 - seconds))
        first.signal_all(signal.SIGCONT)
    elif case == "stopped here":
        second.end()
        seconds = time.monotonic() - second.began
        first.signal_all(signal.SIGCONT)
    elif case in ("requeued", "restarted"):
        wait_for_steps(run, made + 1, [second])
        seconds = time.monotonic() - second.began
    else:
        refused = [first, second]
        while all(each.process.poll() is None for each in refused):
            time.sleep(0.05)
        seconds = time.monotonic() - second.began
    return judge(case, run, (first, second), seconds)


def judge(case: str, run: Path, commands: tuple[Command, Command], seconds: float) -> Result:
    """Return what became of a case, once both commands have ended."""
    codes = commands[0].end(), commands[1].end()
    corrupt, found = 0, checkpoints(run / "checkpoints")
    for path in found:
        try:
            verify(path)
        except ShoalError:
            corrupt += 1
    steps = steps_in(run)
    back = sum(later <= before for before, later in pairwise(steps))
    told = commands[0] if codes[0] == 2 else commands[1]  # who was refused, or had to wait
    said = told.said().replace(str(run.parent), "")
    wanted = {(-9, 0)} if case in ("requeued", "restarted") else {(2, 0)} if case == "stopped" else {(0, 2)}
    if case == "at once":
        wanted = {(0, 2), (2, 0)}
    may_go_back = case in ("requeued", "restarted", "stopped")
    is_good = (
        codes in wanted and not corrupt and back <= may_go_back and set(range(1, STEPS + 1)) <= set(steps)
    )
    return Result(codes, said, seconds, len(found), corrupt, back, is_good)


def page(results: Mapping[tuple[str, str], Result]) -> str:
    """Return the page of results."""
    lines = [
        "# Two writers of one run",
        "",
        "`python benchmarks/writers.py --write benchmarks/writers.md`",
        "",
        "What becomes of a run directory in which a second command is started; see `writers.py`. Seconds are",
        "those from the start of the second command to its refusal, or to its first step. The metrics go",
        "back once where a command goes on from a checkpoint.",
        "",
        *(f"- {case}: {text}" for case, text in CASES.items()),
        "",
        "| case | locks | exit codes | seconds | checkpoints | corrupt | steps back | said |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (case, locks), each in results.items():
        codes = ", ".join(map(str, each.codes))
        numbers = f"{each.seconds:.1f} | {each.checkpoints} | {each.corrupt} | {each.back}"
        lines.append(f"| {case} | {locks} | {codes} | {numbers} | {each.said} |")
    return "\n".join([*lines, "", *(f"    {line}" for line in str(describe()).splitlines()), ""])


def environment_for(locks: str, folder: Path) -> dict[str, str]:
    """Return the environment of commands that have locks of a kind."""
    (folder / "writers_slow.py").write_text(_MODEL)
    path = os.pathsep.join([str(folder), str(Path(__file__).resolve().parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if locks != "true":
        source, library = folder / "flock.c", folder / "flock.so"
        source.write_text(_FLOCK.replace("ANSWER", _ANSWERS[locks]))
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        environment["LD_PRELOAD"] = str(library)
    return environment


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help="cases, with commas between")
    parser.add_argument("--locks", default=",".join(LOCKS), help="kinds of locks, with commas between")
    parser.add_argument("--write", type=Path, help="file for the page of results")
    options = parser.parse_args()
    results: dict[tuple[str, str], Result] = {}
    for case in options.cases.split(","):
        for locks in options.locks.split(","):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                result = make(case, environment_for(locks, folder), folder)
            results[case, locks] = result
            print(case, locks, result, flush=True)
    if options.write is not None:
        options.write.write_text(page(results))
    return int(not all(each.is_good for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
