"""Real processes: `shoal train` with parameter servers, when a server or a worker is killed."""

from __future__ import annotations

import json
import os
import time

import pytest
from launch_stand_ins import Program, shoal, steps_made

from shoal.spec.run import Run

PLANS = {
    "in step": ("dp=4,replicate=2,shard=zero2", None),
    "server killed": ("dp=4,replicate=2,shard=zero2,exchange=server,servers=2,mirror=1", 5),
    "worker killed": ("dp=3,exchange=server,staleness=2", 0),
}
STEPS = 60


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_run):
    """The runs; in each but the first a process is killed after some steps."""
    started = {}
    for name, (plan, victim) in PLANS.items():
        folder = tmp_path_factory.mktemp("run")
        settings = [f"steps={STEPS}", "batch=12", "optimizer.clip=0.5", "checkpoint.every=0"]
        words = [word for each in settings for word in ("--set", each)]
        started[name] = (
            Program(shoal("train", *tiny_run, *words, "--plan", plan, "--run", "run"), folder),
            Run(folder / "run"),
            victim,
        )
    waiting = [each for each in started.values() if each[2] is not None]
    while waiting:
        for program, run, victim in list(waiting):
            if steps_made(run.path) > 5:
                os.kill(program.ranks()[victim], 9)
                waiting.remove((program, run, victim))
        time.sleep(0.02)
    yield {name: (program, run, program.end()) for name, (program, run, _) in started.items()}
    for program, _, _ in started.values():
        program.kill()


def losses(run):
    return [each["validation_loss"] for each in run.metrics() if "validation_loss" in each]


def test_a_killed_server_is_replaced_by_its_copy(runs):
    _, expected, code = runs["in step"]
    program, run, other = runs["server killed"]
    assert code == other == 0
    # fp32 sums in another order, over sixty steps of AdamW
    assert losses(run)[-1] == pytest.approx(losses(expected)[-1], abs=2e-3)
    assert "killed by SIGKILL" in program.stderr
    assert program.leaves_no_process()


def test_a_killed_worker_is_replaced_by_the_others(runs):
    """Rank 0 reports and saves; another worker does from then on."""
    program, run, code = runs["worker killed"]
    assert code == 0
    assert "the others go on" in program.stderr
    assert losses(run)
    assert list(run.checkpoints.glob(f"step-*{STEPS}"))
    text = run.server_file(0).read_text()
    applied = [json.loads(line) for line in text.splitlines()]
    assert len(applied) == 3 * STEPS  # what the lost worker had just sent is not applied again
    assert {each["staleness"] for each in applied} > {0}
    assert program.leaves_no_process()
