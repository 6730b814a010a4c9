"""A run that begins from the weights of another: fine-tuning."""

import random
import shutil

import pytest
from run_stand_ins import train

from shoal.checkpoint import compare, resolve
from shoal.cli.main import main
from shoal.spec.run import Run


@pytest.fixture(scope="module")
def source(ranks, tiny_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    words = [*tiny_run, "--set", "steps=4", "--plan", "dp=2,shard=zero2", "--run", "source"]
    train(ranks, words, folder, on=2)
    return folder / "source"


@pytest.fixture(scope="module")
def other_text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    chance = random.Random(1)
    for number in range(20):
        (folder / f"{number}.txt").write_text(" ".join(chance.choices(["tern", "gull", "dives"], k=200)))
    return folder


@pytest.mark.parametrize("plan", ["dp=1", "tp=2", "dp=2,exchange=local,every=2"])
def test_a_run_begins_from_weights_with_other_data_under_any_plan(
    ranks, tiny_run, source, other_text, tmp_path, plan
):
    """Steps that change nothing leave the weights as they were; everything else begins anew."""
    settings = [f"init={source}", f"data.source={other_text}", "steps=2", "optimizer.learning_rate=1e-30"]
    words = [*tiny_run, *(word for each in settings for word in ("--set", each)), "--plan", plan]
    train(ranks, [*words, "--run", "tuned"], tmp_path, on=1 if plan == "dp=1" else 2)
    newest = resolve(tmp_path / "tuned")[0]
    differ = list(compare(resolve(source)[0], newest))
    assert not [each for each in differ if each.name.startswith(("model/", "fixed/"))]
    assert any(each.name.startswith("optimizer/") for each in differ)
    run = Run.open(tmp_path / "tuned")
    assert [values["step"] for values in run.metrics()] == [1, 2]
    assert run.description["config"]["init"] == str(source)


def test_a_run_that_began_from_weights_goes_on_by_itself(ranks, tiny_run, source, other_text, tmp_path):
    settings = [f"init={source}", f"data.source={other_text}", "steps=2"]
    words = [*tiny_run, *(word for each in settings for word in ("--set", each)), "--run", "tuned"]
    train(ranks, words, tmp_path)
    train(ranks, ["--resume", "tuned", "--set", "steps=3"], tmp_path)
    assert [values["step"] for values in Run.open(tmp_path / "tuned").metrics()] == [1, 2, 3]


def test_a_run_begins_from_an_older_checkpoint_if_the_newest_one_is_corrupt(
    ranks, tiny_run, source, other_text, tmp_path
):
    shutil.copytree(source, tmp_path / "source")
    older = resolve(tmp_path / "source")[0]
    newest = shutil.copytree(older, older.with_name("step-00000009"))
    (newest / "manifest.json").write_text("{")
    settings = ["init=source", f"data.source={other_text}", "steps=1", "optimizer.learning_rate=1e-30"]
    words = [*tiny_run, *(word for each in settings for word in ("--set", each)), "--run", "tuned"]
    train(ranks, words, tmp_path)
    differ = compare(older, resolve(tmp_path / "tuned")[0])
    assert not [each for each in differ if each.name.startswith(("model/", "fixed/"))]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["init=nowhere"], "init=nowhere cannot be begun from: nowhere does not exist"),
        (["init={source}", "model_options.hidden=64"], "has shape [256, 32] there, and [256, 64] here"),
        (["init={source}", "model_options.layers=3"], "it has no blocks.2."),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_a_run_is_made(
    tiny_run, source, tmp_path, monkeypatch, capsys, settings, said
):
    monkeypatch.chdir(tmp_path)
    words = [word for each in settings for word in ("--set", each.format(source=source))]
    assert main(["train", *tiny_run, *words, "--nproc", "1", "--run", "tuned"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "tuned").exists()
