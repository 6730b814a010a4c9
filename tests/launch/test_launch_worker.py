"""What a process does around the work of its rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from shoal.errors import PlanError, TrainingError
from shoal.launch.local import launch, run_rank, signals_noted
from shoal.signals import ANSWERED, STOPS, end_early, withheld_from_children


@pytest.fixture(autouse=True)
def own_signals(monkeypatch):
    before = {number: signal.getsignal(number) for number in ANSWERED}
    monkeypatch.delenv("SHOAL_OUTCOMES", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    yield
    for number, action in before.items():
        signal.signal(number, action)


def test_the_exit_code_is_what_the_work_gives():
    assert run_rank(0, lambda stop: 75) == 75


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_that_is_heeded_is_noted(number):
    def work(stop):
        stop.heed()
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number
        return 0

    assert run_rank(0, work) == 0


EARLY = """
import ctypes, sys
from shoal.launch.local import run_rank

def work(stop):
    mutex = ctypes.create_string_buffer(128)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    print("begins", flush=True)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)  # waits in native code, which no Python handler interrupts

early = {"early": 75} if len(sys.argv) > 1 else {}
run_rank(0, work, **early)
"""


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_before_the_first_step_ends_the_process_without_a_loss(number):
    with subprocess.Popen(
        [sys.executable, "-c", EARLY, "a training"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as rank:
        rank.stdout.readline()
        rank.send_signal(number)
        assert rank.wait(60) == 75
        told = rank.stderr.read()
    assert told == f"shoal: stopped by {number.name} before the first step: no step is lost\n"


def test_a_signal_ends_work_that_never_heeds_it():
    with subprocess.Popen([sys.executable, "-c", EARLY], stdout=subprocess.PIPE, text=True) as rank:
        rank.stdout.readline()
        rank.send_signal(signal.SIGINT)
        assert rank.wait(60) == 130


def test_sighup_stays_ignored_under_nohup():
    def work(stop):
        os.kill(os.getpid(), signal.SIGHUP)
        stop.heed()
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received is None
        return 0

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run_rank(0, work) == 0


DONE = """
import os, signal, sys, time
from shoal.launch.local import run_rank

def work(stop):
    stop.heed()
    stop.is_done = len(sys.argv) > 1
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)  # copies the last checkpoint
    return 0

raise SystemExit(run_rank(0, work, grace=0.01))
"""


@pytest.mark.parametrize(("words", "code"), [([], 130), (["done"], 0)])
def test_a_grace_ends_only_what_is_not_saved(words, code):
    assert subprocess.run([sys.executable, "-c", DONE, *words]).returncode == code


TWICE = """
import os, signal, sys, time
from shoal.launch.local import run_rank

def work(stop):
    stop.heed()
    for _ in range(2):  # a program above passes on what reached all
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(float(sys.argv[1]))
    return 75

raise SystemExit(run_rank(0, work))
"""


@pytest.mark.parametrize("launcher", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
@pytest.mark.parametrize(("pause", "code"), [("0.01", 75), ("1.1", 130)])
def test_a_ctrl_c_that_a_program_above_passes_on_is_not_a_second_one(launcher, pause, code):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    words = [sys.executable, "-c", TWICE, pause]
    assert subprocess.run(words, env=environment | launcher).returncode == code


FORKS = """
import os, signal
from shoal.launch.local import run_rank

def work(stop):
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    os.kill(child, signal.SIGTERM)  # as a pool of multiprocessing ends its processes
    return 0 if os.waitpid(child, 0)[1] == signal.SIGTERM and stop.received is None else 1

raise SystemExit(run_rank(0, work))
"""


def test_a_process_that_a_rank_forks_ends_at_signals_and_the_rank_does_not():
    assert subprocess.run([sys.executable, "-c", FORKS], timeout=60).returncode == 0


WITHHELD = """
import signal, sys, time
print("begins", flush=True)
if "parent" in sys.argv:
    from shoal.signals import obey_parent_alone
    obey_parent_alone()
sys.stdin.read()
"""


def test_signals_are_withheld_from_a_child_until_its_input_ends():
    with withheld_from_children():
        child = subprocess.Popen([sys.executable, "-c", WITHHELD], stdin=subprocess.PIPE)
    for number in ANSWERED:  # the interpreter may not even have begun
        child.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    child.communicate(timeout=60)
    assert child.returncode == 0


def test_a_child_that_a_library_ends_obeys_its_parent():
    with withheld_from_children():
        child = subprocess.Popen([sys.executable, "-c", WITHHELD, "parent"], stdin=subprocess.PIPE)
    other = f"import os; os.kill({child.pid}, 15)"
    subprocess.run([sys.executable, "-c", other], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    child.terminate()
    assert child.wait(60) == 0
    child.stdin.close()


SLOW = """
import os, signal, time
from shoal.launch.local import run_rank

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
from shoal.launch.local.prctl import die_with
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


def test_a_launcher_ends_at_a_signal_until_it_takes_signals_and_has_nothing_to_stop_afterwards(capsys):
    end_early(75)
    with signals_noted() as noted:
        os.kill(os.getpid(), signal.SIGHUP)
    assert noted == [signal.SIGHUP]
    os.kill(os.getpid(), signal.SIGTERM)  # all ranks have ended, and the exit code is known
    assert capsys.readouterr().err == ""
    end_early(75)
    with pytest.raises(SystemExit) as caught:
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)  # as a launcher passes it on
    assert caught.value.code == 75
    assert capsys.readouterr().err == "shoal: stopped by SIGUSR1 before the first step: no step is lost\n"


LATE = """
import os, signal
from shoal.launch.local import run_rank
from shoal.signals import end_early

class Late:
    def __init__(self):
        self.kill, self.words = os.kill, (os.getpid(), signal.NUMBER)

    def __del__(self):  # called as modules are destroyed, when handlers are gone
        self.kill(*self.words)

late = Late()
WORK
raise SystemExit(75)
"""


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("work", ["end_early(75)", "run_rank(0, lambda stop: 75)"])
def test_a_signal_while_the_interpreter_ends_leaves_the_exit_code(number, work):
    program = LATE.replace("NUMBER", number.name).replace("WORK", work)
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 75


GONE = """
import os, shutil, sys, time
from pathlib import Path
from shoal.launch.local import run_rank

def work(stop):
    stop.heed()
    shutil.rmtree(os.environ["SHOAL_OUTCOMES"])
    Path(sys.argv[1], os.environ["RANK"]).touch()
    while stop.received is None:
        time.sleep(0.01)
    return 75

raise SystemExit(run_rank(int(os.environ["RANK"]), work))
"""


def test_ranks_that_have_saved_have_stopped_where_the_folder_of_outcomes_is_gone(tmp_path, capfd):
    def ask():
        while not (tmp_path / "0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    assert launch([sys.executable, "-c", GONE, str(tmp_path)], 1) == 75
    asking.join()
    told = capfd.readouterr().err
    assert "how this rank ended cannot be written" in told
    assert "Traceback" not in told
