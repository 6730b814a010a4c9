"""Each example runs, alone or under torchrun, and learns."""

import math
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from script_ranks import run_on_ranks
from torch.distributed.run import main as torchrun

from shoal.cli.main import main as shoal
from shoal.spec.cluster import Cluster
from shoal.spec.run import Run

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def process_as_it_was(monkeypatch):
    """Launchers and `shoal train`, which run in this process here, take over signals and paths."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_alone(monkeypatch, capsys, name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def run_under_torchrun(capfd, name, *arguments):
    torchrun(["--nproc-per-node", "2", "--standalone", str(EXAMPLES / name), *map(str, arguments)])
    return capfd.readouterr().out


def losses(printed):
    return [float(number) for number in re.findall(r"loss (\d+\.\d+)", printed)]


SORTS = 0.2
"""Always to answer the expected order statistics of eight normal numbers would have a loss of 0.25."""


def test_ten_lines_train_on_one_rank(monkeypatch, capsys):
    assert losses(run_alone(monkeypatch, capsys, "01_ten_lines.py"))[-1] < SORTS


def test_ten_lines_train_on_ranks(ranks):
    of_ranks = losses(run_on_ranks(ranks, "01_ten_lines.py"))
    assert len(of_ranks) == 2
    assert max(of_ranks) < SORTS


def test_a_model_of_ones_own_is_split(ranks):
    of_ranks = losses(run_on_ranks(ranks, "05_tensor_parallel.py"))
    assert of_ranks[0] == of_ranks[1] < SORTS


def test_attention_over_ranks_copies_letters(ranks):
    assert max(losses(run_on_ranks(ranks, "06_context_parallel.py"))) < math.log(8) / 4


def test_a_pipeline_trains_as_one_process(ranks, monkeypatch, capfd):
    (alone,) = losses(run_alone(monkeypatch, capfd, "07_pipeline.py"))
    of_ranks = losses(run_on_ranks(ranks, "07_pipeline.py"))
    assert of_ranks == pytest.approx([alone] * 2, abs=0.002)  # printed with three digits
    assert alone < SORTS


def test_the_best_plan_is_chosen_and_explained(monkeypatch, capsys):
    printed = run_alone(monkeypatch, capsys, "08_plan.py")
    assert "s a step" in printed
    assert "takes the largest share" in printed


def test_the_file_of_devices_that_differ_has_them_all():
    cluster = Cluster.read(EXAMPLES / "13_parts.toml")
    assert [(part.devices, part.pace) for part in cluster.parts] == [(16, 1.0), (8, 0.8), (8, 1.0)]


def test_the_file_of_a_cluster_is_one():
    cluster = Cluster.read(EXAMPLES / "12_cluster.toml")
    assert (cluster.devices, cluster.devices_per_node) == (8, 4)
    assert Cluster.parse(f"{EXAMPLES / '12_cluster.toml'}:16").devices == 16


def test_zero3_under_torchrun_saves_a_whole_model(capfd, tmp_path):
    first, *_, last = losses(run_under_torchrun(capfd, "02_torchrun.py", tmp_path / "model.safetensors"))
    assert last < first / 5
    weights = load_file(tmp_path / "model.safetensors")
    assert weights["0.weight"].shape == (64, 16)
    assert all(torch.isfinite(weight).all() for weight in weights.values())


def test_a_loop_goes_on_with_another_number_of_ranks(ranks, monkeypatch, capfd, tmp_path):
    folder = tmp_path / "checkpoints"
    assert max(losses(run_on_ranks(ranks, "09_save.py", folder))) < SORTS
    printed = run_alone(monkeypatch, capfd, "09_save.py", folder)
    assert "goes on from step 100" in printed
    assert "on 2 ranks" in printed
    before, after = losses(printed)
    assert "saved step-00000200" in printed
    assert after < before


def test_the_trainer_trains_saves_and_explains(monkeypatch, capsys, tmp_path):
    printed = run_alone(monkeypatch, capsys, "03_trainer.py", tmp_path)
    assert losses(printed)[-1] < SORTS
    assert (tmp_path / "checkpoints" / "step-00000060" / "manifest.json").is_file()
    assert "is compute" in printed


def test_the_configuration_trains(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    config = EXAMPLES / "04_config.toml"
    smaller = ["--set", "steps=4", "--set", "validation.samples=4", "--nproc", "1"]
    assert shoal(["train", str(config), "--run", str(tmp_path / "run"), *smaller]) == 0
    metrics = Run.open(tmp_path / "run").metrics()
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_an_average_of_the_weights_is_evaluated_and_exported(ranks, monkeypatch, capfd):
    alone = run_alone(monkeypatch, capfd, "10_average.py")
    printed = run_on_ranks(ranks, "10_average.py")
    assert losses(printed) == pytest.approx(losses(alone) * 2, abs=0.002)  # printed with three digits
    assert losses(alone)[0] < SORTS
    assert re.findall(r"(\d) whole tensors", alone) == ["4"]
    assert sorted(re.findall(r"(\d) whole tensors", printed)) == ["0", "4"]
