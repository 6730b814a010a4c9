"""`shoal check`, as processes where it starts ranks."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from shoal.cli.main import main

CHECK = [sys.executable, "-m", "shoal.cli.main", "check"]
QUICK = [
    *(f"--option={option}" for option in ("layers=2", "hidden=32", "heads=2", "kv_heads=1", "ffn=48")),
    "--sequence=16",
    "--steps=2",
]

# Models whose second rank computes something else, or nothing.
MODELS = """
import os, torch
from torch import nn

class Same(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        return self.head(self.embed(tokens) * self.factor)

    factor = 1.0

class Other(Same):
    factor = 1.0 if os.environ.get("RANK", "0") == "0" else 1.01

class Dying(Same):
    def forward(self, tokens):
        if os.environ.get("RANK") == "1":
            os._exit(3)
        return super().forward(tokens)
"""


TASK = """
import torch
import torch.nn.functional as F
from torch import nn

from shoal.models import Task


def task():
    return Task(build=lambda: nn.Linear(4, 2), batch=batch, loss=loss)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(8, 4, generator=generator)
    return {"inputs": inputs, "targets": inputs[:, :2].sin()}


def loss(model, batch):
    return F.mse_loss(model(batch["inputs"]).float(), batch["targets"])
"""


@pytest.fixture
def check(programs):
    return lambda *words, folder=None: programs.run(["check", *words], folder)


def test_every_plan_of_two_ranks_is_told_in_a_line_and_summed_up(check):
    small = [f"--option={option}" for option in ("layers=1", "heads=1", "kv_heads=1")]  # fewer legal Plans
    done = check("--all", "--ranks=2", *QUICK, *small)
    assert done.returncode == 0, done.stderr
    *lines, summary = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} <= {"passed", "refused"}
    plans = [line.split()[-1] for line in lines if not line.startswith(" ")]
    assert "dp=2,shard=zero3,microbatch=2,recompute=full" in plans
    assert summary.startswith(f"{len(plans)} Plans: ")


def test_a_plan_of_one_rank_needs_no_other_process(capsys):
    assert main(["check", "--plan", "microbatch=2", "--json", *QUICK]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["passed"] == 1
    assert content["trial"]["batch"] == 8
    assert [step["step"] for step in content["plans"][0]["steps"]] == [1, 2]


def test_a_sample_of_the_plans_is_enough_if_it_is_asked_for(capfd):
    assert main(["check", "--all", "--ranks=1", "--sample=2", *QUICK]) == 0
    *lines, summary = capfd.readouterr().out.splitlines()
    assert len(lines) == 2
    assert summary == "2 Plans: 2 passed"


def test_a_model_that_differs_between_ranks_fails_with_what_departs(check, tmp_path):
    (tmp_path / "models_to_check.py").write_text(MODELS)
    done = check("--plan=dp=2", "--model=models_to_check:Other", "--sequence=8", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "failed: step 1: the gradient of embed.weight departs by " in done.stdout


def test_an_entry_of_the_zoo_passes_and_what_is_not_compared_is_told(check):
    done = check("--plan=dp=2,shard=zero3", "--model=zoo:batch_norm", "--steps=1")
    assert done.returncode == 0, done.stderr
    assert "against one device: shoal.testing.zoo:batch_norm, 16 samples" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("not compared: running statistics")


def test_a_task_of_ones_own_is_checked(check, tmp_path):
    (tmp_path / "tasks_to_check.py").write_text(TASK)
    done = check("--plan=dp=2,shard=zero2,microbatch=2", "--model=tasks_to_check:task", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "passed: " in done.stdout


def test_a_rank_that_dies_breaks_its_plan_alone(check, tmp_path):
    (tmp_path / "models_to_check.py").write_text(MODELS)
    done = check(
        "--plan=dp=2", "--json", "--model=models_to_check:Dying", "--sequence=8", "--steps=1", folder=tmp_path
    )
    assert done.returncode == 1, done.stderr
    content = json.loads(done.stdout)
    assert content["broken"] == 1
    assert "rank 1 failed" in content["plans"][0]["reason"]


def test_it_joins_the_ranks_that_are_there_and_rank_0_prints(programs, tmp_path):
    first, other = programs.run_ranks(["check", "--plan=shard=zero1", *QUICK], 2, tmp_path)
    assert first.returncode == other.returncode == 0, first.stderr
    assert first.stdout.count("dp=2,shard=zero1") == 1
    assert "passed: " in first.stdout
    assert not other.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--plan=dp=2,shard=zero4"], "shard=zero4 does not exist"),
        (["--plan=dp=2", "--ranks=3"], "for 2 ranks, and there are 3"),
        (["--plan=dp=2", "--batch=3"], "batch of 3 does not divide"),
        (["--plan=dp=2", "--steps=0"], "steps=0"),
        (["--plan=dp=2", "--model=tyny"], "did you mean 'tiny'"),
        (["--plan=dp=2", "--option=layrs=3"], "did you mean 'layers'"),
        (["--plan=dp=2", "--option=layers"], "has no value"),
        (["--plan=dp=2", "--sequence=1000"], "longer than the context"),
        (["--plan=dp=2", "--model=zoo:batch_nrm"], "did you mean 'batch_norm'"),
        (["--plan=pp=2", "--model=zoo:lora"], "pp=2 was given"),
        (["--all", "--ranks=0"], "0 ranks"),
        (["--all", "--batch=3"], "batch of 3 does not divide"),
        (["--all", "--axes=2"], "more than 1 degrees above 1"),
        (["--all", "--sample=0"], "sample=0"),
        (["--plan=dp=2", "--sample=3"], "--sample was given with --plan"),
        (["--all", "--precision=fp8"], "reference on one device does not compute in it"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(capsys, words, told):
    assert main(["check", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err
    assert len(captured.err.splitlines()) == 3


def test_plans_on_a_gpu_are_not_compiled_one_by_one(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("shoal.testing.check.compare_locally", lambda job, *_: given.append(job) or [])
    assert main(["check", "--all", "--ranks=2", "--device=cuda"]) == 0
    assert {plan.compile for plan in given[0].plans} == {"none"}


def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["check", "--plan=dp=2", "--device=cuda"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err
