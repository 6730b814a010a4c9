"""Training on streamed text: equal losses on any number of ranks, and a run that goes on elsewhere."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
from run_stand_ins import train

from shoal.spec.run import Run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of real text, and a file for validation."""
    folder = tmp_path_factory.mktemp("streamed")
    (folder / "text").mkdir()
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for module in modules[:30]:
        (folder / "text" / module.name).write_bytes(module.read_bytes()[:8000])
    (folder / "held-out.py").write_bytes(modules[31].read_bytes())
    return folder


def words_of(text, *more):
    settings = (
        "model=tiny",
        f"data.source={text / 'text'}",
        f"data.validation={text / 'held-out.py'}",
        "data.streaming=true",
        "data.window=16KiB",
        "sequence=32",
        "batch=32",
        "steps=24",
        "validation.every=0",
        "validation.samples=8",
        *more,
    )
    return [word for each in settings for word in ("--set", each)]


def losses(run):
    return [values["loss"] for values in Run(run).metrics() if "loss" in values]


def test_the_losses_are_those_of_one_rank_and_a_run_goes_on_elsewhere_on_others(ranks, text, tmp_path):
    words = words_of(text, f"data.cache={tmp_path / 'here'}", "checkpoint.every=18")
    train(ranks, [*words, "--plan", "dp=1", "--run", "alone"], tmp_path)
    expected = losses(tmp_path / "alone")
    assert len(expected) == 24
    train(ranks, [*words, "--plan", "dp=4,microbatch=4", "--run", "four"], tmp_path, on=4)
    assert losses(tmp_path / "four") == pytest.approx(expected, rel=1e-4)

    saved = tmp_path / "alone" / "checkpoints" / "step-00000018"
    there = ["--set", f"data.cache={tmp_path / 'there'}", "--plan", "dp=2,shard=zero2"]
    train(ranks, ["--resume", str(saved), *there, "--run", "later"], tmp_path, on=2)
    assert losses(tmp_path / "later") == pytest.approx(expected[18:], rel=1e-4)
    lengths = [np.load(next((tmp_path / each).glob("stream-*/lengths.npy"))) for each in ("here", "there")]
    made_here, made_there = ((each >= 0).sum() for each in lengths)
    assert made_there <= 1 + 2 * 16 < made_here
