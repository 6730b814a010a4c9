"""Dynamic rotary embeddings: stages, skipped steps and checkpoints agree on the longest sequence seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shoal.spec.plan import Plan
from shoal.train import OptimizerConfig, Trainer, learning_rate

transformers = pytest.importorskip("transformers")

LENGTHS = (6, 20, 14, 18, 12, 10, 16, 12)  # the original length is 8
SEED = 11  # its order has steps whose losses move by 8e-5 if the longest length is another
ROUNDING = 1e-5  # of fp32, with sums in another order, over four steps
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 8}
HEADS = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
ROPE = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "long_factor": [4.0] * 4,
        "short_factor": [1.0] * 4,
    },
}


def model(kind):
    config = transformers.LlamaConfig(**SIZES, **HEADS, rope_parameters=ROPE[kind])
    torch.manual_seed(0)
    result = transformers.LlamaForCausalLM(config).float().train()
    with torch.no_grad():
        for parameter in result.parameters():
            if parameter.dim() > 1:
                parameter *= 5  # so that positions matter
    return result


def sample(index):
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(61, (1, LENGTHS[index % len(LENGTHS)] + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Samples:
    """Sequences of several lengths, one in a batch, in their order."""

    deterministic = True

    def __len__(self):
        return 32

    def batch(self, indices: np.ndarray):
        return sample(int(indices[0]))


def broken_at(step):
    """A loss that is not finite in the first micro-batch of a step of four."""
    calls = iter(range(1000))

    def loss(output, targets):
        value = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
        return value * float("nan") if next(calls) == 4 * step else value

    return loss


def trainer_of(kind, plan, loss=None):
    # a rate so small that losses of later steps differ by what the embedding has seen, not by the steps
    optimizer = OptimizerConfig(name="sgd", warmup=0, learning_rate=1e-3, clip=None)
    return Trainer(model(kind), Samples(), plan, batch=4, steps=4, optimizer=optimizer, loss=loss, seed=SEED)


def trained(plan, kind, broken=None):
    trainer = trainer_of(kind, plan, None if broken is None else broken_at(broken))
    results = [trainer.step() for _ in range(4)]
    trainer.close()
    return [each.loss for each in results if not each.skipped], [bool(each.skipped) for each in results]


def by_hand(kind, skipped=None):
    """Losses of transformers' own model in a plain loop; a step that is left out leaves no trace."""
    reference = model(kind)
    order = trainer_of(kind, "dp=1,microbatch=1")._loader
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-3)
    config = OptimizerConfig(warmup=0, learning_rate=1e-3)
    losses = []
    for step in range(4):
        if step == skipped:
            continue
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step=step, steps=4, batch=4)
        total = 0.0
        samples = [order.fetch(step * 4 + number, 1) for number in range(4)]
        count = sum(targets.numel() for _, targets in samples)
        for tokens, targets in samples:
            loss = F.cross_entropy(reference(tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = loss / count
            loss.backward()
            total += loss.item()
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.dim() >= 2:
                    parameter *= 1 - optimizer.param_groups[0]["lr"] * 0.1
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


PLANS = ["dp=1", "pp=2", "pp=2,schedule=interleaved", "pp=2,schedule=zb-v", "pp=2,recompute=full"]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_stage_sees_the_lengths_that_one_device_sees(ranks, plan, kind):
    for losses, _ in ranks.run(trained, Plan.parse(plan).ranks, f"{plan},microbatch=1", kind):
        assert losses == pytest.approx(by_hand(kind), rel=ROUNDING)  # sums in another order


@pytest.mark.parametrize("plan", PLANS[:3])
def test_a_step_that_is_left_out_leaves_no_length_behind(ranks, plan):
    expected = by_hand("dynamic", skipped=1)
    for losses, skipped in ranks.run(trained, Plan.parse(plan).ranks, f"{plan},microbatch=1", "dynamic", 1):
        assert skipped == [False, True, False, False]
        assert losses == pytest.approx(expected, rel=ROUNDING)


def saved(plan, folder):
    trainer = trainer_of("dynamic", plan)
    trainer.step(), trainer.step()
    path = trainer.save(folder)
    trainer.close()
    return path


def resumed(plan, path):
    trainer = trainer_of("dynamic", plan)
    trainer.load(path)
    losses = [trainer.step().loss for _ in range(2)]
    trainer.close()
    return losses


@pytest.mark.parametrize(("first", "second"), [("dp=1", "pp=2"), ("pp=2", "pp=2"), ("pp=2", "dp=1")])
def test_a_checkpoint_keeps_the_longest_sequence_seen(ranks, tmp_path, first, second):
    path = ranks.run(saved, Plan.parse(first).ranks, f"{first},microbatch=1", tmp_path)[0]
    for losses in ranks.run(resumed, Plan.parse(second).ranks, f"{second},microbatch=1", path):
        assert losses == pytest.approx(by_hand("dynamic")[2:], rel=ROUNDING)
