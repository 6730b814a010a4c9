"""A training on several hosts, whose agents are processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from shoal.checkpoint import checkpoints, step_of
from shoal.fleet import Host, Policy, ProcessChannel, Work, train_on
from shoal.run import Run

ROOT = Path(__file__).resolve().parent.parent.parent
NOTES = """
import os
from pathlib import Path

def note(step, steps):
    file = Path(os.environ["SHOAL_SECRET_FILE"])
    Path("secret-" + os.environ["RANK"]).write_text(f"{file.stat().st_mode:o} {file.read_text()} {file}")
    return 1.0
"""


def test_agents_train_together_and_keep_each_ranks_output(tiny_run, tmp_path, capfd):
    (tmp_path / "notes_at_home.py").write_text(NOTES)
    words = ["train", *tiny_run, "--set", "steps=3", "--run", "run"]
    words += ["--set", "optimizer.schedule=notes_at_home:note"]
    work = Work(words=words, folder=str(tmp_path), environment={"OMP_NUM_THREADS": "1"}, logs="run/log")
    agent = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "shoal.launch"]
    hosts = [Host("one", address="127.0.0.1"), Host("two", address="127.0.0.1")]
    policy = Policy(least=2, most=2)
    assert (
        train_on(lambda: hosts, work, policy, lambda host, told: ProcessChannel(host.name, agent, told)) == 0
    )
    run = Run.open(tmp_path / "run")
    assert run.description["world_size"] == 2
    assert step_of(checkpoints(run.checkpoints)[0]) == 3
    told = capfd.readouterr()
    assert all(line.startswith(("[one rank 0] ", "[two rank 1] ")) for line in told.out.splitlines())
    assert "[one rank 0] run run: " in told.err
    assert "rank 1 of 2" in (run.log / "rank-00001.log").read_text()
    modes, secrets, files = zip(
        *((tmp_path / f"secret-{n}").read_text().split() for n in (0, 1)), strict=True
    )
    assert modes == ("100600", "100600")
    assert secrets[0] == secrets[1]
    assert not any(Path(file).exists() for file in files)
