"""The script for sbatch; `tests/launch/test_launch_slurm.py` runs it."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import pytest

from shoal.errors import ConfigError, UserError
from shoal.launch.submit import SlurmJob, submit

JOB = SlurmJob(
    words=("train", "--run", "a run", "--resume", "auto"),
    nodes=2,
    ranks=8,
    gpus=True,
    time="04:00:00",
    grace=120,
    restarts=3,
    pause=10,
    name="fish",
    folder="/work/my runs",
    python=("/opt/shoal/bin/python",),
    options={"partition": "gpu"},
)

STAND_INS = """
srun() { return $CODE; }
scontrol() { echo "scontrol $*"; }
sleep() { echo "sleep $1"; }
SLURM_JOB_ID=7
"""


def test_directives_are_what_was_asked_for():
    lines = JOB.text.splitlines()
    directives = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert directives == {
        *("job-name=fish", "nodes=2", "ntasks-per-node=8", "gpus-per-task=1", "time=04:00:00"),
        *("signal=USR1@120", "open-mode=append", "output=%x-%j.log", "chdir='/work/my runs'"),
        *("partition=gpu", "requeue"),
    }
    assert "/opt/shoal/bin/python -m shoal train --run 'a run' --resume auto" in JOB.text


def test_the_exit_code_decides_what_becomes_of_the_job(tmp_path):
    def run(code):
        script = JOB.text.replace("#!/bin/bash", f"#!/bin/bash\nCODE={code}\n{STAND_INS}")
        ended = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        return ended.returncode, ended.stdout.splitlines()

    requeue = "scontrol requeue 7"
    assert run(0) == (0, [])
    assert run(2) == (2, [])
    assert run(75) == (75, [requeue])
    assert run(1) == (1, ["sleep 10", requeue])
    assert run(137) == (137, ["sleep 20", requeue])
    assert run(75) == (75, [requeue])
    assert run(1) == (1, ["sleep 40", requeue])
    assert run(1) == (1, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["signal", "Partition", "a b", "x\n#SBATCH --y"])
def test_options_that_shoal_writes_or_nobody_has_are_refused(option):
    with pytest.raises(ConfigError, match="--sbatch"):
        dataclasses.replace(JOB, options={option: "1"})
    with pytest.raises(ConfigError, match="line break"):
        dataclasses.replace(JOB, options={"comment": "a\n#SBATCH --uid=0"})


def test_without_sbatch_there_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="sbatch, which is not on this host"):
        submit(JOB)
