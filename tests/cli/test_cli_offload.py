"""`shoal simulate` under a Plan with `offload`: what it prints beside the step."""

import json

import pytest

from shoal.cli.main import main

PLAN = "dp=8,shard=zero3,microbatch=1,precision=bf16"
COMMAND = ["simulate", "--model", "llama3-8b", "--cluster", "dgx-h100:8", "--batch", "16", "--plan"]


def simulated(plan, capsys):
    assert main([*COMMAND, plan, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_step_is_longer_by_what_offload_adds_and_takes_less_memory(capsys):
    before = simulated(PLAN, capsys)
    after = simulated(f"{PLAN},offload=optimizer:host", capsys)
    assert after["step_seconds"] == pytest.approx(
        before["step_seconds"] + after["offload"]["extra_seconds"], rel=1e-3
    )
    saved = before["memory"][0]["parts"]["optimizer"] - after["memory"][0]["parts"]["optimizer"]
    assert saved == pytest.approx(8 * before["parameters"] / 8)
    assert "offload" not in before


def test_it_is_told_in_lines(capsys):
    assert main([*COMMAND, f"{PLAN},offload=optimizer:file"]) == 0
    assert "offload adds" in capsys.readouterr().out


def test_a_cluster_without_files_is_refused_by_name(capsys):
    assert (
        main(
            [
                "simulate",
                "--plan",
                "offload=optimizer:file",
                "--model",
                "tiny",
                "--cluster",
                "laptop:1",
                "--batch",
                "1",
            ]
        )
        == 2
    )
    assert "has no host.file_bandwidth" in capsys.readouterr().err
