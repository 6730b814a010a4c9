"""Deterministic training: what it sets, and the operators that it refuses."""

from __future__ import annotations

import contextlib

import pytest
import torch

from shoal.errors import ConfigError
from shoal.train.snapshot import compute_deterministically

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
    with (
        pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG=:0:0"),
        compute_deterministically({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}),
    ):
        pass


@pytest.mark.parametrize(("is_on", "fills", "benchmark"), [(False, True, True), (True, False, False)])
def test_new_memory_is_not_filled_meanwhile_and_afterwards_all_is_as_it_was(is_on, fills, benchmark):
    memory, cudnn = torch.utils.deterministic, torch.backends.cudnn

    def settings():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            memory.fill_uninitialized_memory,
            cudnn.benchmark,
        )

    before = settings()
    try:
        torch.use_deterministic_algorithms(is_on, warn_only=is_on)
        memory.fill_uninitialized_memory, cudnn.benchmark = fills, benchmark
        environment = {}
        with contextlib.suppress(KeyError), compute_deterministically(environment):
            assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
            assert settings() == (True, False, False, False)
            assert operators_of(lambda: torch.empty(100)) == ["aten::empty"]
            raise KeyError
        assert settings() == (is_on, is_on, fills, benchmark)
        assert environment == {}
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory, cudnn.benchmark = before[2:]


def test_a_workspace_that_was_given_stays():
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    for _ in range(2):
        with compute_deterministically(environment):
            assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


def operators_of(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return [each.name for each in profile.events() if each.name.startswith("aten::")]
