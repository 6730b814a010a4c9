"""The contestants of recovery.py: how each is started, where its ranks are, and what steps they made.

All of them train a transformer of one shape with fused AdamW, one sequence of 64 tokens a rank and step, on
two ranks of one thread each. Shoal trains on the text of Python's standard library, the others on numbers
that are drawn, which costs them less.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rounds import free_port

from shoal.models import preset
from shoal.spec.run import Run
from shoal.spec.timeline import Timeline

__all__ = ["CONTESTANTS", "LARGE", "PLAIN", "Contestant", "Made", "Task", "Training", "phases_of"]

HERE = Path(__file__).parent
_MARK = "RECOVERY_FOLDER"
_FOREVER = 1_000_000  # steps


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained.

    Attributes:
        model: A preset.
        every: Steps between two saves on disk; 0 for none.
        turn: Steps between two gates, as recovery_gate.py says; 0 for none.
        warm: Steps before a rank may be lost.
        sequence: Tokens of a rank in a step.
        vocabulary: Number of different tokens.
    """

    model: str
    every: int
    turn: int = 0
    warm: int = 30
    sequence: int = 64
    vocabulary: int = 256

    @property
    def options(self) -> str:
        """Changes of the preset, for Shoal."""
        return f"{{seq={self.sequence}, vocab_size={self.vocabulary}}}"

    @property
    def shape(self) -> str:
        """The shape of the model, for those who do not read presets."""
        return json.dumps(
            {
                **preset(self.model).model_dump(mode="json"),
                "seq": self.sequence,
                "vocab_size": self.vocabulary,
            }
        )


@dataclass(frozen=True, slots=True)
class Made:
    """A step that a rank has made.

    Attributes:
        rank: The rank; a rank that is lost and comes again keeps it among the peers, and mostly in Shoal.
        step: Its number, from 1.
        begin: Seconds since the epoch.
        end: Seconds since the epoch.
        loss: The loss; with Shoal that of the batch, else that of the rank's part.
        ranks: Number of ranks that made it; 0 where the steps of the other ranks tell it.
        mark: A sum of some weights after the step; 0 if it is not known.
    """

    rank: int
    step: int
    begin: float
    end: float
    loss: float
    ranks: int = 0
    mark: float = 0.0


Command = tuple[list[str], dict[str, str]]
"""Words of a command, and changes of its environment."""
Starts = Callable[[Task, Path], list[Command]]
"""Returns what is to be started in a folder."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to train through failures.

    Attributes:
        name: As the tables have it.
        commands: Returns what is to be started in a folder.
        made: Returns all steps made in a folder.
        progress: Returns how many steps were made in a folder; it is cheap.
        is_whole: Returns whether a lost rank has come again to a folder since a time; it is cheap.
        is_rank: Returns whether a process with this name and these words is a rank.
        package: What must be installed beside torch and Shoal.
        without: Name of the one of `PLAIN` that does the same without recovery; empty for none.
    """

    name: str
    commands: Starts
    made: Callable[[Path], list[Made]]
    progress: Callable[[Path], int]
    is_whole: Callable[[Path, float], bool]
    is_rank: Callable[[str, list[str]], bool]
    package: str = ""
    without: str = ""


class Training:
    """A training of a contestant that is running; close it, which ends all its processes.

    Args:
        contestant: The contestant.
        task: What it trains.
        folder: An empty folder.
    """

    def __init__(self, contestant: Contestant, task: Task, folder: Path) -> None:
        self.contestant, self.folder = contestant, folder
        shared = {
            **os.environ,
            "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHELASTIC_ERROR_FILE": "",
            _MARK: str(folder),
            "RECOVERY_MODEL": task.shape,
            "RECOVERY_EVERY": str(task.every),
            "RECOVERY_TURN": str(task.turn),
        }
        with (folder / "output").open("wb") as output:
            self._processes = [
                subprocess.Popen(command, cwd=folder, env={**shared, **changes}, stdout=output, stderr=output)
                for command, changes in contestant.commands(task, folder)
            ]

    def ranks(self) -> list[int]:
        """Return the processes that are ranks, in the order in which they were started."""
        return [each for each in sorted(self.processes()) if self.contestant.is_rank(*_named(each))]

    def processes(self) -> list[int]:
        """Return all processes of this training."""
        mark, found = f"{_MARK}={self.folder}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended meanwhile
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def wait(self, is_so: Callable[[], bool], what: str, seconds: float = 300.0) -> None:
        """Wait until something is so.

        Raises:
            RuntimeError: A process that was started ended, or time is up.
        """
        until = time.monotonic() + seconds
        while not is_so():
            ended = [each.args for each in self._processes if each.poll() is not None]
            if ended or time.monotonic() > until:
                why = f"{ended[0]} ended" if ended else f"not within {seconds:g} s"
                told = (self.folder / "output").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.contestant.name}, until {what}: {why}: {told}")
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        """Send a signal to all processes; ranks get it before those who look after them."""
        ranks = self.ranks()
        for each in [*ranks, *(each for each in self.processes() if each not in ranks)]:
            with suppress(ProcessLookupError):
                os.kill(each, number)

    def close(self) -> None:
        """End all processes."""
        while self.processes():
            self.signal(signal.SIGKILL)
            time.sleep(0.02)
        for each in self._processes:
            each.wait()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _named(process: int) -> tuple[str, list[str]]:
    with suppress(OSError):
        name = Path(f"/proc/{process}/comm").read_text().strip()
        return name, Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return "", []


# -- Shoal ----------------------------------------------------------------------------------------------


def _shoal(
    ranks: str, plan: str, *settings: str
) -> Callable[[Task, Path], list[tuple[list[str], dict[str, str]]]]:
    def commands(task: Task, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
        given = (
            f"model={task.model}",
            f"model_options={task.options}",
            f"sequence={task.sequence}",
            "batch=2",
            f"steps={_FOREVER}",
            "optimizer.schedule=recovery_gate:constant",
            "optimizer.learning_rate=1e-3",
            "optimizer.clip=off",
            f"checkpoint.every={task.every}",
            "validation.every=0",
            *settings,
        )
        words = [word for setting in given for word in ("--set", setting)]
        words += ["--nproc", ranks, "--plan", plan, "--run", str(folder / "run")]
        return [([sys.executable, "-m", "shoal", "train", *words], {})]

    return commands


def _shoal_made(folder: Path) -> list[Made]:
    """Take times from the timeline, and losses from the metrics, where the last of a step counts."""
    timeline, losses = Timeline.read(folder / "run" / "timeline"), _losses(folder)
    origin = timeline.origin_unix_ns / 1e9
    return [
        Made(span.rank, number, origin + span.start, origin + span.stop, losses.get(number, float("nan")))
        for span in timeline
        if span.kind == "step"
        for number in [int(span.name)]
    ]


def _losses(folder: Path) -> dict[int, float]:
    return {each["step"]: each["loss"] for each in Run.open(folder / "run").metrics() if "loss" in each}


def _shoal_progress(folder: Path) -> int:
    return len(_lines(folder / "run" / "metrics.jsonl"))


def _shoal_is_whole(folder: Path, since: float) -> bool:
    events = [json.loads(line) for line in _lines(folder / "run" / "members.jsonl")]
    return any(each["event"] == "came" and each["time"] > since for each in events)


def _is_shoal_rank(name: str, words: list[str]) -> bool:
    return name.startswith("shoal-rank-")


# -- the peers ------------------------------------------------------------------------------------------


def _torchrun(ranks: int, kind: str, *where: str) -> list[str]:
    words = ("--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", "3", *where)
    return [sys.executable, "-m", "torch.distributed.run", *words, str(HERE / "recovery_training.py"), kind]


def _torchelastic(task: Task, folder: Path) -> list[Command]:
    """Return what starts torchrun, with a new store for each restart.

    By default it keeps its store, and ranks that are started again over gloo try to reach the addresses that
    the ranks before them left there, fail, and are started once or twice more.
    """
    return [(_torchrun(2, "ddp", "--standalone"), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})]


def _torchft(heartbeat: int, join: int) -> Starts:
    """Return what starts a lighthouse with these times in milliseconds, and two replica groups."""

    def commands(task: Task, folder: Path) -> list[Command]:
        port = free_port()
        lighthouse = [
            *(str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"[::]:{port}"),
            *("--min_replicas", "1", "--quorum_tick_ms", "100"),
            *("--join_timeout_ms", str(join), "--heartbeat_timeout_ms", str(heartbeat)),
        ]
        groups = [
            (
                _torchrun(1, "torchft", "--master-port", str(free_port())),
                {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "REPLICA_GROUP_ID": str(group)},
            )
            for group in range(2)
        ]
        return [(lighthouse, {}), *groups]

    return commands


def _made(folder: Path) -> list[Made]:
    return [
        Made(rank=rank, **json.loads(line))
        for rank in range(2)
        for line in _lines(folder / f"steps-{rank}.jsonl")
    ]


def _lines(path: Path) -> list[bytes]:
    """Return the whole lines of a file; a killed rank may leave half of one."""
    if not path.exists():
        return []
    return [line for line in path.read_bytes().split(b"\n")[:-1] if line.endswith(b"}")]


def _progress(folder: Path) -> int:
    return min(len(_lines(folder / f"steps-{rank}.jsonl")) for rank in range(2))


def _is_whole(folder: Path, since: float) -> bool:
    return any(each.ranks == 2 and each.begin > since for each in _made(folder))


def _is_rank(name: str, words: list[str]) -> bool:
    return any(word.endswith("recovery_training.py") for word in words[1:3])


_BY_SHOAL = _shoal_made, _shoal_progress, _shoal_is_whole, _is_shoal_rank
_BY_PEERS = _made, _progress, _is_whole, _is_rank

CONTESTANTS = [
    Contestant(
        "shoal, shard=none", _shoal("1:2", "shard=none"), *_BY_SHOAL, without="shoal without MIN, shard=none"
    ),
    Contestant(
        "shoal, shard=zero3",
        _shoal("1:2", "shard=zero3"),
        *_BY_SHOAL,
        without="shoal without MIN, shard=zero3",
    ),
    Contestant("torchelastic", _torchelastic, *_BY_PEERS),
    Contestant("torchft", _torchft(5000, 10000), *_BY_PEERS, package="torchft", without="DDP"),
    Contestant("torchft, shorter times", _torchft(1000, 1000), *_BY_PEERS, package="torchft"),
]
PLAIN = [
    *(
        Contestant(f"shoal without MIN, {plan}", _shoal("2", plan), *_BY_SHOAL)
        for plan in ("shard=none", "shard=zero3")
    ),
    Contestant("DDP", _torchelastic, *_BY_PEERS),
]
"""What trains as some contestants do, and does not survive the loss of a rank."""

LARGE = Contestant("shoal", _shoal("1:2", "shard=zero3", "optimizer.name=sgd", "timeout=300"), *_BY_SHOAL)
"""Shoal with sharded weights and an optimizer without state, so that two ranks of a large model have room."""


def phases_of(folder: Path, killed: float) -> dict[str, float]:
    """Return the seconds from a kill until Shoal noted it, had formed a group, and had loaded the state.

    It is empty for others.
    """
    run, found = folder / "run", {}
    for name, file, event in (
        ("noted", "members.jsonl", "lost"),
        ("formed", "events.jsonl", "began"),
        ("loaded", "events.jsonl", "loaded"),
    ):
        told = [json.loads(line) for line in _lines(run / file)]
        times = [each["time"] - killed for each in told if each["event"] == event and each["time"] > killed]
        if times:
            found[name] = min(times)
    return found
