"""Deterministic training: what it sets, and the operators that it refuses."""

from __future__ import annotations

import pytest

from shoal.errors import ConfigError
from shoal.train.randomness import compute_deterministically

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return self.head(self.embedding(tokens))
"""


def test_an_operator_without_a_deterministic_form_is_named(programs, tiny_run, tmp_path):
    (tmp_path / "putting_model.py").write_text(MODEL)
    arguments = ["train", *tiny_run, "--set", "model=putting_model:Model", "--set", "model_options={}"]
    arguments += ["--set", "steps=2", "--nproc", "1"]
    assert programs.run([*arguments, "--run", "usual"], tmp_path).returncode == 0
    ended = programs.run([*arguments, "--set", "deterministic=true", "--run", "refused"], tmp_path)
    assert ended.returncode == 2
    assert "deterministic=true was given, and put_ " in ended.stderr
    assert "use another operator" in ended.stderr


def test_a_workspace_with_which_cublas_is_not_deterministic_is_refused():
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG=:0:0"):
        compute_deterministically({"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
