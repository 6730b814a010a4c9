"""A model that computes something else once its sequence is divided is refused before the first step."""

import random
import warnings

import numpy as np
import pytest
import torch
from parallel_stand_ins import ListRecorder
from torch import nn

from shoal.errors import ModelError, PlanError
from shoal.models.attention import causal_attention
from shoal.models.transformer import positions_from_zero
from shoal.parallel import Split, TensorLayout, parallelize

VOCABULARY, WIDTH, SEQ = 61, 32, 16


def of_the_part(seq, device):
    return torch.arange(seq, device=device)


class Own(nn.Module):
    """A transformer of a user, which may count positions from zero on every rank, convolve, or draw."""

    tensor_layout = TensorLayout({"": Split({"up": 48}, {"down": 48})}, "embed", "head")

    def __init__(self, *, counts="whole", width=1, noise=False, two=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.convolve = nn.Conv1d(WIDTH, WIDTH, width)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.attend = causal_attention
        self.positions = positions_from_zero if counts == "whole" else of_the_part
        self.noise, self.two, self.calls = noise, two, 0

    def forward(self, tokens, second=None):
        self.calls += 1
        if self.two:
            tokens = tokens + second
        hidden = self.embed(tokens)
        hidden = hidden + self.place(self.positions(hidden.shape[1], tokens.device))
        before = nn.functional.pad(hidden.transpose(1, 2), (self.convolve.kernel_size[0] - 1, 0))
        hidden = hidden + self.convolve(before).transpose(1, 2)
        heads = hidden.unflatten(-1, (4, -1)).transpose(1, 2)
        hidden = hidden + self.attend(heads, heads, heads).transpose(1, 2).flatten(-2)
        hidden = hidden + self.drop(self.down(self.up(hidden).relu()))
        if self.noise:
            hidden = hidden + 0.1 * (random.random() + np.random.rand()) * torch.randn(WIDTH)
        return self.head(hidden), hidden.mean()


class Fed(nn.Module):
    """Layers without attention: a convolution of some width, and a feed-forward layer that is split."""

    tensor_layout = TensorLayout({"": Split({"up": 48}, {"down": 48})}, "embed", "head")

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.convolve = nn.Conv1d(WIDTH, WIDTH, width)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        before = nn.functional.pad(hidden.transpose(1, 2), (self.convolve.kernel_size[0] - 1, 0))
        hidden = hidden + self.convolve(before).transpose(1, 2)
        return self.head(hidden + self.down(self.up(hidden).relu()))


def outcome(build, arguments, plan):
    """The error of parallelize, if there is one, and the warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            parallelize(build(**arguments), plan)
            error = ""
        except (ModelError, PlanError) as caught:
            error = str(caught)
    return error, [str(each.message) for each in warned if "probed" in str(each.message)]


@pytest.mark.parametrize("plan", ["cp=2", "cp=2,context=ulysses", "dp=2,cp=2,shard=zero3"])
@pytest.mark.parametrize("noise", [False, True])
def test_a_users_model_that_is_right_over_ranks_is_not_refused(ranks, plan, noise):
    size = 4 if "dp=2" in plan else 2
    assert ranks.run(outcome, size, Own, {"noise": noise}, plan) == [("", [])] * size


@pytest.mark.parametrize("arguments", [{"counts": "own"}, {"width": 3}])
def test_a_users_model_that_counts_or_mixes_by_itself_is_refused_under_cp(ranks, arguments):
    for error, _ in ranks.run(outcome, 2, Own, arguments, "cp=2"):
        assert "Own cannot run under context parallelism: its output over ranks differs" in error
        assert "leave out cp" in error


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,tensor=async"])
def test_a_layer_that_mixes_along_a_split_sequence_is_refused(ranks, plan):
    for error, _ in ranks.run(outcome, 2, Fed, {"width": 3}, plan):
        assert "splits the sequence of Fed between blocks, and its output over ranks differs" in error
        assert "add tensor=plain" in error
    assert ranks.run(outcome, 2, Fed, {"width": 1}, plan) == [("", [])] * 2
    assert ranks.run(outcome, 2, Fed, {"width": 3}, "tp=2,tensor=plain") == [("", [])] * 2


def test_a_model_that_cannot_be_asked_is_named_once_and_runs(ranks):
    (error, said), (_, by_the_other) = ranks.run(outcome, 2, Own, {"two": True}, "cp=2")
    assert not error
    assert len(said) == 1
    assert "Own could not be probed" in said[0]
    assert not by_the_other


def traces():
    model, recorder, called = Own(noise=True).train(), ListRecorder(), []
    model.register_forward_hook(lambda *given: called.append(given))
    draws = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    parallelize(model, "cp=2", recorder=recorder)
    kept = torch.equal(torch.get_rng_state(), draws[0]), (np.random.get_state()[1] == draws[1]).all()
    names = {name for name, *_ in recorder.collectives}
    return [*kept, random.getstate() == draws[2]], model.calls, len(called), model.drop.training, names


def test_asking_leaves_no_trace(ranks):
    for kept, calls, called, is_training, names in ranks.run(traces, 2):
        assert all(kept)
        assert (calls, called, is_training) == (0, 0, True)
        assert names <= {"broadcast"}  # of first values
