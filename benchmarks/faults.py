"""What becomes of a training when something fails: kinds of fault by phase of the training.

    python benchmarks/faults.py [--times 1] [--kinds kill,stop] [--phases forward,save]

Each trial is `shoal train --nproc 1:2` of a small model for 12 steps. Rank 1 suffers the fault in its seventh
step, in the phase that the trial names, after a random wait; "load" is the load of a run that is taken up,
and "start" the import of the user's code. A trial is good if

- the run reaches its end, with the losses of an unbroken run to 1e-4 ("recovers"), or
- it ends with the cause in its first lines, and goes on with `--resume` to the same losses ("named").

Detection is the time from the fault to the launcher's note of a lost rank, and recovery that to the end of
the next step. Waits are drawn evenly between 0 and half a step, from a generator with a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from shoal.bench import describe
from shoal.run import Run
from shoal.timeline import Timeline

STEPS, FAULT = 12, 6
PHASES = ("start", "forward", "backward", "collective", "save", "load")
KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "segfault": "SIGSEGV",
    "exception": "an exception of the user's code",
    "interpreter": "native code that keeps the interpreter's lock for 60 s",
    "memory": "no more memory for this process",
    "disk": "the disk of the run is full from now on",
    "slow": "a pause of 3 s",
    "clock": "the wall clock jumps ahead by an hour",
    "store": "SIGKILL of the launcher, which holds the store of the ranks",
}
MENTIONS = {
    "exception": "a fault of this rank",
    "memory": "memory",
    "disk": "No space left",
    "interpreter": "did not come",
}
"""What the first lines must say of a run that ends, other than the name of the signal."""

INJECTION = '''
import ctypes, os, resource, signal, threading, time
from pathlib import Path

KIND, PHASE = os.environ.get("FAULT_KIND", ""), os.environ.get("FAULT_PHASE", "")
HERE = Path(os.environ.get("FAULT_FOLDER", "."))


def is_struck():
    return os.environ.get("SHOAL_MEMBER") == "1" and not (HERE / "struck").exists()


def strike():
    if not is_struck():
        return
    time.sleep(float(os.environ["FAULT_WAIT"]))
    (HERE / "struck").write_text(repr(time.time()))
    if KIND == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif KIND == "segfault":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif KIND == "exception":
        raise RuntimeError("a fault of this rank")
    elif KIND == "interpreter":
        ctypes.PyDLL(None).sleep(60)
    elif KIND == "memory":
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (in_use, in_use))
        bytearray(1 << 30)
    elif KIND == "disk":
        with open(HERE / "disk" / "ballast", "wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            except OSError:
                pass
    elif KIND == "slow":
        time.sleep(3)
    elif KIND == "clock":
        now, now_ns = time.time, time.time_ns
        time.time, time.time_ns = lambda: now() + 3600, lambda: now_ns() + 3600 * 10**9
    elif KIND == "store":
        os.kill(int(os.environ["LAUNCHED_BY"]), signal.SIGKILL)


def before(holder, name):
    """Strike before the next call of a function."""
    original = getattr(holder, name)

    def struck_before(*arguments, **named):
        setattr(holder, name, original)
        strike()
        return original(*arguments, **named)

    setattr(holder, name, struck_before)


def strike_in_forward(module, inputs):
    handle.remove()
    strike()


def strike_in_backward(module, inputs, output):
    if getattr(output, "requires_grad", False):
        handle.remove()
        output.register_hook(lambda gradient: strike())


if PHASE == "start" and is_struck():
    strike()
if PHASE == "load" and is_struck():
    from importlib import import_module
    before(import_module("shoal.checkpoint.load_verified"), "_read_and_verify")


def begin(step, steps):
    global handle
    if step == 6 and is_struck():
        from torch.nn.modules import module
        if PHASE == "forward":
            handle = module.register_module_forward_pre_hook(strike_in_forward)
        elif PHASE == "backward":
            handle = module.register_module_forward_hook(strike_in_backward)
        elif PHASE == "collective":
            from shoal.parallel.communication import Axis
            before(Axis, "all_reduce")
        elif PHASE == "save":
            from shoal.checkpoint.save import Saver
            before(Saver, "_write_part")
    return 1.0
'''

PROGRAM = (
    "import os, sys; os.environ['LAUNCHED_BY'] = str(os.getpid()); "
    "from shoal.cli.main import main; sys.exit(main())"
)


@dataclass
class Cell:
    """The trials of one kind in one phase."""

    outcomes: list[str] = field(default_factory=list)
    detected: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


class Bench:
    """Runs trials in a folder of its own, and judges each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "text").mkdir()
        generator = random.Random(0)
        words = ["shoal", "fish", "ring", "of", "the", "a", "turns", "as", "one", "with", "no", "leader"]
        for document in range(40):
            text = " ".join(generator.choices(words, k=160))
            (folder / "text" / f"document-{document:02d}.txt").write_text(text)
        self.waits = random.Random(1)
        (folder / "unbroken").mkdir()
        unbroken = self.train(folder / "unbroken", "", "")
        self.losses = losses(folder / "unbroken" / "disk" / "one")
        assert unbroken.returncode == 0, unbroken.stderr
        assert len(self.losses) == STEPS

    def train(
        self, folder: Path, kind: str, phase: str, *words: str, steps: int = STEPS
    ) -> subprocess.CompletedProcess[str]:
        """Train in a folder; with a kind, the fault strikes once."""
        (folder / "injection_at_home.py").write_text(INJECTION)
        (folder / "disk").mkdir(exist_ok=True)
        settings = (
            f"data.source={self.folder / 'text'}",
            f"data.cache={self.folder / 'cache'}",
            "model_options={layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, seq=32}",
            "sequence=32",
            "batch=4",
            "optimizer.warmup=2",
            "validation.samples=8",
            f"steps={steps}",
            "optimizer.schedule=injection_at_home:begin",
            "checkpoint.every=3",
            "timeout=20",
        )
        own = [word for setting in settings for word in ("--set", setting)]
        own += [] if "--resume" in words else ["--run", "disk/one"]
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, "train", "--nproc", "1:2", *own, *words],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "FAULT_KIND": kind,
                "FAULT_PHASE": phase if kind else "",
                "FAULT_FOLDER": str(folder),
                "FAULT_WAIT": repr(self.waits.uniform(0, 0.02)),
            },
            capture_output=True,
            text=True,
            timeout=240,
        )

    def trial(self, kind: str, phase: str, cell: Cell) -> None:
        """Make one trial and judge it."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "disk").mkdir()
        if kind == "disk":
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder / "disk")], check=True
            )
        try:
            self._judge(kind, phase, folder, cell)
        except subprocess.TimeoutExpired:
            cell.outcomes.append("BAD")
            cell.bad.append("it hung")
        finally:
            if kind == "disk":
                subprocess.run(["umount", str(folder / "disk")], check=True)
            shutil.rmtree(folder, ignore_errors=True)

    def _judge(self, kind: str, phase: str, folder: Path, cell: Cell) -> None:
        run, words = folder / "disk" / "one", []
        if phase == "load":
            assert self.train(folder, "", "", steps=FAULT).returncode == 0
            words = ["--resume", "disk/one"]
        ended = self.train(folder, kind, phase, *words)
        if not (folder / "struck").exists():
            cell.outcomes.append("BAD")
            cell.bad.append(f"the fault did not strike: {last_line(ended.stderr)}")
            return
        struck = float((folder / "struck").read_text())
        named = ended.returncode != 0
        if named:
            require_none_left(folder)
            (folder / "disk" / "ballast").unlink(missing_ok=True)
            if kind != "store" and MENTIONS.get(kind, "SIG") not in ended.stderr[:2000]:
                cell.bad.append(f"the cause is not named: {ended.stderr[:300]!r}")
            start = ["--resume", "disk/one"] if (run / "run.json").exists() else []
            if start and not any((run / "checkpoints").glob("step-*")):
                shutil.rmtree(run)
                start = []
            went_on = self.train(folder, "", "", *start)
            if went_on.returncode != 0:
                cell.bad.append(f"it does not go on: {last_line(went_on.stderr)}")
        differs = [
            step for step, loss in self.losses.items() if abs(losses(run).get(step, 0.0) / loss - 1) > 1e-4
        ]
        if differs:
            cell.bad.append(f"the losses of steps {differs} differ")
        cell.outcomes.append("BAD" if cell.bad else "named" if named else "recovers")
        if not named:
            self._time(run, phase, struck, ended.stderr, cell)

    def _time(self, run: Path, phase: str, struck: float, told: str, cell: Cell) -> None:
        members = run / "members.jsonl"
        events = [json.loads(line) for line in members.read_text().splitlines()] if members.exists() else []
        lost = [each["time"] - struck for each in events if each["event"] == "lost"]
        if not lost:
            return
        cell.detected.append(lost[0])
        timeline = Timeline.read(run / "timeline")
        ends = [
            timeline.origin_unix_ns / 1e9 + span.stop - struck
            for span in timeline
            if span.kind == "step" and span.rank == 0
        ]
        cell.recovered.append(min(end for end in ends if end > lost[0]))
        if phase not in ("start", "load") and "goes on from" in told:
            at = told.split("goes on from ")[1].splitlines()[0]
            cell.lost.append(FAULT - int(at.rpartition("step-")[2]))


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step of a run; the last one, if a step was made again."""
    if not (run / "run.json").exists():
        return {}
    return {each["step"]: each["loss"] for each in Run.open(run).metrics() if "loss" in each}


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def require_none_left(folder: Path) -> None:
    """Wait until no process of a trial is left.

    Raises:
        subprocess.TimeoutExpired: One is left after 30 s.
    """
    deadline = time.monotonic() + 30
    while left := [path for path in Path("/proc").glob("[0-9]*") if is_in(path, folder)]:
        if time.monotonic() > deadline:
            for path in left:
                os.kill(int(path.name), 9)
            raise subprocess.TimeoutExpired("processes that are left", 30)
        time.sleep(0.1)


def is_in(process: Path, folder: Path) -> bool:
    """Return whether a process works in a folder."""
    try:
        return (process / "cwd").readlink() == folder
    except OSError:
        return False


def row(kind: str, phase: str, cell: Cell) -> str:
    """Return a row of the table."""

    def seconds(values: Sequence[float]) -> str:
        return f"{median(values):.2f} ({max(values):.2f})" if values else ""

    counts = {each: cell.outcomes.count(each) for each in ("recovers", "named", "BAD")}
    outcome = ", ".join(f"{each} {count}" for each, count in counts.items() if count)
    lost = f"{max(cell.lost)}" if cell.lost else ""
    return f"| {kind} | {phase} | {outcome} | {seconds(cell.detected)} | {seconds(cell.recovered)} | {lost} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=1, help="trials of each kind in each phase (default 1)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds, with commas between")
    parser.add_argument("--phases", default=",".join(PHASES), help="phases, with commas between")
    options = parser.parse_args()
    unknown = [kind for kind in options.kinds.split(",") if kind not in KINDS]
    unknown += [phase for phase in options.phases.split(",") if phase not in PHASES]
    if unknown:
        parser.error(f"{unknown[0]} is unknown; kinds: {', '.join(KINDS)}; phases: {', '.join(PHASES)}")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        print("Seconds are medians, with the largest in brackets.\n")
        print("| fault | phase | outcome | noted after, s | next step after, s | steps lost |")
        print("| --- | --- | --- | --- | --- | --- |")
        for kind in options.kinds.split(","):
            for phase in options.phases.split(","):
                cell = Cell()
                for _ in range(options.times):
                    bench.trial(kind, phase, cell)
                print(row(kind, phase, cell), flush=True)
                for each in dict.fromkeys(cell.bad):
                    print(f"  {kind}, {phase}: {each}", file=sys.stderr, flush=True)
                bad += len(cell.bad)
    print(f"\n    {describe()}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
