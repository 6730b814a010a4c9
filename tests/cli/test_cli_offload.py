"""`shoal simulate --offload`: what it prints of state that is kept outside of devices."""

import json

import pytest

from shoal.cli.main import main

COMMAND = [
    *("simulate", "--plan", "dp=8,shard=zero3,microbatch=1,precision=bf16", "--model", "llama3-8b"),
    *("--cluster", "dgx-h100:8", "--batch", "16"),
]


def test_what_it_takes_and_frees_is_printed_beside_the_step_without_it(capsys):
    assert main([*COMMAND, "--offload", "parameters", "--to", "file", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    found = summary["offload"]
    added = sum(found["exposed_seconds"].values()) - found["replaced_seconds"]
    assert found["step_seconds"] == pytest.approx(summary["step_seconds"] + added)
    assert found["peak_bytes"] < max(each["peak_bytes"] for each in summary["memory"])


def test_it_is_told_in_lines_and_only_where_it_was_asked_for(capsys):
    assert main([*COMMAND, "--offload", "optimizer"]) == 0
    assert "with offload=optimizer to host: a step of" in capsys.readouterr().out
    assert main(COMMAND) == 0
    assert "offload" not in capsys.readouterr().out


def test_what_cannot_be_offloaded_ends_with_a_named_error(capsys):
    assert main([*COMMAND, "--offload", "gradients"]) == 2
    assert "offload=gradients does not exist" in capsys.readouterr().err
