"""The lab of examples/sst2 learns its stand-in, and accounts for each bucket."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from run_stand_ins import train

from shoal.predict.cost import AlphaBeta
from shoal.spec.run import Run
from shoal.spec.timeline import Timeline

pytest.importorskip("transformers")

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "sst2"
STEPS = 40


@pytest.fixture(scope="module")
def lab():
    sys.path.insert(0, str(FOLDER))
    import lab

    yield lab
    sys.path.remove(str(FOLDER))
    for name in ("lab", "stand_in"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def runs(lab, ranks, tmp_path_factory):
    """The runs of the lab by name, each on two ranks."""
    folder = tmp_path_factory.mktemp("sst2")
    settings = (f"steps={STEPS}", "validation.every=0", f"data.cache={folder / 'cache'}")
    given = Namespace(data=None, model=None, out=folder, settings=list(settings))
    words = [word for each in lab.prepare(given) for word in ("--set", each)]
    for name, plan in lab.PLANS.items():
        words_of_run = [str(lab.WITHOUT[0]), *words, "--plan", plan, "--run", name]
        train(ranks, words_of_run, folder, on=2)
    return {name: Run(folder / name) for name in lab.PLANS}


def test_the_stand_in_is_learned_alike_under_ddp_and_zero3(runs):
    labels = [
        line[-1] for line in Path(runs["ddp"].path.parent, "made", "dev.tsv").read_text().splitlines()[1:]
    ]
    majority = max(labels.count(label) for label in set(labels)) / len(labels)
    assert majority < 0.6
    accuracies = [run.metrics()[-1]["validation_accuracy"] for run in runs.values()]
    assert min(accuracies) > majority + 0.2
    ddp, zero3 = ([values["loss"] for values in run.metrics() if "loss" in values] for run in runs.values())
    assert zero3[:20] == pytest.approx(ddp[:20], rel=1e-2)


def test_the_files_of_train_and_validation_have_no_line_in_common(runs):
    made = runs["ddp"].path.parent / "made"
    train_lines, dev_lines = (
        set((made / f"{name}.tsv").read_text().splitlines()[1:]) for name in ("train", "dev")
    )
    assert len(train_lines) > 4000
    assert not train_lines & dev_lines


def test_each_bucket_has_its_bytes_and_its_prediction(lab, runs):
    buckets = lab.gradients_of(Timeline.read(runs["ddp"].timeline))
    parameters = runs["ddp"].description["model"]["parameters"]
    assert sum(each.bytes for each in buckets) == pytest.approx(4 * parameters, rel=0.01)
    assert all(each.seconds >= each.exposed_seconds >= 0 for each in buckets)
    cost = AlphaBeta(1e-3, 1e-9)
    predicted = lab.row("1MiB", buckets, cost).split()[3]
    assert float(predicted) == pytest.approx(len(buckets) + 4e-6 * parameters, rel=0.01)


@pytest.mark.long
def test_the_whole_lab_ends_with_a_prediction_for_each_bucket_size(lab, tmp_path):
    command = [sys.executable, str(FOLDER / "lab.py"), "--out", str(tmp_path), "--set", "steps=20"]
    command += ["--set", f"data.cache={tmp_path / 'cache'}"]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [line.split() for line in ended.stdout.splitlines()[-3:]]
    assert tuple(row[0] for row in rows) == lab.WITHOUT[1]
    assert all(float(number) >= 0 for row in rows for number in row[1:])
    assert "no --data: lines of Python's standard library stand in" in ended.stdout
    assert ended.stdout.count("all_reduce:bucket 0") == 1
    assert "reduce_scatter:bucket 0" in ended.stdout
