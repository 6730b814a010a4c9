"""The Trainer in a pipeline: interruptions and other layouts change nothing, and nothing is lost on disk."""

from __future__ import annotations

import pytest
import torch
from port_stand_ins import free_port
from run_stand_ins import shoal, shoal_as_rank
from torch import nn
from train_stand_ins import (
    BATCH,
    SEQUENCE,
    SHAPE,
    STEPS,
    NumberedSamples,
)

from shoal.checkpoint import read_manifest
from shoal.models import build
from shoal.parallel import StageLayout
from shoal.spec.plan import Plan
from shoal.spec.run import Run
from shoal.train import OptimizerConfig, Trainer, load_model

VOCABULARY = 64


def ranks_of(plan):
    return Plan.parse(plan).ranks


class Scaled(nn.Module):
    """A block with a buffer that training changes and checkpoints keep."""

    def __init__(self, width, number):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor(0.25 + number / 8))
        self.register_buffer("forgotten", torch.ones(3), persistent=False)

    def forward(self, hidden):
        return hidden + self.scale * torch.tanh(self.mix(hidden.cumsum(1) / 8))


class Own(nn.Module):
    """A model of a user, which says how it is cut."""

    stage_layout = StageLayout(embed=("embed",), blocks="blocks", end=("head",))

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Scaled(16, number) for number in range(4))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def trainer_of(kind, plan, **options):
    """A Trainer of a model of one's own, or of a transformer whose embeddings are tied or not."""
    if kind == "own":
        model = Own()
    else:
        shape = {**SHAPE, "layers": 8, "tie_embeddings": kind == "tied", "seq": SEQUENCE}
        model = build("tiny", overrides=shape, device="meta")
    optimizer = OptimizerConfig(warmup=2, learning_rate=1e-2)
    return Trainer(
        model, NumberedSamples(), plan, batch=BATCH, steps=STEPS, seed=3, optimizer=optimizer, **options
    )


def states_of(trainer):
    """Whole parameters and optimizer states on rank 0, by the export and by what ranks own."""
    parts = [
        (
            each.name,
            each.shape,
            each.start,
            each.stop,
            each.cut,
            key,
            getattr(value, "_local_tensor", value).detach().clone().flatten(),
        )
        for each in trainer.parallel.owned
        for key, value in {
            "value": each.parameter,
            **{key: trainer.optimizer.state[each.parameter][key] for key in ("exp_avg", "exp_avg_sq")},
        }.items()
    ]
    return trainer.parallel.full_state_dict(), parts


def assembled(ranks):
    """By name and kind the whole tensors; each element as every owner has it."""
    whole = {}
    for _, parts in ranks:
        for name, shape, start, stop, cut, key, part in parts:
            value = whole.setdefault((name, key), torch.full(shape, torch.nan))
            block = value if cut is None else cut.of(value)
            flat = block.flatten()
            before = flat[start:stop]
            assert torch.equal(before, part) or before.isnan().all(), name
            flat[start:stop] = part
            block.copy_(flat.view(block.shape))
    return whole


def save(kind, plan, folder):
    trainer = trainer_of(kind, plan)
    for _ in range(2):
        trainer.step()
    trainer.close()
    if kind == "own":  # each block's, on the rank that has it
        for name, buffer in trainer.parallel.module.named_buffers():
            if name.endswith("scale"):
                buffer += 1.0
    path = trainer.save(folder, {})
    return path, states_of(trainer)


def load(kind, plan, checkpoint):
    trainer = trainer_of(kind, plan)
    trainer.load(checkpoint)
    states = states_of(trainer)
    return states, [trainer.step().loss for _ in range(2)]


V_SHAPED, LOOPED = "pp=2,schedule=zb-v", "pp=2,schedule=interleaved"


@pytest.mark.parametrize(
    ("kind", "first", "others"),
    [
        ("tied", V_SHAPED, ["dp=1", "pp=4,schedule=zb-h1", "dp=2,shard=zero1"]),
        ("tied", "dp=2,pp=2,shard=zero2", ["dp=1", LOOPED]),
        ("untied", "dp=1", ["pp=4,schedule=zb-h1", V_SHAPED]),
        ("own", LOOPED, ["dp=1", "pp=4", "dp=2,shard=zero3"]),
        ("own", "dp=2,shard=zero1", ["pp=2"]),
    ],
)
def test_a_checkpoint_is_bitwise_the_same_under_every_layout(ranks, tmp_path, kind, first, others):
    saved = ranks.run(save, ranks_of(first), kind, first, tmp_path)
    path, (export, _) = saved[0]
    wanted = assembled([states for _, states in saved])
    names = read_manifest(path).tensors
    assert {name.removeprefix("model/") for name in names if name.startswith("model/")} == {
        name for name, key in wanted if key == "value"
    }
    losses = {}
    for plan in others:
        loaded = ranks.run(load, ranks_of(plan), kind, plan, path)
        found = assembled([states for states, _ in loaded])
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), plan
        again = loaded[0][0][0]
        assert again.keys() == export.keys()
        assert all(torch.equal(again[name], value) for name, value in export.items()), plan
        losses[plan] = loaded[0][1]
    expected = ranks.run(load, 1, kind, "dp=1", path)[0][1]
    for each in losses.values():  # fp32 sums in another order
        assert each == pytest.approx(expected, rel=1e-4)


def test_buffers_of_every_stage_are_kept(ranks, tmp_path):
    path, (export, _) = ranks.run(save, 2, "own", "pp=2", tmp_path)[0]
    scales = {name: value.item() for name, value in export.items() if name.endswith("scale")}
    assert scales == {f"blocks.{number}.scale": 1.25 + number / 8 for number in range(4)}
    kept = {name for name in read_manifest(path).tensors if name.startswith("fixed/")}
    assert kept == {f"fixed/blocks.{number}.scale" for number in range(4)}


MODEL = """
import torch
from torch import nn
from shoal.parallel import StageLayout

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, hidden):
        return hidden + self.scale * torch.tanh(self.mix(hidden.cumsum(1) / 8))

class Own(nn.Module):
    stage_layout = StageLayout(embed=("words",), blocks="layers", end=("out",))

    def __init__(self, layers, hidden):
        super().__init__()
        self.words = nn.Embedding(256, hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.out = nn.Linear(hidden, 256, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens):
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(hidden)

def make(layers=4, hidden=16, **others):
    return Own(layers, hidden)
"""


def test_a_model_of_ones_own_goes_on_from_plan_to_plan(ranks, tiny_run, tmp_path, monkeypatch):
    """`shoal train --model file:function` in pipelines and on one rank in turn, against one rank alone."""
    (tmp_path / "own_model_in_stages.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)

    def train(*arguments, on):
        plain = ("optimizer.schedule=constant-then-decay", "optimizer.decay=0", "model_options.layers=4")
        words = ["train", *tiny_run, "--set", "model=own_model_in_stages:make", *arguments]
        words += [word for setting in plain for word in ("--set", setting)]
        if on == 1:
            ended = ranks.run(shoal, 1, [*words, "--nproc", "1"], tmp_path)
        else:
            ended = ranks.run(shoal_as_rank, on, words, tmp_path, free_port())
        assert [each[0] for each in ended] == [0] * on, ended[0][2]

    train("--run", "whole", "--plan", "dp=1", "--set", "steps=8", on=1)
    steps = {"steps=2": V_SHAPED, "steps=4": "dp=1", "steps=6": "pp=4", "steps=8": LOOPED}
    for number, (setting, plan) in enumerate(steps.items()):
        which = "--resume" if number else "--run"
        train(which, "parts", "--plan", plan, "--set", setting, on=ranks_of(plan))
    whole, parts = (Run.open(tmp_path / name) for name in ("whole", "parts"))
    found, wanted = ({each["step"]: each["loss"] for each in run.metrics()} for run in (parts, whole))
    assert found == pytest.approx(wanted, rel=1e-4)  # fp32 sums in another order
    states = [load_model(run.path, print)[0].state_dict() for run in (whole, parts)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-4)
