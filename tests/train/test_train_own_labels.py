"""A model of one's own that predicts each label from the tokens before it is weighed by what it counts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal import Trainer
from shoal.train import OptimizerConfig

VOCABULARY, SEQ = 61, 8


class Model(nn.Module):
    """A loss of `labels` that shifts them or not."""

    def __init__(self, shifts):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.shifts = shifts

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids).cumsum(1))
        if labels is None:
            return {"logits": logits}
        if self.shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def trained(shifts, plan):
    """See `trained_model`."""
    return trained_model(Model(shifts), plan)


def trained_model(model, plan):
    """Loss and norm of a step on samples with other numbers of labels that count."""
    tokens = torch.randint(VOCABULARY, (4, SEQ), generator=torch.Generator().manual_seed(1))
    data = [
        {"input_ids": row, "labels": row.where(torch.arange(SEQ) < 2 + 2 * number, -100)}
        for number, row in enumerate(tokens)
    ]
    rates = OptimizerConfig(name="sgd", learning_rate=0.1, warmup=1, clip=None)
    trainer = Trainer(model, data, plan, batch=4, steps=1, optimizer=rates)
    result = trainer.step()
    return result.loss, result.gradient_norm


@pytest.mark.parametrize("shifts", [True, False])
def test_micro_batches_have_the_weights_of_the_labels_in_their_loss(ranks, shifts):
    expected = trained(shifts, "dp=1,microbatch=4")
    assert trained(shifts, "dp=1,microbatch=1") == pytest.approx(expected, rel=1e-5)  # fp32
    for found in ranks.run(trained, 2, shifts, "dp=2,microbatch=1"):
        assert found == pytest.approx(expected, rel=1e-5)


def decoder_of_bart(plan):
    """The same of BART's decoder, whose loss has the name of one that shifts its labels, and does not."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16,
        max_position_embeddings=SEQ, dropout=0.0, is_encoder_decoder=False,
    )  # fmt: skip
    return trained_model(transformers.BartForCausalLM(config), plan)


def test_a_decoder_that_does_not_shift_its_labels_counts_the_first_ones(ranks):
    expected = decoder_of_bart("dp=1,microbatch=4")
    assert decoder_of_bart("dp=1,microbatch=1") == pytest.approx(expected, rel=1e-5)  # fp32
    for found in ranks.run(decoder_of_bart, 2, "dp=2,microbatch=1"):
        assert found == pytest.approx(expected, rel=1e-5)
