"""The benchmark of one GPU, tried on a CPU: its figures mean nothing there, but the program is the same."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
import gpu_peers
import torch

CPU = torch.device("cpu")
SMALL = gpu_peers.Shape("tiny", 2, 16, 2)


def test_rows_are_measured_and_predicted_beside_each_other(capsys, tmp_path):
    assert gpu.main(["--device", "cpu", "--only", "rows", "--write", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text("utf-8")
    assert page in capsys.readouterr().out
    assert "a trial of the program, no measurement" in page
    assert "| tiny, 2 layers, 64 x 2, none, none |" in page
    assert "Mean errors: memory" in page


def test_there_are_rows_of_every_recompute_compiled_and_not():
    assert len(gpu._ROWS) >= 24
    assert len(set(gpu._ROWS)) == len(gpu._ROWS)
    assert {(recompute, compile) for *_, recompute, compile in gpu._ROWS} == {
        (recompute, compile) for recompute in ("none", "selective", "full") for compile in ("none", "blocks")
    }


EAGER = [name for name in gpu_peers.PEERS if name.endswith(("eager", "compile=none"))]


@pytest.mark.parametrize("name", EAGER)
def test_eager_peers_make_steps(name):
    found = gpu_peers.measure(gpu_peers.PEERS[name](SMALL, CPU), CPU, bursts=2, steps=1, warm_up=1)
    assert 0 < found.low <= found.seconds <= found.high


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "there is no GPU" in capsys.readouterr().err
