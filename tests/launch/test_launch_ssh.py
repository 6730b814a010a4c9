"""`shoal launch ssh` with a real sshd on loopback, and real ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_stand_ins import Program, shoal, steps_made
from ssh_stand_ins import SshServer, why_no_ssh

from shoal.checkpoint import checkpoints, step_of
from shoal.launch.submit import EXIT_STOPPED
from shoal.spec.run import Run
from shoal.testing.hosts import Hosts, why_no_hosts

pytestmark = pytest.mark.skipif(bool(why_no_ssh()), reason=why_no_ssh() or "there is ssh")

ROOT = Path(__file__).resolve().parent.parent.parent
ENDLESS = ("--set", "steps=1000000", "--set", "validation.every=0", "--set", "checkpoint.every=5")
SECRET = "nobody-reads-this"
SECRETIVE = f"""
import os
from torch import nn

class Model(nn.Module):
    def __init__(self, **shape):
        super().__init__()
        assert os.environ["SECRET"] == "{SECRET}"
        self.embedding, self.head, self.calls = nn.Embedding(256, 8), nn.Linear(8, 256), 0

    def forward(self, tokens):
        self.calls += 1
        if self.calls > 5 and os.environ.get("RANK") == os.environ.get("FAILS"):
            raise ValueError("the sixth batch is too much")
        return self.head(self.embedding(tokens))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with SshServer(tmp_path_factory.mktemp("ssh"), ["one", "two", "three"]) as server:
        yield server


@pytest.fixture
def start(server, tmp_path, tiny_run):
    """Starts a training on hosts of the server."""
    started = []

    def start(*options, **environment):
        (tmp_path / "secretive.py").write_text(SECRETIVE)
        python = f"env PYTHONPATH={ROOT} OMP_NUM_THREADS=1 {sys.executable}"
        given = ["--ssh", server.ssh, "--python", python, "--nproc", "1", "--nodes", "2", *options]
        for name in environment:
            given += ["--env", name]
        train = [*tiny_run, *ENDLESS, "--set", "model=secretive:Model", "--run", "run"]
        command = shoal("launch", "ssh", *given, "--", "train", *train)
        program = Program(command, tmp_path, {"PYTHONPATH": str(ROOT), **environment})
        started.append(program)
        return program, Run(tmp_path / "run")

    yield start
    for program in started:
        program.kill()


@pytest.mark.long
def test_a_spare_replaces_a_lost_host_and_a_signal_ends_all_with_the_state_saved(start):
    program, run = start("--hosts", "one,two,three", SECRET=SECRET)
    program.wait_until(lambda: len(checkpoints(run.checkpoints)) > 0)
    assert all(line.startswith(("[one", "[two")) for line in program.stderr.splitlines())
    assert "[one rank 0] run run: " in program.stderr
    commands = program.commands()
    assert not any(SECRET in command for command in commands.values())
    agents = [process for process, command in commands.items() if command.endswith("-m shoal.launch.hosts")]
    ranks = program.ranks()
    of_two = [agent for agent in agents if agent == parent(parent(ranks[1]))]
    os.kill(of_two[0], signal.SIGKILL)
    program.wait_until(lambda: "[three rank 1]" in program.stderr or "goes on from" in program.stderr)
    assert "host two was lost" in program.stderr
    made = steps_made(run.path)
    program.wait_until(lambda: steps_made(run.path) > made + 3)
    program.signal(signal.SIGINT)
    assert program.end() == EXIT_STOPPED
    assert (
        f"stopped by a signal; saved run/checkpoints/{checkpoints(run.checkpoints)[0].name};"
        in program.stderr
    )
    assert program.leaves_no_process()
    assert len(list(run.log.glob("rank-0000[01].log"))) == 2


def parent(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "hosts can be emulated")
def test_a_host_that_falls_silent_is_replaced_and_its_ranks_end(tmp_path, tiny_run):
    with Hosts(3) as hosts, SshServer(tmp_path, ["one", "two", "three"], hosts) as server:
        python = f"env PYTHONPATH={ROOT} OMP_NUM_THREADS=1 {sys.executable}"
        given = ["--hosts", "one,two,three", "--nodes", "2", "--nproc", "1", "--ssh", server.ssh]
        train = [*tiny_run, *ENDLESS, "--run", "run"]
        command = shoal("launch", "ssh", *given, "--python", python, "--", "train", *train)
        switch = ["nsenter", f"--net=/proc/{hosts.switch}/ns/net"]
        program = Program([*switch, *command], tmp_path, {"PYTHONPATH": str(ROOT)})
        run = Run(tmp_path / "run")
        try:
            program.wait_until(lambda: len(checkpoints(run.checkpoints)) > 0)
            silent = program.ranks()[1]
            subprocess.run([*switch, "ip", "link", "set", "port1", "down"], check=True)
            program.wait_until(lambda: "goes on from" in program.stderr)
            assert "[three rank 1]" in program.stderr or program.ranks().keys() == {0, 1}
            assert not Path(f"/proc/{silent}").exists()
            made = steps_made(run.path)
            program.wait_until(lambda: steps_made(run.path) > made + 3)
            program.signal(signal.SIGINT)
            assert program.end() == EXIT_STOPPED
        finally:
            program.kill()


@pytest.mark.long
def test_the_first_line_after_a_failure_names_the_rank_and_its_host(start):
    program, _ = start("--hosts", "one,two", "--restarts", "0", SECRET=SECRET, FAILS="1")
    assert program.end() == 1
    lines = program.stderr.splitlines()
    first = next(index for index, line in enumerate(lines) if not line.startswith("["))
    assert lines[first] == "shoal: rank 1 failed: ValueError: the sixth batch is too much (on two)"
    assert any("secretive.py" in line for line in lines[first:])
    assert program.leaves_no_process()


@pytest.mark.long
def test_ranks_save_and_end_if_the_launcher_is_killed(start):
    program, run = start("--hosts", "one,two", SECRET=SECRET)
    program.wait_until(lambda: steps_made(run.path) > 2)
    program.signal(signal.SIGKILL)
    program.end()
    assert program.leaves_no_process()
    assert step_of(checkpoints(run.checkpoints)[0]) == run.metrics()[-1]["step"]


@pytest.mark.long
def test_control_c_twice_ends_ranks_that_are_stopped(start):
    program, run = start("--hosts", "one,two", SECRET=SECRET)
    program.wait_until(lambda: steps_made(run.path) > 2)
    os.kill(program.ranks()[1], signal.SIGSTOP)
    program.signal(signal.SIGINT)
    program.wait_until(lambda: "Ctrl-C ends them at once" in program.stderr)
    time.sleep(1.1)  # sooner it would be taken for the same
    program.signal(signal.SIGINT)
    assert program.end() == 130
    assert program.leaves_no_process()
