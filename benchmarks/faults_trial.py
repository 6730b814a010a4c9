"""One trial of `faults.py`: a training that suffers a fault, and what became of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults_struck import EVERY, OF_NETWORK
from faults_traces import failures, is_in, is_rank, json_lines, last_line, namespace_of

from shoal.launch.local.fork_server import ForkedRank
from shoal.spec.timeline import Timeline
from shoal.testing.hosts import Hosts
from shoal.testing.programs import Programs
from shoal.testing.words import write_words

STEPS, TO_LOAD = 12, 6
PHASES = ("start", "forward", "backward", "collective", "save", "load")
KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "segfault": "SIGSEGV",
    "exception": "an exception of the user's code",
    "interpreter": "native code that never gives the interpreter's lock back",
    "memory": "no more memory for this process than 32 MiB",
    "disk": "the disk of the run is full from now on",
    "cut": "the cable of the second host is cut",
    "one-way": "all that the second host sends is lost",
    "throttle": "the cable of the second host carries 2 Mbit/s from now on",
    "slow": "a pause of 3 s",
    "corrupt": "one bit changes: in a parameter, or in a file of the checkpoint that is saved or loaded",
    "clock": "the wall clock of this process jumps ahead by an hour",
    "store": "SIGKILL of the launcher, which holds the store of the ranks",
}
MENTIONS = {
    "kill": "SIGKILL",
    "stop": "stopped",
    "segfault": "SIGSEGV",
    "exception": "a fault of this rank",
    "interpreter": "interpreter's lock|did not come",
    "memory": "memory",
    "disk": "No space left",
    "cut": "was silent for",
    "one-way": "was silent for",
    "corrupt": "bits of|bit changed|is corrupt",
}
"""What must be told if the run ends or loses a rank; one of several texts."""

HARMLESS = ("slow", "clock", "throttle")
"""Kinds by which no rank may be lost."""

PORT, THROTTLED = 29800, 2e6
HUNG = 240.0  # seconds
SEEN = 30.0  # seconds in which the second host must see that it is cut off


class TrialError(Exception):
    """A trial did not go as it must."""


@dataclass(kw_only=True)
class Result:
    """What became of a trial.

    Attributes:
        kind: The kind of fault.
        phase: The phase in which it struck.
        number: The number of the trial among those of its kind and phase.
        verdict: "recovers", "named" or "BAD".
        why: What is bad.
        noted: Seconds from the fault until a rank was noted as lost, or the command ended.
        next_step: Seconds from the fault until the end of the next step, if the command went on.
        lost: Steps that were made again.
        load: The machine's load of the last minute, at the end.
    """

    kind: str
    phase: str
    number: int
    verdict: str = "BAD"
    why: str = ""
    noted: float | None = None
    next_step: float | None = None
    lost: int | None = None
    load: float = field(default_factory=lambda: os.getloadavg()[0])


@dataclass(frozen=True)
class Ended:
    """How a training ended: its exit code, what it told, and the time."""

    code: int
    told: str
    at: float


class Ground:
    """What trials share: the text, its tokens, and the losses of an unbroken training.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_words(folder / "text")
        with Programs() as programs, Trial(self, programs, "", "", 0) as unbroken:
            ended = unbroken.train()
            self.losses = unbroken.losses
        assert ended.code == 0, ended.told
        assert len(self.losses) == STEPS


class Trial:
    """A training in a folder of its own, which is removed after the context.

    Args:
        ground: What trials share.
        programs: What starts `shoal`.
        kind: The kind of fault; empty for none.
        phase: Its phase.
        number: The number of the trial, which with kind and phase decides all that is drawn.
    """

    def __init__(self, ground: Ground, programs: Programs, kind: str, phase: str, number: int) -> None:
        self.result = Result(kind=kind, phase=phase, number=number)
        self.told = ""
        self._ground, self._programs = ground, programs
        self._hosts: Hosts | None = None
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Trial:
        self.folder = folder = Path(tempfile.mkdtemp(dir=self._ground.folder))
        self._exits.callback(shutil.rmtree, folder, ignore_errors=True)
        shutil.copy(Path(__file__).with_name("faults_struck.py"), folder)
        (folder / "disk").mkdir()
        if self.result.kind == "disk":
            disk = str(folder / "disk")
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", disk], check=True)
            self._exits.callback(subprocess.run, ["umount", "-l", disk], check=True)
        if self.result.kind in OF_NETWORK:
            self._hosts = self._exits.enter_context(Hosts(2))
        self._exits.callback(self._end_all)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.folder / "disk" / "one"

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step; the last one, if a step was made again."""
        return dict(self._made())

    def _made(self) -> list[tuple[int, float]]:
        """Return each step that was made, with its loss, as often as it was made."""
        lines = json_lines(self.run / "metrics.jsonl")
        return [(each["step"], each["loss"]) for each in lines if "loss" in each]

    def make(self) -> None:
        """Make the trial, and judge it."""
        try:
            self._judge()
        except Exception as error:
            why = str(error) if isinstance(error, TrialError) else repr(error)
            self.result.verdict, self.result.why = "BAD", why
            self.told = "\n".join(path.read_text() for path in sorted(self.folder.glob("told*")))

    def train(self, *words: str, faulty: bool = False, steps: int = STEPS) -> Ended:
        """Train to the end, which the second host need not reach.

        Args:
            words: Further words of the command line.
            faulty: Whether the fault may strike.
            steps: Number of steps.

        Raises:
            TrialError: It hangs.
        """
        resumes = ["--resume", "disk/one"] if (self.run / "run.json").exists() else ["--run", "disk/one"]
        given = [*self._settings(steps), *resumes, *words]
        if self._hosts is None or not faulty:
            ranks = "1:3" if self.result.kind == "corrupt" else "1:2"
            first = self._start([*given, "--nproc", ranks], "told", faulty, {})
        else:
            at = f"{self._hosts.addresses[0]}:{PORT}"
            given += ["--nproc", "1", "--nodes", "1:2", "--rendezvous", at]
            first = self._start_host(0, given, faulty)
            self._wait_for("this host leads", first)  # and has made the token
            second = self._start_host(1, given, faulty)
        deadline = time.monotonic() + HUNG
        while (code := first.poll()) is None:
            if time.monotonic() > deadline:
                raise TrialError("it hangs")
            self._change_network()
            time.sleep(0.003)
        at_end = time.time()
        if self._hosts is None or not faulty:
            return Ended(code, (self.folder / "told").read_text(), at_end)
        self._require_end_of_second(second)
        return Ended(code, (self.folder / "told-0").read_text(), at_end)

    def _wait_for(self, text: str, host: ForkedRank) -> None:
        deadline = time.monotonic() + HUNG
        while text not in (told := (self.folder / "told-0").read_text()):
            if host.poll() is not None or time.monotonic() > deadline:
                raise TrialError(f"the first host does not lead: {last_line(told)}")
            time.sleep(0.01)

    def _require_end_of_second(self, second: ForkedRank) -> None:
        """Wait until the second host has ended, or has ended its ranks as it is cut off."""
        deadline = time.monotonic() + SEEN
        while second.poll() is None:
            told = (self.folder / "told-1").read_text()
            if "the ranks here are ended" in told and not self._ranks():
                return
            if time.monotonic() > deadline:
                raise TrialError(f"the second host goes on: {told[-300:]!r}")
            time.sleep(0.05)
        if self.result.kind in HARMLESS and second.poll() != 0:
            raise TrialError(f"the second host ends with {second.poll()}")

    def _settings(self, steps: int) -> list[str]:
        settings = (
            f"data.source={self._ground.folder / 'text'}",
            f"data.cache={self._ground.folder / 'cache'}",
            "model_options={layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, seq=32}",
            "sequence=32",
            "batch=6",
            "optimizer.warmup=2",
            "validation.samples=8",
            f"steps={steps}",
            "optimizer.schedule=faults_struck:begin",
            f"checkpoint.every={EVERY}",
            "compare_replicas=1",
            "timeout=20",
        )
        return ["train", *(word for setting in settings for word in ("--set", setting))]

    def _start(self, words: Sequence[str], name: str, faulty: bool, more: dict[str, str]) -> ForkedRank:
        result = self.result
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FAULT_KIND": result.kind if faulty else "",
            "FAULT_PHASE": result.phase if faulty else "",
            "FAULT_FOLDER": str(self.folder),
            "FAULT_SEED": f"{result.kind} {result.phase} {result.number}",
            **more,
        }
        with (self.folder / name).open("w") as told:
            outputs = told.fileno(), told.fileno()
            return self._programs.start("faults_struck", words, environment, outputs, self.folder)

    def _start_host(self, host: int, words: Sequence[str], faulty: bool) -> ForkedRank:
        assert self._hosts is not None
        environment = {
            "FAULT_HOST": str(self._hosts.process(host)),
            "SHOAL_HOST_ID": f"host-{host}",
            "SHOAL_TOKEN_FILE": str(self.folder / "token"),
        }
        return self._start(words, f"told-{host}", faulty, environment)

    def _change_network(self) -> None:
        """Change the network once the rank asks for it."""
        if self._hosts is None or not (self.folder / "asked").exists():
            return
        (self.folder / "asked").unlink()
        match self.result.kind:
            case "cut":
                self._hosts.cut(1)
            case "one-way":
                self._hosts.mute(1)
            case "throttle":
                self._hosts.limit(1, THROTTLED)
        (self.folder / "noting").write_text(repr(time.time()))
        (self.folder / "noting").rename(self.folder / "struck")

    def _judge(self) -> None:
        result = self.result
        if result.phase == "load" and self.train(steps=TO_LOAD).code != 0:
            raise TrialError("there is nothing to load")
        ended = self.train(faulty=True)
        if not (self.folder / "struck").exists():
            raise TrialError(f"the fault did not strike: {last_line(ended.told)}")
        struck = float((self.folder / "struck").read_text())
        told = ended.told
        is_lost = self._time(struck, ended)
        if ended.code == 0:
            result.verdict = "recovers"
        else:
            result.verdict = "named"
            if self._hosts is not None:
                self._end_all()  # the second host tries to join again for 5 minutes
            self._require_none_left()
            (self.folder / "disk" / "ballast").unlink(missing_ok=True)
            told += self._go_on()
            if result.kind == "store" and ended.code != -9:
                raise TrialError(f"the launcher's exit code is {ended.code}")
        is_due = is_lost or ended.code != 0 or result.kind == "corrupt"
        mentions = MENTIONS.get(result.kind, "").split("|")
        if is_due and not any(each in told for each in mentions):
            raise TrialError(f"the cause is not named: {failures(told)!r}")
        if is_lost and result.kind in HARMLESS:
            raise TrialError(f"a rank was lost: {failures(told)!r}")
        losses = self.losses
        wrong = [
            step
            for step, loss in self._ground.losses.items()
            if not abs(losses.get(step, 0.0) / loss - 1) < 1e-4
        ]
        if wrong:
            raise TrialError(f"the losses of steps {wrong} differ")
        result.lost = len(self._made()) - len(losses)

    def _go_on(self) -> str:
        """Let a run that has ended go on, without faults; return what it tells."""
        if not (self.run / "run.json").exists() or not any((self.run / "checkpoints").glob("step-*")):
            shutil.rmtree(self.run, ignore_errors=True)
        went_on = self.train()
        if went_on.code != 0:
            raise TrialError(f"it does not go on: {last_line(went_on.told)}")
        return went_on.told

    def _time(self, struck: float, ended: Ended) -> bool:
        """Take the times; return whether a rank was lost."""
        events = json_lines(self.run / "members.jsonl")
        lost = [each["time"] - struck for each in events if each["event"] == "lost"]
        is_lost = bool(lost)
        if ended.code != 0:
            self.result.noted = lost[0] if lost else ended.at - struck
            return is_lost
        self.result.noted = lost[0] if lost else None
        timeline = Timeline.read(self.run / "timeline")
        ends = [
            timeline.origin_unix_ns / 1e9 + span.stop - struck
            for span in timeline
            if span.kind == "step" and span.rank == 0
        ]
        after = [end for end in ends if end > (lost[0] if lost else 0.0)]
        self.result.next_step = min(after) if after else None
        return is_lost

    def _ranks(self) -> list[Path]:
        """Return the processes of ranks on the second host."""
        assert self._hosts is not None
        there = Path(f"/proc/{self._hosts.process(1)}/ns/net").readlink()
        return [path for path in self._processes() if is_rank(path) and namespace_of(path) == there]

    def _processes(self) -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*") if is_in(path, self.folder)]

    def _require_none_left(self) -> None:
        """Wait until no process of this trial is left."""
        deadline = time.monotonic() + 30
        while self._processes():
            if time.monotonic() > deadline:
                raise TrialError("processes are left 30 s after the end")
            time.sleep(0.05)

    def _end_all(self) -> None:
        for path in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name), 9)
