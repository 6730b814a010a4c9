"""`shoal train` with state in files: the run of one without, and what is refused before a rank starts."""

import json

import pytest
from run_stand_ins import shoal, train

from shoal.errors import ConfigError
from shoal.models import build
from shoal.spec.plan import Plan
from shoal.train import TrainConfig
from shoal.train.job import require_offload

ALL = "offload=optimizer:file+gradients:file+parameters:file"


def values(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if "second" not in key and "time" not in key}
        for line in lines
    ]


def test_a_run_is_stopped_and_goes_on_under_another_place_of_its_state(ranks, tmp_path, tiny_run):
    words = [*tiny_run, "--set", "checkpoint.every=3"]
    in_memory, in_files = ("dp=2,shard=zero3", f"dp=2,shard=zero3,{ALL}")
    train(ranks, [*words, "--set", "steps=6", "--plan", in_memory, "--run", "a"], tmp_path, on=2)
    train(ranks, [*words, "--set", "steps=3", "--plan", in_files, "--run", "b"], tmp_path, on=2)
    more = ["--resume", "b", "--set", "steps=6", "--plan", in_memory]
    train(ranks, more, tmp_path, on=2)
    losses = [
        [(each["step"], each["loss"]) for each in values(tmp_path / run) if "loss" in each] for run in "ab"
    ]
    assert losses[0][:3] == losses[1][:3]  # the rates of the second half depend on the steps in all
    assert [step for step, _ in losses[1]] == [1, 2, 3, 4, 5, 6]
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names == {path.name for path in (tmp_path / "a").iterdir()}


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("offload_folder=text", "is not a folder"),
        ("optimizer.name=muon", "needs whole parameters"),
    ],
)
def test_what_cannot_work_is_refused_before_a_rank_starts(ranks, tmp_path, tiny_run, setting, part):
    (tmp_path / "text").touch()
    words = ["train", *tiny_run, "--nproc", "1", "--plan", "offload=optimizer:file", "--set", setting]
    ((code, _, said),) = ranks.run(shoal, 1, [*words, "--run", "run"], tmp_path)
    assert code == 2
    assert part in said
    assert not (tmp_path / "run").exists()


def test_a_folder_with_too_little_space_is_refused_with_the_bytes_of_all_ranks_of_the_host(tmp_path):
    model = build("llama2-70b", overrides={"layers": 10, "vocab_size": 10**9}, device="meta")
    plan = Plan.parse("dp=8,replicate=2,shard=zero3,offload=optimizer:file")
    with pytest.raises(ConfigError, match=r"left, and the state takes [\d.]+TiB on this host") as told:
        require_offload(TrainConfig(), plan, tmp_path / "runs" / "one", model)
    assert str(tmp_path / "runs" / "one") in str(told.value)
