"""What a process does around the work of its rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from shoal.errors import PlanError, TrainingError
from shoal.launch import StopSignal, run_rank


@pytest.fixture(autouse=True)
def own_signals(monkeypatch):
    heeded = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in heeded}
    monkeypatch.delenv("SHOAL_OUTCOMES", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    yield
    for number, action in before.items():
        signal.signal(number, action)


def test_the_exit_code_is_what_the_work_gives():
    assert run_rank(0, lambda stop: 75) == 75


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_that_is_heeded_is_noted(number):
    def work(stop):
        stop.heed()
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number
        return 0

    assert run_rank(0, work) == 0


def test_a_signal_that_is_not_heeded_yet_ends_the_process():
    StopSignal()
    asked = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    assert {signal.getsignal(number) for number in asked} == {signal.SIG_DFL}


SLOW = """
import os, signal, time
from shoal.launch import run_rank

def work(stop):
    stop.heed()
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(60)

run_rank(3, work, grace=0.5)
"""


def test_a_rank_that_cannot_save_within_the_grace_says_so_and_ends():
    ended = subprocess.run([sys.executable, "-c", SLOW], capture_output=True, text=True)
    assert ended.returncode == 130
    assert ended.stderr == (
        "shoal: ended by SIGUSR1: the step and the save took longer than the grace of 0.5 s\n"
    )


LAUNCHED = """
import os, sys, time
from shoal.launch.kernel import die_with
die_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(120)
"""


def test_a_rank_ends_with_its_launcher_however_that_ends():
    starts = "import os, subprocess, sys; subprocess.run([*sys.argv[1:], str(os.getpid())])"
    rank = [sys.executable, "-c", LAUNCHED]
    with subprocess.Popen([sys.executable, "-c", starts, *rank], stdout=subprocess.PIPE) as launcher:
        process = int(launcher.stdout.readline())
        launcher.kill()
        try:
            launcher.communicate(timeout=120)  # which ends when the rank no longer holds the pipe
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def test_an_error_is_told_with_the_rank_and_a_traceback(capsys):
    def work(stop):
        raise TrainingError("step 3 has a loss of nan")

    assert run_rank(5, work) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shoal: rank 5 failed: TrainingError: step 3 has a loss of nan\n")
    assert "Traceback" in captured.err


def test_a_users_mistake_is_told_without_a_traceback(capsys):
    def work(stop):
        raise PlanError("this was given", possible="that", change="this to that")

    assert run_rank(0, work) == 2
    error = capsys.readouterr().err
    assert error.splitlines() == [
        "shoal: rank 0 failed: this was given",
        "  possible: that",
        "  change: this to that",
    ]


def test_another_launcher_finds_the_error_in_its_error_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def work(stop):
        raise ValueError("of this rank")

    assert run_rank(0, work) == 1
    assert "of this rank" in file.read_text()
