"""Signals at any time: what they stop, and that no step is lost."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from run_stand_ins import shoal
from train_stand_ins import NumberedSamples, make_trainer, weights

from shoal.checkpoint import ProcessGroupCoordinator, checkpoints, step_of
from shoal.launch.local import StopSignal
from shoal.launch.submit import EXIT_STOPPED
from shoal.models import next_token_loss
from shoal.parallel.communication import Axis
from shoal.record import NullRecorder
from shoal.spec.run import Run
from shoal.train.agreement import StopTogether, are_all_asked
from shoal.train.compiling import Compiling

MODEL = """
import os, signal
from torch import nn

class Model(nn.Module):
    def __init__(self, **shape):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        if not self.training and os.path.exists("stop"):
            os.kill(os.getpid(), signal.SIGHUP)
        return self.head(self.embedding(tokens))
"""


@pytest.mark.parametrize("steps", [2, 4])
def test_a_signal_within_a_validation_loses_neither_steps_nor_the_validation_at_the_end(
    ranks, tmp_path, tiny_run, steps
):
    (tmp_path / "asks.py").write_text(MODEL)
    (tmp_path / "stop").touch()
    settings = ("model=asks:Model", f"steps={steps}", "validation.every=2", "checkpoint.every=0")
    settings = [word for each in settings for word in ("--set", each)]
    words = ["train", *tiny_run, *settings, "--set", "validation.samples=50", "--nproc", "1"]
    ((code, _, told),) = ranks.run(shoal, 1, [*words, "--run", "run"], tmp_path)
    run = Run(tmp_path / "run")
    assert code == EXIT_STOPPED, told
    assert [step_of(path) for path in checkpoints(run.checkpoints)] == [2]
    assert f"step 2/{steps}  validation stopped by a signal, without a result\n" in told
    assert not any("validation_loss" in values for values in run.metrics())

    (tmp_path / "stop").unlink()
    ((code, _, told),) = ranks.run(shoal, 1, [*words, "--resume", "run"], tmp_path)
    assert code == 0, told
    assert [values["step"] for values in run.metrics() if "loss" in values] == list(range(1, steps + 1))
    assert [values["step"] for values in run.metrics() if "validation_loss" in values] == [steps]
    assert step_of(checkpoints(run.checkpoints)[0]) == steps
    assert "is complete" in ranks.run(shoal, 1, [*words, "--resume", "run"], tmp_path)[0][2]


def evaluate_until_asked(plan, asked_rank):
    trainer = make_trainer(plan)
    trainer.step()
    before, calls = weights(trainer), []

    def stop():
        calls.append(None)
        return torch.distributed.get_rank() == asked_rank

    values = trainer.evaluate(NumberedSamples(), 40, stop=stop)
    whole = trainer.evaluate(NumberedSamples(), 40, stop=lambda: False)
    plain = trainer.evaluate(NumberedSamples(), 40)
    unchanged = all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
    is_training = trainer.parallel.module.training
    trainer.step()
    trainer.close()
    return values, len(calls), whole == plain, unchanged and is_training


@pytest.mark.parametrize("plan", ["dp=2,shard=zero3", "pp=2,microbatch=2", "tp=2"])
def test_all_ranks_leave_an_evaluation_that_one_is_asked_to_stop(ranks, plan):
    assert ranks.run(evaluate_until_asked, 2, plan, 1) == [({}, 1, True, True)] * 2


def rounds_until_asked(pauses):
    """How many rounds ranks of unlike speed make until one of them is asked to stop."""
    rank = torch.distributed.get_rank()
    axis = Axis("world", (0, 1), rank, torch.distributed.group.WORLD, NullRecorder())
    began = time.monotonic()
    together = StopTogether(axis, torch.device("cpu"), lambda: rank == 0 and time.monotonic() > began + 1.5)
    made = 0
    while not together.is_over():
        made += 1
        time.sleep(pauses[rank])
    return made


def test_ranks_of_unlike_speed_leave_after_the_same_round(ranks):
    first, second = ranks.run(rounds_until_asked, 2, (0.001, 0.02))
    assert first == second > 1


def all_asked(delays):
    stop = StopSignal()
    stop.heed()
    if (delay := delays[torch.distributed.get_rank()]) is not None:
        threading.Timer(delay, lambda: setattr(stop, "received", signal.SIGTERM)).start()
        while not delay and stop.received is None:
            time.sleep(0.01)
    return are_all_asked(stop, ProcessGroupCoordinator())


@pytest.mark.parametrize(
    ("delays", "expected"), [((0, 0.3), True), ((0, None), False), ((None, None), False)]
)
def test_a_signal_to_all_that_reaches_one_later_is_not_taken_for_a_request_to_leave(ranks, delays, expected):
    assert ranks.run(all_asked, 2, delays) == [expected] * 2


def told_to_stop(plan, rank, step):
    """The step after which each rank is told to stop, where one is asked from a step on."""
    trainer = make_trainer(plan, steps=40)
    asked = torch.distributed.get_rank() == rank
    for number in range(1, 30):
        if trainer.step(stop=asked and number >= step).stop:
            trainer.close()
            return number
    return None


@pytest.mark.parametrize(
    ("plan", "after"),
    [
        ("dp=2,exchange=local,every=4", 8),
        ("dp=2,exchange=local,every=4,delay=1", 9),
        ("dp=2,exchange=local,every=4,delay=3", 11),
        ("dp=2,exchange=local,every=4,fragments=2,delay=1", 7),
    ],
)
def test_workers_with_merges_that_take_steps_stop_together_once_one_is_asked(ranks, plan, after):
    # Asked in step 6: the next merge tells it, and begins after step 8, or 6 with two fragments.
    assert ranks.run(told_to_stop, 2, plan, 1, 6) == [after] * 2


def test_compilers_do_not_get_the_signals_of_a_rank():
    compiling, masks = Compiling(lambda text: None), []
    with torch._dynamo.callback.callback_handler.install_callbacks(
        torch._dynamo.callback.CallbackTrigger.DYNAMO, "0"
    ):
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    compiling.close()
    assert [signal.SIGTERM in mask for mask in masks] == [True, False]


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatch=4"])
def test_a_signal_within_a_step_such_as_while_torch_compiles_stops_training_after_that_step(ranks, plan):
    assert ranks.run(told_within_a_step, 2, plan) == [True] * 2


def told_within_a_step(plan):
    asked = []

    def loss(output, targets):
        asked.append(None)  # the signal comes within the first forward
        return next_token_loss(output, targets)

    trainer = make_trainer(plan, loss=loss)
    is_told = bool(trainer.step(stop=lambda: bool(asked)).stop)
    trainer.close()
    return is_told
