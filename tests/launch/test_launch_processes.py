"""Real processes: how `shoal train` ends when it is stopped, or when a rank of it fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from launch_stand_ins import Program, shoal, shoal_here, steps_made

from shoal.checkpoint import SingleProcess, checkpoints, step_of, verify
from shoal.launch.local.local_ranks import LocalRanks
from shoal.launch.submit import EXIT_STOPPED
from shoal.proc import process_state
from shoal.spec.run import Run

ENDLESS = ("--set", "steps=1000000", "--set", "validation.every=0", "--set", "checkpoint.every=0")

FAILING = """
import os
from torch import nn

class Model(nn.Module):
    def __init__(self, **shape):
        super().__init__()
        self.embedding, self.head, self.calls = nn.Embedding(256, 8), nn.Linear(8, 256), 0

    def forward(self, tokens):
        self.calls += 1
        if self.calls > 3 and os.environ["RANK"] == "1":
            raise ValueError("the fourth batch is too much")
        return self.head(self.embedding(tokens))
"""


def start(folder, tiny_run, *arguments):
    """A training on two ranks that does not end by itself."""
    (folder / "failing.py").write_text(FAILING)
    words = ["train", *tiny_run, *ENDLESS, "--nproc", "2", "--run", "run", *arguments]
    return Program(shoal(*words), folder), Run(folder / "run")


@pytest.fixture(scope="module")
def programs(tmp_path_factory, tiny_run):
    """Several trainings at a time, since each spends most of its time on importing torch."""
    started = {
        "launcher": start(tmp_path_factory.mktemp("launcher"), tiny_run),
        "stopped": start(tmp_path_factory.mktemp("stopped"), tiny_run),
        "killed": start(tmp_path_factory.mktemp("killed"), tiny_run, "--set", "checkpoint.every=2"),
        "raises": start(tmp_path_factory.mktemp("raises"), tiny_run, "--set", "model=failing:Model"),
        "frozen": start(tmp_path_factory.mktemp("frozen"), tiny_run, "--set", "timeout=30"),
        "everyone": start(tmp_path_factory.mktemp("everyone"), tiny_run),
    }
    yield started
    for program, _ in started.values():
        program.kill()


@pytest.fixture
def program(tmp_path, tiny_run):
    program, run = start(tmp_path, tiny_run)
    yield program, run
    program.kill()


def state_of(process):
    """As Linux abbreviates it: T is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def parent_of(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def failures(program):
    """What it said of failures, line by line; what comes before is progress."""
    lines = program.stderr.splitlines()
    return lines[next(index for index, line in enumerate(lines) if line.startswith("shoal: ")) :]


def test_ranks_do_not_outlive_a_launcher_that_is_killed_while_they_start(programs):
    program, _ = programs["launcher"]
    program.wait_until(lambda: len(program.ranks()) == 2)
    program.signal(signal.SIGKILL)
    assert program.end() == -signal.SIGKILL
    assert program.leaves_no_process()


def test_a_signal_to_the_launcher_profiles_the_next_steps_of_every_rank(programs):
    program, run = programs["stopped"]
    program.wait_until(lambda: steps_made(run.path) > 2)
    program.signal(signal.SIGUSR2)
    program.wait_until(lambda: "are profiled in" in program.stderr)
    program.wait_until(lambda: len(list((run.path / "profile").glob("rank-0000[01]-*.json.gz"))) == 2)


def test_sigterm_ends_the_step_and_saves_it_so_that_the_run_can_go_on(programs, ranks, tiny_run):
    program, run = programs["stopped"]
    program.wait_until(lambda: steps_made(run.path) > 2)
    program.signal(signal.SIGTERM)
    assert program.end() == EXIT_STOPPED
    assert program.leaves_no_process()
    assert "Traceback" not in program.stderr

    made = [values["step"] for values in run.metrics()]
    assert made == list(range(1, len(made) + 1))
    (newest,) = checkpoints(run.checkpoints)
    assert step_of(newest) == made[-1]
    verify(newest, SingleProcess())
    assert f"--resume {run.path.name}" in program.stderr

    go_on = ["train", *tiny_run, "--resume", "run", "--nproc", "1", "--set", f"steps={made[-1] + 2}"]
    assert ranks.run(shoal_here, 1, go_on, run.path.parent) == [0]
    assert [values["step"] for values in run.metrics()] == list(range(1, made[-1] + 3))


def test_a_signal_to_every_process_of_a_run_is_one_signal_and_saves(programs):
    program, run = programs["everyone"]
    program.wait_until(lambda: steps_made(run.path) > 2)
    assert len(program.commands()) == 4  # the launcher, the one that ranks are forked from, and two ranks
    for process in program.commands():
        os.kill(process, signal.SIGINT)  # the ranks get it from the launcher too, which is no second Ctrl-C
    assert program.end() == EXIT_STOPPED
    assert program.leaves_no_process()
    assert step_of(checkpoints(run.checkpoints)[0]) == run.metrics()[-1]["step"]


@pytest.mark.long
@pytest.mark.parametrize(("nproc", "code"), [("2", 1), ("1:2", EXIT_STOPPED)])
def test_the_loss_of_the_process_that_ranks_are_forked_from_is_named(tmp_path, tiny_run, nproc, code):
    program, run = start(tmp_path, tiny_run, "--nproc", nproc)
    try:
        program.wait_until(lambda: steps_made(run.path) > 2)
        (server,) = {parent_of(rank) for rank in program.ranks().values()}
        os.kill(server, signal.SIGKILL)
        if code == EXIT_STOPPED:  # the ranks start as programs, and go on
            made = steps_made(run.path)
            program.wait_until(lambda: steps_made(run.path) > made + 2)
            program.signal(signal.SIGTERM)
        assert program.end() == code
        first = failures(program)[0]
        assert (
            first == f"shoal: the process that ranks are forked from ({server}) was ended by SIGKILL, and "
            "its ranks with it"
        )
    finally:
        program.kill()


def test_a_rank_that_is_killed_is_named_and_not_the_one_that_lost_it(programs):
    program, run = programs["killed"]
    program.wait_until(lambda: len(checkpoints(run.checkpoints)) > 0)
    os.kill(program.ranks()[1], signal.SIGKILL)
    assert program.end() == 1
    first, *_, last = failures(program)
    assert first.startswith("shoal: rank 1 failed: killed by SIGKILL")
    assert last.startswith(f"Step {step_of(checkpoints(run.checkpoints)[0])} is saved; continue with")
    assert last.endswith("shoal train --resume run")
    assert program.leaves_no_process()


def test_a_rank_that_raises_is_named_with_its_error_and_traceback(programs):
    program, run = programs["raises"]
    assert program.end() == 1
    first, *rest = failures(program)
    assert first == "shoal: rank 1 failed: ValueError: the fourth batch is too much"
    assert any("failing.py" in line for line in rest)
    assert "--resume" not in program.stderr  # nothing was saved
    assert program.stdout == ""
    assert program.leaves_no_process()
    assert steps_made(run.path) == 3


def test_a_rank_that_is_stopped_is_named_as_those_that_missed_it_found(programs):
    program, run = programs["frozen"]
    program.wait_until(lambda: steps_made(run.path) > 2)
    os.kill(program.ranks()[1], signal.SIGSTOP)
    assert program.end() == 1
    first = failures(program)[0]
    assert first.startswith("shoal: rank 1 failed: its process was stopped")
    assert "rank 1 has given no sign of life for 5 s" in first
    assert program.leaves_no_process()
    begins = [(run.log / f"rank-{rank:05d}.log").read_text().partition("\n")[0] for rank in range(2)]
    assert [begin.partition(", ")[2] for begin in begins] == ["rank 0 of 2", "rank 1 of 2"]
    assert "step 20/1000000  loss" in (run.log / "rank-00000.log").read_text()


@pytest.mark.long
def test_control_z_stops_all_ranks_until_the_run_is_continued(program):
    program, run = program
    program.wait_until(lambda: steps_made(run.path) > 2)
    program.signal(signal.SIGTSTP)
    program.wait_until(lambda: [state_of(process) for process in program.ranks().values()] == ["T", "T"])
    made = steps_made(run.path)
    time.sleep(8)  # longer than ranks wait for a sign of life
    assert steps_made(run.path) == made
    program.signal(signal.SIGCONT)
    program.wait_until(lambda: steps_made(run.path) > made + 2)
    program.signal(signal.SIGTERM)
    assert program.end() == EXIT_STOPPED


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step_ends_all_at_once(program, number):
    program, run = program
    program.wait_until(lambda: len(program.ranks()) == 2)
    program.signal(number)
    assert program.end() == EXIT_STOPPED
    assert program.leaves_no_process()
    assert program.stderr == f"shoal: stopped by {number.name} before the first step: no step is lost\n"
    assert not run.path.exists() or checkpoints(run.checkpoints) == []


@pytest.mark.long
def test_control_c_saves_as_sigterm_does(program):
    program, run = program
    program.wait_until(lambda: steps_made(run.path) > 2)
    program.signal(signal.SIGINT)
    assert program.end() == EXIT_STOPPED
    assert program.leaves_no_process()
    assert step_of(checkpoints(run.checkpoints)[0]) == run.metrics()[-1]["step"]


@pytest.mark.long
def test_ranks_do_not_outlive_a_launcher_that_is_killed_while_they_train(program):
    program, run = program
    program.wait_until(lambda: steps_made(run.path) > 2)
    program.signal(signal.SIGKILL)
    program.end()
    assert program.leaves_no_process()


@pytest.mark.long
def test_a_rank_that_is_killed_while_it_starts_is_named(program):
    program, _ = program
    program.wait_until(lambda: len(program.ranks()) == 2)
    os.kill(program.ranks()[1], signal.SIGKILL)
    assert program.end() == 1
    assert failures(program)[0].startswith("shoal: rank 1 failed: killed by SIGKILL")
    assert program.leaves_no_process()


@pytest.mark.long
def test_one_rank_is_stopped_like_several(tmp_path, tiny_run):
    program, run = start(tmp_path, tiny_run, "--nproc", "1")
    try:
        program.wait_until(lambda: steps_made(run.path) > 2)
        program.signal(signal.SIGINT)
        assert program.end() == EXIT_STOPPED
        assert step_of(checkpoints(run.checkpoints)[0]) == run.metrics()[-1]["step"]
    finally:
        program.kill()


TRACED = """
import ctypes, os, sys, time
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(0x59616D61, ctypes.c_ulong(-1))  # any process may attach to this one
own = Path(sys.argv[1]) / os.environ["RANK"]
own.write_text(str(os.getpid()))
if os.environ["RANK"] == "1":
    first = own.with_name("0")
    while not (first.exists() and first.read_text()):
        time.sleep(0.01)
    assert libc.ptrace(16, int(first.read_text()), 0, 0) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(int(first.read_text()), 0x40000000)
    own.with_name("attached").touch()
time.sleep(300)
"""


def test_a_rank_whose_stack_another_one_reads_is_not_stopped(tmp_path):
    command = [sys.executable, "-c", TRACED, str(tmp_path)]
    environments = {rank: {**os.environ, "RANK": str(rank)} for rank in range(2)}
    with LocalRanks(command, environments, None) as processes:
        while not (tmp_path / "attached").exists():
            processes.listen(0.05)
            assert processes.running() == [0, 1]
        assert process_state(int((tmp_path / "0").read_text())) == "t"
        assert processes.stopped() == []
        os.kill(int((tmp_path / "1").read_text()), signal.SIGSTOP)
        while processes.stopped() != [1]:
            processes.listen(0.05)
