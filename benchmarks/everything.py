"""What a training step costs more if all that observes it is on, beside the same Trainer with all of it off.

    python benchmarks/everything.py [--rounds 12] [--seconds 4] [--sizes tiny:64,12m:64]

Ranks of one process each train a model; turns are off, on, and on with `shoal watch` beside, in the reverse
order every other round. On means, composed as `shoal train` does: the recorder of spans, the metrics file,
the live line of a terminal, TensorBoard, an endpoint for Prometheus that is read every second, OpenTelemetry
with a collector that answers, the watch of hangs, the comparison of clocks between hosts (the two ranks say
that they are two), and the heed of profiles. A turn is a run of its own: each begins with some steps that are
not timed, in which files are opened and packages loaded. `shoal watch` reads the files and judges them twice
a second, in a process that shares the ranks' cores.

The ratio of a round is that of the mean steps. Processor time is that of a rank, in all its threads; ranks
that wait for one another use some too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, final

import torch
import torch.distributed as dist
from contestants import Task, make_trainer
from recording import Switch
from rounds import Ranks, Spread, Step, free_port

from shoal.checkpoint import ProcessGroupCoordinator
from shoal.collectives import watch_hangs
from shoal.collectives.native import NativeGroup
from shoal.machine.bench import describe
from shoal.parallel.exchange.worker_exchange import WorkerExchange
from shoal.record import NullRecorder
from shoal.spec.plan import Plan
from shoal.spec.run import Run
from shoal.train.config import RecordConfig
from shoal.train.rank_job import Profiling
from shoal.train.result import LiveLine
from shoal.train.run_writer import RunWriter, WritingRank

STATES = ("off", "on", "on, watched")
_SETTLE = 12
"""Steps of a turn that are not timed: imports, first files, first messages."""
_RECORDED = 900
"""Most steps of a turn: those from 1,000 on are recorded in part."""
_TARGETS = "targets: 1.02 at steps of about 10 ms, 1.01 at about 100 ms"


@dataclass(frozen=True, slots=True)
class _Setup:
    """What the ranks need beside their task."""

    task: Task
    prometheus: int
    collector: str
    steps: int  # of a turn, with those that are not timed

    def state(self, turn: int) -> str:
        order = STATES if turn // len(STATES) % 2 == 0 else STATES[::-1]
        return order[turn % len(STATES)]

    def folder(self, turn: int) -> Path:
        return self.task.folder / f"run-{turn:04d}"


@final
class _Terminal(io.TextIOWrapper):
    """A file that looks like a terminal, so that the live line is written after every step."""

    def isatty(self) -> bool:
        return True


class _Observed:
    """All that observes a turn of one rank."""

    def __init__(self, setup: _Setup, rank: int, turn: int) -> None:
        folder, cpu = setup.folder(turn), torch.device("cpu")
        described = {"name": folder.name, "config": {"steps": setup.steps}}
        if rank == 0:
            Run.create(folder, described)
        dist.barrier()
        run, say = Run.open(folder), lambda text: print(text, file=sys.stderr)
        config = RecordConfig(
            tensorboard=find_spec("tensorboard") is not None,
            prometheus=str(setup.prometheus),
            opentelemetry=setup.collector if find_spec("opentelemetry.sdk") is not None else "",
        )
        self._stack = contextlib.ExitStack()
        self._stream = self._stack.enter_context(_Terminal(io.FileIO(folder / "live", "w")))
        self._live = LiveLine(setup.steps, config.live, self._stream) if rank == 0 else None
        os.environ["SHOAL_HOST_ID"] = f"host {rank}"  # as if each were on a host of its own
        writing = WritingRank(ProcessGroupCoordinator(), cpu, rank == 0, say, towards="127.0.0.1")
        self._writer = RunWriter(run, described, writing, config, goes_on=False)
        del os.environ["SHOAL_HOST_ID"]
        self._stack.callback(self._writer.close, "the turn is over")
        self._writer.laid_out(Plan(dp=dist.get_world_size()), WorkerExchange())
        self.recorder = self._writer.recorder
        marks = self._writer.marks
        self.profiling = Profiling(None, run.path / "profile", rank, cpu, marks, memory=False, say=say)
        self._stack.callback(self.profiling.close)

    def stepped(self, result: Any) -> None:
        if self._live is not None:
            self._writer.log(result.step, result.values())
            self._live.show(result)

    def close(self) -> None:
        self._stack.close()


@dataclass(frozen=True, slots=True)
class _Build:
    """The step of a rank; it returns the processor time that it used in place of a loss."""

    setup: _Setup

    def __call__(self, rank: int) -> Step:
        watch_hangs(self.setup.task.folder / "hang")
        switch = Switch(NullRecorder())
        trainer = make_trainer(self.setup.task, "none", switch)
        groups = [each for each in gc.get_objects() if type(each) is NativeGroup]
        watches = [each._watch for each in groups]
        steps, observed = self.setup.steps, None
        if watches and not all(watches):
            raise RuntimeError("a group is not watched")

        def turn_to(turn: int) -> _Observed | None:
            if observed is not None:
                observed.close()
            is_on = self.setup.state(turn) != "off"
            found = _Observed(self.setup, rank, turn) if is_on else None
            switch.chosen = NullRecorder() if found is None else found.recorder
            switch.first = trainer.step_count
            for group, watch in zip(groups, watches, strict=True):
                group._watch = watch if is_on else None
            dist.barrier()
            return found

        def step() -> float:
            nonlocal observed
            if trainer.step_count % steps == 0:
                observed = turn_to(trainer.step_count // steps)
            began = time.process_time()
            if observed is None:
                trainer.step()
            else:
                with observed.profiling.step(trainer.step_count + 1):
                    result = trainer.step()
                observed.stepped(result)
            return time.process_time() - began

        return step


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """Yield the address of a server that takes what OpenTelemetry sends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@contextlib.contextmanager
def _scraped(port: int) -> Iterator[None]:
    """Read the endpoint for Prometheus every second, if there is one now."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(1.0):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1.0).read()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join()


@contextlib.contextmanager
def _watched(run: Path) -> Iterator[None]:
    """Let `shoal watch` look at the run twice a second, as on a terminal."""
    command = [sys.executable, "-m", "shoal", "watch", str(run), "--json", "--every", "0.5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    process.stdout.readline()  # it has loaded what it needs
    drain = threading.Thread(target=process.stdout.read, daemon=True)
    drain.start()
    try:
        yield
    finally:
        process.terminate()
        process.wait()
        drain.join()


def measured(
    size: str, ranks: int, rounds: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of a step, and the processor seconds of a rank, by state: one for each round."""
    preset, _, sequence = size.partition(":")
    walls: dict[str, list[float]] = {state: [] for state in STATES}
    processor: dict[str, list[float]] = {state: [] for state in STATES}
    with tempfile.TemporaryDirectory() as folder, _collector() as collector:
        task = Task(preset, int(sequence), 1, ranks, Path(folder))
        steps = _steps_of(task, seconds)
        setup = _Setup(task, free_port(), collector, _SETTLE + steps)
        with Ranks(_Build(setup), ranks) as members, _scraped(setup.prometheus):
            for turn in range(rounds * len(STATES)):
                state = setup.state(turn)
                print(f"{size}: turn {turn + 1} of {rounds * len(STATES)}, {state}", file=sys.stderr)
                members.run(_SETTLE)
                watched = _watched(setup.folder(turn)) if state == STATES[-1] else contextlib.nullcontext()
                with watched:
                    burst = members.run(steps)
                walls[state].append(fmean(burst.seconds))
                processor[state].append(fmean(burst.losses))
    return walls, processor


def _steps_of(task: Task, seconds: float) -> int:
    """Return the number of steps that take so many seconds."""
    off = _Setup(task, 0, "", 1 << 40)
    with Ranks(_Plain(off), task.ranks) as members:
        members.run(_SETTLE)
        return max(4, min(_RECORDED, round(seconds / fmean(members.run(_SETTLE).seconds))))


@dataclass(frozen=True, slots=True)
class _Plain:
    """The step of a rank without anything."""

    setup: _Setup

    def __call__(self, rank: int) -> Step:
        trainer = make_trainer(self.setup.task, "none", NullRecorder())
        return lambda: trainer.step().loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread (default 2)")
    parser.add_argument("--rounds", type=int, default=12, help="default 12")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a turn (default 4)")
    parser.add_argument("--sizes", default="tiny:64,12m:64", help="PRESET:TOKENS of a rank's step, several")
    options = parser.parse_args()
    machine = describe()
    print("| model | state | step, ms | to off | range | processor time, ms | to off |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in options.sizes.split(","):
        walls, processor = measured(size, options.ranks, options.rounds, options.seconds)
        for state in STATES:
            ratios = [on / off for on, off in zip(walls[state], walls["off"], strict=True)]
            used = [on / off for on, off in zip(processor[state], processor["off"], strict=True)]
            ratio = Spread.of(ratios)
            print(
                f"| {size} | {state} | {1e3 * Spread.of(walls[state]).median:.2f} | {ratio.median:.4f} | "
                f"{ratio.low:.3f} to {ratio.high:.3f} | {1e3 * Spread.of(processor[state]).median:.2f} | "
                f"{Spread.of(used).median:.4f} |",
                flush=True,
            )
    print(
        f"\n{options.ranks} ranks of one thread, dp={options.ranks}; medians and ranges of {options.rounds} "
        f"rounds of {options.seconds:g} s a state; {_TARGETS}\n{machine}"
    )


if __name__ == "__main__":
    main()
