"""Under cp a user's loss that is no mean over parts of samples is refused when the Trainer is made."""

import pytest
import torch
import torch.nn.functional as F

from shoal import Trainer
from shoal.errors import ModelError
from shoal.models import Transformer, TransformerConfig
from shoal.train import OptimizerConfig, TrainingData

VOCABULARY, SEQ = 61, 16
SHAPE = TransformerConfig(vocab_size=VOCABULARY, layers=1, hidden=32, heads=4, kv_heads=2, ffn=48, seq=SEQ)
WEIGHTS = torch.linspace(0.1, 2.0, VOCABULARY)


def logits_of(output):
    return output.logits if hasattr(output, "logits") else output


def mean(output, targets):
    return F.cross_entropy(logits_of(output).flatten(0, 1), targets.flatten())


def shifting(output, targets):
    return mean(logits_of(output)[:, :-1], targets[:, 1:])


def summing(output, targets):
    return F.cross_entropy(logits_of(output).flatten(0, 1), targets.flatten(), reduction="sum")


def weighing(output, targets):
    return F.cross_entropy(logits_of(output).flatten(0, 1), targets.flatten(), weight=WEIGHTS)


def weights_of(targets):
    return float(WEIGHTS[targets[targets != -100]].sum())


def trained(plan, loss, counted=None):
    """Losses and norms of two steps, or the error."""
    tokens = torch.randint(VOCABULARY, (8, SEQ + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    for number, row in enumerate(targets):
        row[: 2 * number] = -100  # some count less, and some ranks' parts nothing
    model = Transformer(SHAPE)
    model.initialize(0)
    rates = OptimizerConfig(name="sgd", learning_rate=0.1, warmup=1, clip=None)
    data = torch.utils.data.TensorDataset(tokens[:, :-1], targets)
    try:
        read = TrainingData(data, counted=counted)
        trainer = Trainer(model, read, plan, batch=4, steps=2, loss=loss, optimizer=rates)
    except ModelError as error:
        return str(error)
    results = [trainer.step() for _ in range(2)]
    return [value for result in results for value in (result.loss, result.gradient_norm)]


@pytest.mark.parametrize("plan", ["cp=2,microbatch=2", "cp=2,context=ulysses"])
@pytest.mark.parametrize("loss", [shifting, summing, weighing])
def test_a_loss_that_is_no_mean_over_parts_is_refused(ranks, plan, loss):
    for refusal in ranks.run(trained, 2, plan, loss):
        assert "the loss of parts of a sample differs from that of the whole" in refusal


@pytest.mark.parametrize(("loss", "counted"), [(mean, None), (weighing, weights_of)])
def test_a_mean_and_one_whose_weights_are_counted_train_as_on_one_device(ranks, loss, counted):
    expected = trained("dp=1,microbatch=4", loss, counted)
    for plan in ("cp=2,microbatch=2", "cp=2,context=ulysses"):
        for found in ranks.run(trained, 2, plan, loss, counted):
            assert found == pytest.approx(expected, rel=1e-4)  # fp32, in another order, over two steps
