"""Steps whose values the host reads a step later: they train alike, and nothing else makes the host wait.

A GPU's Trainer makes such steps. Here a CPU's is told to.
"""

import traceback
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from skip_stand_ins import SPOILED, Spoiled, state_of, trainer_of

from shoal.models import Transformer, TransformerConfig
from shoal.parallel import local_part
from shoal.train import Callbacks, OptimizerConfig, Trainer

SHAPE = {"vocab_size": 31, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "seq": 8}
PLANS = ("dp=1", "dp=2,shard=zero1,microbatch=2", "dp=2,shard=zero3,recompute=full", "tp=2", "cp=2", "pp=2")
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
"""Methods of a tensor that make the host wait for a GPU."""

OF_THE_HOST = {
    "read": "the values of the step before",
    "_count": "targets of the batch, before it goes to the device",
    "token_keys": "a seed, which is hashed by tensors of the host",
}
"""Functions that may call them: they read tensors of the host, or what goes out."""


def run(plan, defers):
    """Four steps, one of which is skipped: when results are told, what they say, and what is left."""
    told = []
    heard_of = Callbacks(on_step=lambda result: told.append(result.step))
    trainer = trainer_of(plan, Spoiled(SPOILED), 3, callbacks=heard_of)
    trainer._defers = defers
    heard, results = [], []
    for _ in range(4):
        results.append(trainer.step())
        heard.append(list(told))
    trainer.settle()
    trainer.close()
    values = [(each.loss, each.gradient_norm, each.skipped, each.stop) for each in results]
    return heard, told, values, {name: local_part(each) for name, each in state_of(trainer).items()}


@pytest.mark.parametrize("plan", PLANS[:3])
def test_results_that_are_read_a_step_later_are_the_same(ranks, plan):
    size = 1 if plan == "dp=1" else 2
    at_once, later = ranks.run(run, size, plan, False), ranks.run(run, size, plan, True)
    for (heard, told, values, state), (heard_later, told_later, values_later, state_later) in zip(
        at_once, later, strict=True
    ):
        assert heard == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
        assert heard_later == [[], [1], [1, 2], [1, 2, 3]]
        assert told == told_later == [1, 2, 3, 4]
        assert repr(values) == repr(values_later)  # nan is not equal to itself
        assert all(torch.equal(state[name], state_later[name]) for name in state)


def trainer_after_two_steps(plan, device="cpu"):
    tokens = torch.randint(31, (16, 9), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        Transformer(TransformerConfig(**SHAPE, dropout=0.1)),
        [(sample[:-1], sample[1:]) for sample in tokens],
        plan,
        batch=4,
        steps=4,
        optimizer=OptimizerConfig(warmup=0, clip=0.1),
        device=device,
    )
    trainer._defers = True
    for _ in range(2):
        trainer.step()
    return trainer


def reads_of_a_step(plan):
    """The functions of Shoal that read a tensor within the third step, by their name."""
    trainer = trainer_after_two_steps(plan)
    places = Counter()

    def noted(method):
        def call(tensor, *arguments, **named):
            frames = traceback.extract_stack()
            if not any("torch/optim" in frame.filename for frame in frames):  # it counts steps on the host
                places[next(each.name for each in reversed(frames[:-1]) if "shoal" in each.filename)] += 1
            return method(tensor, *arguments, **named)

        return call

    with patch.multiple(torch.Tensor, **{name: noted(getattr(torch.Tensor, name)) for name in READS}):
        trainer.step()
    trainer.settle()
    trainer.close()
    return dict(places)


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_reads_nothing_of_its_own(ranks, plan):
    for places in ranks.run(reads_of_a_step, 1 if plan == "dp=1" else 2, plan):
        assert set(places) <= set(OF_THE_HOST)
        assert places["read"] == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA itself counts only where a GPU is")
@pytest.mark.parametrize("compile", ["none", "blocks"])
def test_a_step_on_a_gpu_makes_the_host_wait_for_nothing(compile):
    trainer = trainer_after_two_steps(f"dp=1,precision=bf16,compile={compile}", "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.settle()
    trainer.close()
