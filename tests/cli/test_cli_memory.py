"""`shoal memory`."""

from __future__ import annotations

import json

import pytest
from run_stand_ins import train

from shoal.cli.main import main
from shoal.predict.cost import memory_of
from shoal.predict.cost.time import workload_on
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.run import Run, UnitMemory
from shoal.spec.run.directory import MeasuredMemory, read_memory, write_memory
from shoal.spec.workload import shape

PLAN = "dp=2,tp=2,pp=2,shard=zero1,precision=bf16"
WORDS = (PLAN, "--model", "gpt3-1.3b", "--cluster", "dgx-h100", "--batch", "16")


def printed(capsys, *words, code=0):
    assert main(["memory", *map(str, words)]) == code
    return capsys.readouterr()


def test_a_plan_has_the_memory_of_the_library(capsys):
    found = json.loads(printed(capsys, *WORDS, "--json").out)
    cluster = Cluster.parse("dgx-h100:8")
    expected = memory_of(
        workload_on(cluster, shape("gpt3-1.3b")), SettledPlan.of(Plan.parse(PLAN), 16), 16, cluster
    )
    assert [each["peak_bytes"] for each in found["places"]] == [each.peak for each in expected]
    assert [each["name"] for each in found["blocks"][:2]] == ["embedding", "layer 0"]
    assert {each["place"] for each in found["blocks"]} == {0, 1}


def test_equal_blocks_share_a_line(capsys):
    out = printed(capsys, *WORDS).out
    assert "layer 0 to layer 11, each" in out
    assert "fits" in out


def test_a_run_is_measured_beside_its_prediction(capsys, ranks, tiny_run, tmp_path):
    train(
        ranks, [*tiny_run, "--plan", "dp=2,shard=zero1", "--set", "steps=2", "--run", "one"], tmp_path, on=2
    )
    run = tmp_path / "one"
    found = json.loads(printed(capsys, run, "--json").out)
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    assert sum(found["ranks"][0]["parts"].values()) == found["ranks"][0]["peak_bytes"]
    for name in ("weights", "optimizer"):  # the optimizer also counts its steps
        assert found["predicted"]["parts"][name] == pytest.approx(found["ranks"][0]["parts"][name], rel=0.05)
    out = printed(capsys, run).out
    assert "predicted" in out
    assert "blocks of rank" in out


@pytest.mark.parametrize("changed", ["lora.targets=['query']", "lora.dropout=0.1"])
def test_a_run_of_adapters_is_measured_beside_its_prediction(capsys, ranks, tiny_run, tmp_path, changed):
    pytest.importorskip("peft")
    settings = ("steps=2", "lora.rank=4", changed)
    words = [*tiny_run, "--plan", "dp=2,shard=zero3", "--run", "one"]
    train(ranks, [*words, *(word for each in settings for word in ("--set", each))], tmp_path, on=2)
    found = json.loads(printed(capsys, tmp_path / "one", "--json").out)
    measured, predicted = found["ranks"][0], found["predicted"]
    assert predicted["parts"]["weights"] == pytest.approx(measured["parts"]["weights"], rel=0.05)
    last, expected = (each["blocks"][-2]["activations"] for each in (measured, predicted))
    assert expected == pytest.approx(last, rel=0.05)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("dp=2",), "--model, --cluster, --batch"),
        (("dp=2,shard=zero9", *WORDS[1:]), "zero9"),
        (("absent",), "absent does not exist"),
    ],
)
def test_wrong_input_is_named(capsys, words, told):
    assert told in printed(capsys, *words, code=2).err


def test_a_run_that_measured_nothing_is_told_apart(capsys, tmp_path):
    run = Run.create(tmp_path / "run", {})
    assert "did not measure its memory" in printed(capsys, run.path, code=2).err
    measured = MeasuredMemory(0, 2, 100, "backward, blocks.0", 4, (UnitMemory("blocks.0", 10, 10, 20, 30),))
    write_memory(run.memory_file(0), measured)
    assert read_memory([run.memory_file(0)]) == [measured]
    assert "has no memory of rank 3" in printed(capsys, run.path, "--rank", "3", code=2).err
    out = printed(capsys, run.path).out
    assert "predicted  no:" in out
    run.memory_file(0).write_text("{")
    assert "cannot be read" in printed(capsys, run.path, code=2).err
