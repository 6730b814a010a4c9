"""The loop of docs/guides/own-loop.md learns, and goes on where it was."""

import re
import runpy
import shutil

import pytest
from script_ranks import EXAMPLES, run_on_ranks

from shoal.checkpoint import read_manifest

LOOP = "11_own_loop.py"
SORTS = 0.2
"""Always to answer the expected order statistics of eight normal numbers would have a loss of 0.25."""


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """Checkpoints of steps 50 and 100 of two ranks."""
    folder = tmp_path_factory.mktemp("own") / "checkpoints"
    run_on_ranks(ranks, LOOP, folder, 100)
    return folder


def from_step_50(trained, folder):
    folder.mkdir()
    shutil.copytree(trained / "step-00000050", folder / "step-00000050")
    return folder


def test_a_loop_that_goes_on_saves_the_same_bytes(ranks, trained, tmp_path):
    folder = from_step_50(trained, tmp_path / "resumed")
    run_on_ranks(ranks, LOOP, folder, 100)
    files = [read_manifest(each / "step-00000100").files for each in (trained, folder)]
    assert files[0] == files[1]


def test_a_loop_goes_on_alone_with_average_and_schedule(monkeypatch, capsys, trained, tmp_path):
    folder = from_step_50(trained, tmp_path / "alone")
    monkeypatch.setattr("sys.argv", [LOOP, str(folder), "100"])
    ran = runpy.run_path(str(EXAMPLES / LOOP), run_name="__main__")
    printed = capsys.readouterr().out
    (loss,) = (float(number) for number in re.findall(r"loss (\d+\.\d+)", printed))
    assert loss < SORTS
    assert ran["schedule"].last_epoch == 100
    assert all("average" in state for state in ran["optimizer"].state.values())
    assert "average" in str(read_manifest(trained / "step-00000100").tensors.keys())


def test_the_average_is_put_back(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", [LOOP, str(tmp_path / "checkpoints"), "1"])
    ran = runpy.run_path(str(EXAMPLES / LOOP), run_name="__main__")
    model = ran["model"]
    ran["train"](ran["validation"][0])
    before = [each.detach().clone() for each in model.parameters()]
    with ran["averaged"]():
        within = [each.detach().clone() for each in model.parameters()]
    assert any(not within[place].equal(each) for place, each in enumerate(before))
    assert all(each.equal(before[place]) for place, each in enumerate(model.parameters()))
