"""A training on several hosts, whose agents are processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.checkpoint import checkpoints, step_of
from shoal.errors import ConfigError
from shoal.launch.fleet import Host, Policy, Work, start_program, train_on
from shoal.spec.run import Run

ROOT = Path(__file__).resolve().parent.parent.parent
NOTES = """
import os
from pathlib import Path

def note(step, steps):
    assert os.read(0, 1) == b"", "what the launcher tells the agent is not the rank's input"
    file = Path(os.environ["SHOAL_SECRET_FILE"])
    Path("secret-" + os.environ["RANK"]).write_text(f"{file.stat().st_mode:o} {file.read_text()} {file}")
    return 1.0
"""


AGENT = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "shoal.launch.hosts"]


def test_agents_train_together_and_keep_each_ranks_output(tiny_run, tmp_path, capfd):
    (tmp_path / "notes_at_home.py").write_text(NOTES)
    words = ["train", *tiny_run, "--set", "steps=3", "--run", "run"]
    words += ["--set", "optimizer.schedule=notes_at_home:note"]
    work = Work(words=words, folder=str(tmp_path), environment={"OMP_NUM_THREADS": "1"}, logs="run/log")
    hosts = [Host("one", address="127.0.0.1"), Host("two", address="127.0.0.1")]
    policy = Policy(least=2, most=2)
    shell = ["sh", "-c", 'echo welcome; printf "no end"; exec "$@"', "sh", *AGENT]
    assert train_on(lambda: hosts, work, policy, lambda host, said: start_program(shell, said)) == 0
    run = Run.open(tmp_path / "run")
    assert run.description["world_size"] == 2
    assert step_of(checkpoints(run.checkpoints)[0]) == 3
    told = capfd.readouterr()
    lines = told.out.splitlines()
    for words in ("[one] welcome", "[one] no end", "[two] welcome", "[two] no end"):
        lines.remove(words)
    assert all(line.startswith(("[one rank 0] ", "[two rank 1] ")) for line in lines)
    assert "[one rank 0] run run: " in told.err
    assert "rank 1 of 2" in (run.log / "rank-00001.log").read_text()
    modes, secrets, files = zip(
        *((tmp_path / f"secret-{n}").read_text().split() for n in (0, 1)), strict=True
    )
    assert modes == ("100600", "100600")
    assert secrets[0] == secrets[1]
    assert not any(Path(file).exists() for file in files)


def test_what_cannot_work_on_a_host_is_told_as_what_was_given_there(tmp_path):
    work = Work(words=["train"], folder=str(tmp_path / "nowhere"))
    hosts, policy = [Host("one")], Policy(least=1, most=1, restarts=3)
    with pytest.raises(ConfigError, match="nowhere cannot be entered on one: No such file or directory"):
        train_on(lambda: hosts, work, policy, lambda host, said: start_program(AGENT, said))
