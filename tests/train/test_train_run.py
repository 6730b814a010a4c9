"""Whole runs of `shoal train`: what they leave on disk, and how they go on."""

from __future__ import annotations

import json
import math

import pytest
import torch
from port_stand_ins import free_port
from run_stand_ins import shoal, shoal_as_rank, shoal_in_a_process_that_saw_no_model, shoal_on_a_full_disk

from shoal.checkpoint import checkpoints, step_of
from shoal.data import prepare
from shoal.models import build, next_token_loss
from shoal.spec.run import Run
from shoal.spec.timeline import Timeline, explain
from shoal.train import load_model


@pytest.fixture
def train(ranks, tiny_run, tmp_path):
    """Trains in `tmp_path`; what comes later among the arguments wins."""

    def call(*arguments, on=1, code=0):
        words = ["train", *tiny_run, *arguments]
        if on == 1:
            ended = ranks.run(shoal, 1, [*words, "--nproc", "1"], tmp_path)
        else:
            ended = ranks.run(shoal_as_rank, on, words, tmp_path, free_port())
        assert [each[0] for each in ended] == [code] * on, ended[0][2]
        return ended[0]

    return call


def settings(**values):
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def losses(run):
    return {values["step"]: values["loss"] for values in run.metrics()}


# -- what a run records -----------------------------------------------------------------------------


def padded(elements):
    """A parameter in its bucket begins at a multiple of 16 elements."""
    return -(-elements // 16) * 16


@pytest.mark.parametrize("shard", ["none", "zero1", "zero3"])
def test_the_timeline_explains_every_step_and_counts_every_byte(train, tmp_path, shard):
    # Widths of which some fill their 16 elements and some do not.
    hidden = 24 if shard == "none" else 32
    train("--run", "run", "--plan", f"shard={shard}", *settings(steps=8, model_options__hidden=hidden), on=2)
    run = Run.open(tmp_path / "run")
    breakdown = explain(Timeline.read(run.timeline))
    assert [each.rank for each in breakdown.ranks] == [0, 1]

    options = {"layers": 2, "hidden": hidden, "heads": 2, "kv_heads": 1, "ffn": 64, "seq": 32}
    model = build("tiny", overrides=options)
    sizes = {name: padded(parameter.numel()) for name, parameter in model.named_parameters()}
    everything, last_block = (
        4 * sum(size for name, size in sizes.items() if name.startswith(prefix))
        for prefix in ("", "blocks.1.")
    )
    root = everything - 2 * last_block
    report, norm = 2 * 4, 8
    told = 4 * len(sizes)  # for each shard, how many ranks have a gradient of each parameter
    expected = {
        # one all-reduce of every gradient
        "none": everything + told + report,
        # one reduce-scatter of every gradient, one all-gather of every weight
        "zero1": 2 * everything + 2 * told + report + norm,
        # a gather in forward, another in backward but of what stays: the last block, the root
        "zero3": 3 * everything - last_block - root + 2 * told + report + norm,
    }[shard]

    metrics = {values["step"]: values for values in run.metrics()}
    for each in breakdown.ranks:
        assert sorted(each.steps) == list(range(1, 9))
        for step, parts in each.steps.items():
            assert sum(parts.disjoint().values()) == pytest.approx(parts.wall, rel=0.01)
            assert all(part >= 0 for part in parts.disjoint().values())
            if step > 1:  # before the first step the weights are there already
                assert parts.bytes == expected
    for step, parts in breakdown.of(0).steps.items():
        assert parts.wall <= metrics[step]["step_seconds"]  # the span lies within what was measured around it


def test_a_run_without_timeline_leaves_none(train, tmp_path):
    _, out, _ = train("--run", "run", *settings(steps=2, record__timeline="false"))
    assert not any((tmp_path / "run" / "timeline").iterdir())
    assert "loss" in out


def test_a_full_disk_costs_the_record_and_not_the_training(ranks, train, tiny_run, tmp_path):
    train("--run", "run", *settings(steps=2))
    run = Run.open(tmp_path / "run")
    largest = max(path.stat().st_size for path in run.path.rglob("*") if path.is_file()) + 20_000
    # Records that have grown to the limit before the run goes on: what they hold stays what it was.
    for path in (run.metrics_file, run.timeline_file(0)):
        line = path.read_text().splitlines()[-1] + "\n"
        with path.open("a") as file:
            file.write(line * ((largest - path.stat().st_size) // len(line)))
    words = ["train", *tiny_run, "--resume", "run", "--set", "steps=40", "--nproc", "1"]
    code, _, err = ranks.run(shoal_on_a_full_disk, 1, words, tmp_path, largest)[0]
    assert code == 0, err
    assert "the metrics file is no longer written" in err
    assert "the timeline is no longer written" in err
    assert step_of(checkpoints(run.checkpoints)[0]) == 40


def test_scalars_go_to_tensorboard_too(train, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train("--run", "run", *settings(steps=3, record__tensorboard="true"))
    run = Run.open(tmp_path / "run")
    events = EventAccumulator(str(run.log / "tensorboard"))
    events.Reload()
    written = {event.step: event.value for event in events.Scalars("loss")}
    assert written == pytest.approx(losses(run), rel=1e-6)  # TensorBoard keeps fp32


def test_the_description_holds_what_ran(train, tmp_path):
    train("--run", "run", "--plan", "shard=zero1", *settings(steps=2, seed=5), on=2)
    description = json.loads((tmp_path / "run" / "run.json").read_text())
    assert description["plan"] == "dp=2,shard=zero1,microbatch=2"
    assert description["world_size"] == 2
    assert description["seed"] == description["config"]["seed"] == 5
    assert description["config"]["steps"] == 2
    assert description["versions"]["torch"] == torch.__version__


# -- how a run goes on ------------------------------------------------------------------------------


def test_a_run_that_goes_on_ends_as_the_one_that_was_not_interrupted(train, tmp_path):
    common = settings(optimizer__schedule="constant-then-decay", optimizer__decay=0, checkpoint__every=2)
    train("--run", "whole", *common, *settings(steps=7), on=2)
    train("--run", "parts", *common, *settings(steps=4), on=2)
    train("--resume", "parts", *settings(steps=7), on=2)
    whole, parts = Run.open(tmp_path / "whole"), Run.open(tmp_path / "parts")
    assert losses(whole) == losses(parts)
    states = [load_model(run.path, print)[0].state_dict() for run in (whole, parts)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_corrupt_checkpoint_is_named_and_the_one_before_it_is_used(train, tmp_path):
    train("--run", "run", *settings(steps=4, checkpoint__every=2))
    run = Run.open(tmp_path / "run")
    before = losses(run)
    newest = checkpoints(run.checkpoints)[0]
    shard = next(newest.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    _, _, err = train("--resume", "run")
    assert newest.name in err
    assert "step-00000002" in err
    assert losses(run) == before  # steps 3 and 4 were made again
    assert step_of(checkpoints(run.checkpoints)[0]) == 4


def test_resume_auto_begins_a_run_and_then_goes_on_with_it(train, tmp_path):
    train("--run", "run", "--resume", "auto", *settings(steps=2))
    train("--run", "run", "--resume", "auto", *settings(steps=5))
    assert sorted(losses(Run.open(tmp_path / "run"))) == [1, 2, 3, 4, 5]


def test_a_run_that_has_made_all_its_steps_has_nothing_to_go_on_with(train, tmp_path):
    train("--run", "run", *settings(steps=2))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    described = (tmp_path / "run" / "run.json").read_bytes()
    for words, on in ((("--resume", "run"), 1), (("--resume", "auto", "--run", "run"), 2)):
        _, out, err = train(*words, on=on)
        assert out == ""
        assert err.startswith("run is complete: 2 of 2 steps are made, and step-00000002 is sound")
        assert "started" in err
        assert len(err.splitlines()) == 1
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "run" / "run.json").read_bytes() == described


def test_a_new_run_that_would_begin_at_its_end_is_refused(train, tmp_path):
    train("--run", "run", *settings(steps=2))
    saved = checkpoints(tmp_path / "run" / "checkpoints")[0]
    _, _, err = train("--resume", str(saved), "--run", "other", code=2)
    assert "leaves no step to make" in err
    assert not (tmp_path / "other").exists()


def test_more_steps_on_resume_say_what_becomes_of_the_learning_rate(train, tmp_path):
    train("--run", "run", *settings(steps=6, optimizer__warmup=1))
    _, _, err = train("--resume", "run", *settings(steps=60, optimizer__warmup=1))
    told = next(line for line in err.splitlines() if "learning rate was" in line)
    rates = [values["learning_rate"] for values in Run.open(tmp_path / "run").metrics()]
    assert f"was {rates[5]:.3g} at step 6" in told
    assert f"is {rates[6]:.3g} at step 7, since steps went from 6 to 60" in told
    assert "--set optimizer.schedule=constant-then-decay" in err


def test_a_run_can_be_resumed_and_sampled_from_another_folder(ranks, tiny_run, tmp_path):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "models_at_home.py").write_text(FAILING)
    (home / "words.txt").write_text("a ring of fish turns as one " * 200)
    kept = [setting for setting in tiny_run[1::2] if not setting.startswith(("model_options", "data.source"))]
    words = [word for setting in kept for word in ("--set", setting)]
    words += settings(
        model="models_at_home:Model", steps=2, model_options__fails_at=0, data__source="words.txt"
    )
    assert ranks.run(shoal, 1, ["train", *words, "--nproc", "1", "--run", "run"], home)[0][0] == 0
    for arguments in (["train", "--resume", "../home/run", "--set", "steps=4"], ["sample", "../home/run"]):
        code, _, err = ranks.run(shoal_in_a_process_that_saw_no_model, 1, arguments, elsewhere)[0]
        assert code == 0, err
    assert sorted(losses(Run.open(home / "run"))) == [1, 2, 3, 4]


@pytest.mark.parametrize("change", [{"sequence": 16}, {"seed": 1}, {"data__validation_fraction": 0.3}])
def test_other_data_are_refused_and_leave_the_run_as_it_was(train, tmp_path, change):
    train("--run", "run", *settings(steps=2))
    before = (tmp_path / "run" / "run.json").read_bytes()
    _, out, err = train("--resume", "run", *settings(steps=4, **change), code=2)
    assert out == ""
    assert "the run to resume has" in err
    assert "Traceback" not in err
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    train("--resume", "run", *settings(steps=4))
    assert sorted(losses(Run.open(tmp_path / "run"))) == [1, 2, 3, 4]


FAILING = """
from torch import nn

class Model(nn.Module):
    def __init__(self, fails_at):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.calls, self.fails_at = 0, fails_at

    def forward(self, tokens):
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("enough")
        return self.head(self.embedding(tokens))
"""


def test_a_run_that_fails_says_how_to_go_on_from_what_it_saved(ranks, tiny_run, tmp_path):
    (tmp_path / "failing_model.py").write_text(FAILING)
    kept = [setting for setting in tiny_run[1::2] if not setting.startswith("model_options")]
    arguments = [word for setting in kept for word in ("--set", setting)]
    arguments += settings(model="failing_model:Model", steps=8, checkpoint__every=2)
    for run, fails_at in (("late", 4), ("early", 1)):
        words = ["train", *arguments, *settings(model_options__fails_at=fails_at), "--run", run]
        code, _, err = ranks.run(shoal, 1, [*words, "--nproc", "1"], tmp_path)[0]
        assert code == 1
        assert "ValueError: enough" in err
        hint = "Step 2 is saved; continue with: shoal train --resume late\n"
        assert err.endswith(hint) == (run == "late"), err
        assert ("--resume" in err) == (run == "late")


def test_checkpoints_beyond_those_to_keep_are_deleted(train, tmp_path):
    train("--run", "run", *settings(steps=9, checkpoint__every=2, checkpoint__keep=3))
    found = [step_of(path) for path in checkpoints(tmp_path / "run" / "checkpoints")]
    assert found == [9, 8, 6]


def test_the_loaded_model_has_the_validation_loss_that_the_run_measured(train, tmp_path):
    train("--run", "run", "--plan", "shard=zero3", *settings(steps=6), on=2)
    run = Run.open(tmp_path / "run")
    model, config = load_model(run.path)
    samples = prepare(config.data).samples("validation", config.sequence)
    inputs, targets = samples.batch(torch.arange(min(8, len(samples))).numpy())
    with torch.no_grad():
        loss = next_token_loss(model.eval()(inputs), targets).item()
    assert run.metrics()[-1]["validation_loss"] == pytest.approx(loss, rel=1e-5)
    assert math.isfinite(loss)
