"""A pipeline trains and evaluates on inputs by name as one device does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal import Trainer
from shoal.parallel import StageLayout
from shoal.train import OptimizerConfig

VOCABULARY, SEQ = 61, 8


class Model(nn.Module):
    """Layers whose result depends on every input, two of which have defaults."""

    stage_layout = StageLayout(("embed", "place"), "blocks", ("head",))

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, 16), nn.Embedding(SEQ, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, position_ids=None, scale=None):
        positions = torch.arange(SEQ) if position_ids is None else position_ids
        hidden = self.embed(input_ids) + self.place(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return logits if scale is None else logits * scale[:, None, None]


def cross_entropy(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def trained(plan):
    """Losses and norms of two steps, and the validation's loss and a mean of the output."""
    tokens = torch.randint(VOCABULARY, (8, SEQ + 1), generator=torch.Generator().manual_seed(1))
    names = ("input_ids", "position_ids", "scale", "labels")
    flipped = torch.arange(SEQ).flip(0)
    data = [
        dict(zip(names, (row[:-1], flipped, torch.tensor(1.0 + number), row[1:]), strict=True))
        for number, row in enumerate(tokens)
    ]
    rates = OptimizerConfig(name="sgd", learning_rate=0.01, warmup=1, clip=None)
    trainer = Trainer(Model(), data, plan, batch=4, steps=2, loss=cross_entropy, optimizer=rates)
    results = [trainer.step() for _ in range(2)]
    values = trainer.evaluate(data, 8, {"mean": lambda output, targets: output.square().mean()})
    return [each for step in results for each in (step.loss, step.gradient_norm)] + [*values.values()]


@pytest.mark.filterwarnings("ignore:Model cannot keep the documents")
@pytest.mark.parametrize("plan", ["pp=2,microbatch=2", "pp=2,schedule=zb-h1,microbatch=1"])
def test_named_inputs_reach_every_stage_in_steps_and_in_evaluation(ranks, plan):
    expected = trained("dp=1,microbatch=4")
    for found in ranks.run(trained, 2, plan):
        assert found == pytest.approx(expected, rel=1e-5)  # fp32, in another order
