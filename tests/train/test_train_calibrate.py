"""The loop closed with runs of the command: what one measured makes the next prediction nearer."""

from __future__ import annotations

import json
import shutil

import pytest
from port_stand_ins import free_port
from run_stand_ins import shoal, shoal_as_rank

from shoal.predict.simulate import Prediction, recorded_cluster, simulate
from shoal.spec.cluster import Cluster
from shoal.spec.run import Run

PLANS = {"dp": "dp=2", "zero1": "dp=2,shard=zero1", "tp": "tp=2"}

LAPTOP = Cluster.preset("laptop", 2)
TOLD = LAPTOP.replace(device=LAPTOP.device.slowed(1 / 8), source="eight times as quick as a laptop")
STEPS = 12


@pytest.fixture(scope="module")
def runs(ranks, tiny_run, tmp_path_factory):
    """A folder with a run of each Plan, on two ranks that were told of machines that they are not."""
    folder = tmp_path_factory.mktemp("calibrated")
    TOLD.write(folder / "told.toml")
    for name, plan in PLANS.items():
        words = [
            "train",
            *tiny_run,
            "--set",
            f"steps={STEPS}",
            "--run",
            name,
            "--plan",
            plan,
            "--cluster",
            "told.toml",
        ]
        ended = ranks.run(shoal_as_rank, 2, words, folder, free_port())
        assert [code for code, _, _ in ended] == [0, 0], ended[0][2]
    return folder


@pytest.fixture(scope="module")
def timed(runs, tmp_path_factory):
    """The same runs with the spans of a laptop, so that no other work on this machine decides."""
    folder = tmp_path_factory.mktemp("timed") / "runs"
    shutil.copytree(runs, folder)
    for name in PLANS:
        run = Run.open(folder / name)
        told = Prediction.of(run, LAPTOP)
        shutil.rmtree(run.timeline)
        simulate(told.workload, LAPTOP, told.plan, told.batch, steps=STEPS).timeline.write(run.timeline)
    return folder


def error(folder, run, *words):
    """Of the predicted step, as a share of the measured one."""
    code, out, err = shoal(["report", run, "--json", *words], folder)
    assert code == 0, err
    kinds = {each["kind"]: each for each in json.loads(out)["kinds"]}
    return abs(kinds["step"]["error"])


def test_a_run_keeps_the_machines_that_it_was_told_it_is_on(runs):
    assert recorded_cluster(Run.open(runs / "dp")) == TOLD
    code, out, _ = shoal(["report", "dp"], runs)
    assert code == 0
    assert "predicted beside measured" in out
    assert "cluster          laptop" in out


@pytest.mark.parametrize("predicted", PLANS)
def test_the_next_prediction_is_nearer_for_the_same_plan_and_for_others(timed, predicted):
    code, out, err = shoal(["calibrate", "dp", "--out", f"{predicted}.toml"], timed)
    assert code == 0, err
    assert "compute" in out
    assert error(timed, predicted, "--cluster", f"{predicted}.toml") < error(timed, predicted)


def test_several_runs_correct_together(timed):
    code, _, err = shoal(["calibrate", *PLANS, "--out", "all.toml"], timed)
    assert code == 0, err
    before = sum(error(timed, name) for name in PLANS)
    after = sum(error(timed, name, "--cluster", "all.toml") for name in PLANS)
    assert after < before


def test_a_run_that_was_told_no_machines_asks_for_them(runs, tmp_path):
    described = Run.open(runs / "dp").description
    untold = Run.create(tmp_path / "untold", {**described, "cluster": None})
    code, _, err = shoal(["calibrate", str(untold.path), "--out", "never.toml"], tmp_path)
    assert code == 2
    assert "give --cluster" in err
