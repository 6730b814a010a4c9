"""The account of real runs that are killed, resumed and elastic, beside the test's clock and the metrics."""

from __future__ import annotations

import json
import signal
from collections import defaultdict

import pytest
from run_stand_ins import shoal

from shoal.record import Destinations, Logger
from shoal.spec.run import account

# The schedule is called at the beginning of each step, on every rank. A command that goes on has no fault.
FAULTS = """
import os, signal, time

def begin(step, steps):
    time.sleep(0.02)
    fault, at = os.environ.get("FAULT", ""), int(os.environ.get("AT", "0"))
    if step == at and os.environ.get("RANK") == "1" and os.environ.get("SHOAL_AFTER", "-1") == "-1":
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "all":
            os.killpg(int(os.environ["COMMAND"]), signal.SIGKILL)
    return 1.0
"""
COMMAND = """
import os, sys, time
began = time.time()
os.environ["COMMAND"] = str(os.getpid())
from shoal.cli.main import main
code = main()
with open("clock", "a") as file:
    file.write(f"{began} {time.time()}\\n")
sys.exit(code)
"""


class Clock:
    """Runs commands, which note when they begin and end."""

    def __init__(self, programs, folder, tiny_run) -> None:
        (folder / "faults_at_home.py").write_text(FAULTS)
        (folder / "command.py").write_text(COMMAND)
        self._programs, self._folder = programs, folder
        self._words = [*tiny_run, "--set", "optimizer.schedule=faults_at_home:begin", "--run", "one"]

    def train(self, *words: str, fault: str = "", at: int = 0) -> int:
        environment = {"FAULT": fault, "AT": str(at)}
        arguments = ["train", *self._words, *words]
        self._words = ["--resume", "one"]
        return self._programs.run(arguments, self._folder, environment, module="command").returncode

    def pairs(self) -> list[list[float]]:
        lines = (self._folder / "clock").read_text().splitlines()
        return [[float(moment) for moment in line.split()] for line in lines]

    def seconds(self) -> float:
        return self.pairs()[-1][1] - self.pairs()[0][0]


def test_the_parts_of_a_run_that_is_killed_resumed_and_elastic_sum_to_its_wall_clock(
    programs, tiny_run, tmp_path
):
    clock = Clock(programs, tmp_path, tiny_run)
    saves = ["--set", "checkpoint.every=20", "--set", "checkpoint.background=false"]
    # A rank is killed, and the others go on. Then a rank is killed, and ends the command. Then all is killed.
    assert clock.train("--nproc", "1:2", "--set", "steps=50", *saves, fault="kill", at=30) == 0
    assert clock.train("--nproc", "2", "--set", "steps=110", fault="kill", at=75) == 1
    assert clock.train("--nproc", "2", fault="all", at=70) == -signal.SIGKILL
    assert clock.train("--nproc", "2") == 0

    found = account(tmp_path / "one")
    outside = clock.seconds()
    assert found.wall == pytest.approx(outside, rel=0.01, abs=0.2)
    assert found.steps + sum(found.lost.values()) == pytest.approx(outside, rel=0.01, abs=0.2)
    assert (found.count, found.launches, found.failures) == (110, 4, 3)
    assert all(found.lost[cause] > 0 for cause in ("start", "load", "save", "detection", "recovery"))
    (_, first), (second, _), *_ = clock.pairs()
    assert found.lost["waiting"] > second - first
    counted, repeated = seconds_of_steps(tmp_path / "one")
    # What is done with the result of a step is in the account's step, and not in the metrics.
    assert 0.95 * counted < found.steps < 1.25 * counted
    assert 0 < found.lost["repeated"] < 1.25 * repeated


def test_a_run_that_is_never_broken_off_repeats_nothing(programs, tiny_run, tmp_path):
    clock = Clock(programs, tmp_path, tiny_run)
    assert clock.train("--nproc", "1", "--set", "steps=100") == 0
    found = account(tmp_path / "one")
    assert found.wall == pytest.approx(clock.seconds(), rel=0.01, abs=0.3)
    counted, _ = seconds_of_steps(tmp_path / "one")
    assert 0.95 * counted < found.steps < 1.25 * counted
    assert [found.lost[cause] for cause in ("detection", "recovery", "repeated", "waiting")] == [0] * 4
    assert (found.failures, found.launches, found.count) == (0, 1, 100)


def seconds_of_steps(path):
    """Seconds of the steps that count, and of those that were made again, by the lines of metrics."""
    made = defaultdict(list)
    for line in (path / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "step_seconds" in values:
            made[values["step"]].append(values["step_seconds"])
    return sum(each[-1] for each in made.values()), sum(sum(each[:-1]) for each in made.values())


def test_receivers_of_metrics_get_the_account_and_the_metrics_file_does_not(tiny_run, tmp_path, monkeypatch):
    received = Received()
    monkeypatch.setattr(Destinations, "open", lambda *_: [received])
    code, _, told = shoal(["train", *tiny_run, "--nproc", "1", "--set", "steps=5", "--run", "one"], tmp_path)
    assert code == 0, told
    assert received.is_closed
    assert "left out" not in told
    step, values = received.values[-1]
    found = account(tmp_path / "one")
    assert step == 5
    assert values["counted_step_seconds"] == pytest.approx(found.steps)
    assert {name.removeprefix("lost_seconds_") for name in values if "lost" in name} == set(found.lost)
    assert 0 < values["goodput"] < 1
    assert "goodput" not in (tmp_path / "one" / "metrics.jsonl").read_text()


class Received(Logger):
    """Keeps what a receiver of metrics gets of the account."""

    def __init__(self):
        self.is_closed = False
        self.values = []

    def log(self, step, values):
        assert not self.is_closed
        if "goodput" in values:
            self.values.append((step, values))

    def close(self):
        self.is_closed = True
