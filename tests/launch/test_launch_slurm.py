"""`shoal launch slurm` with a real slurmctld and real slurmds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_stand_ins import shoal, steps_made
from slurm_stand_ins import SlurmCluster, why_no_slurm

from shoal.checkpoint import checkpoints, step_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm() or "there is Slurm"),
]

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = """
import os
from torch import nn

class Model(nn.Module):
    def __init__(self, **shape):
        super().__init__()
        assert os.environ["CUDA_VISIBLE_DEVICES"] in ("0", "1"), "one visible GPU a rank"
        self.embedding, self.head, self.calls = nn.Embedding(256, 8), nn.Linear(8, 256), 0

    def forward(self, tokens):
        self.calls += 1
        if self.calls > 5 and "FAILS" in os.environ and os.environ["SLURM_PROCID"] == "1":
            raise ValueError("the sixth batch is too much")
        return self.head(self.embedding(tokens))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def submit(cluster, tmp_path, tiny_run):
    """Submits a training; its number."""
    (tmp_path / "gpu_model.py").write_text(MODEL)
    submitted = []

    def submit(*options, environment=None, train=()):
        settings = ["--set", "model=gpu_model:Model", "--set", "validation.every=0", "--run", "run"]
        given = ["--nodes", "2", "--nproc", "1", "--gpus", "--backoff", "1", *options]
        program = subprocess.run(
            shoal("launch", "slurm", *given, "--", "train", *tiny_run, *settings, *train),
            cwd=tmp_path,
            env={
                **os.environ,
                **cluster.environment,
                "PYTHONPATH": f"{ROOT}:{tmp_path}",
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",  # the names of these nodes are no names of hosts
                **(environment or {}),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert program.returncode == 0, program.stderr
        submitted.append(program.stdout.strip())
        return submitted[-1]

    yield submit
    for job in submitted:
        cluster.run("scancel", "--quiet", job)


def wait_for(condition, log, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "it has not begun"
        time.sleep(0.2)


def test_a_job_saves_before_its_time_limit_is_requeued_and_goes_on(cluster, submit, tmp_path):
    endless = ["--set", "steps=1000000", "--set", "checkpoint.every=0"]
    job = submit("--time", "2", "--grace", "50", train=endless)
    log = tmp_path / f"shoal-{job}.log"
    wait_for(lambda: log.exists() and "the job is requeued" in log.read_text(), log)
    saved = step_of(checkpoints(tmp_path / "run" / "checkpoints")[0])
    wait_for(lambda: "goes on from" in log.read_text(), log)
    assert f"step-{saved:08d}" in log.read_text().partition("goes on from")[2]
    wait_for(lambda: steps_made(tmp_path / "run") > saved + 2, log)
    assert cluster.state(job)["Restarts"] == "1"
    assert re.search(r"^0: run run: .* on 2 cpu ranks", log.read_text(), re.MULTILINE)


def test_a_job_that_fails_is_requeued_as_often_as_was_said(cluster, submit, tmp_path):
    job = submit("--restarts", "1", environment={"FAILS": ""})
    log = tmp_path / f"shoal-{job}.log"
    wait_for(lambda: cluster.state(job)["JobState"] == "FAILED", log)
    text = log.read_text()
    assert "exit code 1, failure 1 of 1 that are allowed: requeued in 1 s" in text
    assert "exit code 1, failure 2: the job ends" in text
    assert text.count("shoal: rank 1 failed: ValueError: the sixth batch is too much") == 2
    assert cluster.state(job)["ExitCode"] == "1:0"
    assert not list(tmp_path.glob("*.failures"))


def test_wrong_input_ends_the_job(cluster, submit, tmp_path):
    job = submit(train=["--plan", "tp=3"])
    log = tmp_path / f"shoal-{job}.log"
    wait_for(lambda: cluster.state(job)["JobState"] == "FAILED", log)
    assert cluster.state(job)["ExitCode"] == "2:0"
    assert "requeued" not in log.read_text()


def test_what_slurm_refuses_is_told(cluster, tmp_path):
    wrong = shoal("launch", "slurm", "--sbatch", "partition=none", "--", "train")
    given = {**os.environ, **cluster.environment, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(wrong, cwd=tmp_path, env=given, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("shoal: sbatch refused the job: ")
    assert "invalid partition" in ended.stderr
    assert sys.executable not in ended.stderr
