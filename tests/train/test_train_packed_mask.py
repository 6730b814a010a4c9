"""Packed documents beside an attention_mask: apart as without one, or refused by name."""

import pytest
import torch
import torch.nn.functional as F

from shoal.errors import ModelError
from shoal.models import tiny_hugging_face
from shoal.train import OptimizerConfig, Trainer

SEQ, CUT = 16, 6


class Samples(torch.utils.data.Dataset):
    def __init__(self, hidden):
        self.tokens = torch.randint(3, 96, (4, SEQ), generator=torch.Generator().manual_seed(0))
        self.mask = (torch.arange(SEQ) < SEQ - hidden).long()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        positions = torch.cat([torch.arange(CUT), torch.arange(SEQ - CUT)])
        labels = self.tokens[index].where(positions > 0, -100)
        return {
            "input_ids": self.tokens[index],
            "attention_mask": self.mask,
            "position_ids": positions,
            "labels": labels,
        }


def trainer(samples):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = tiny_hugging_face.causal("llama").float()
    optimizer = OptimizerConfig(name="sgd", warmup=0)
    return model, Trainer(model, samples, "dp=1", batch=4, steps=1, optimizer=optimizer)


def test_a_mask_that_hides_nothing_leaves_documents_apart():
    samples = Samples(hidden=0)
    model, training = trainer(samples)
    with torch.no_grad():
        parts = [(samples.tokens[:, :CUT]), (samples.tokens[:, CUT:])]
        logits = [model(input_ids=part).logits[:, :-1] for part in parts]
    expected = F.cross_entropy(
        torch.cat(logits, 1).flatten(0, 1), torch.cat([p[:, 1:] for p in parts], 1).flatten()
    )
    assert training.step().loss == pytest.approx(expected.item(), rel=1e-5)  # sums in another order


def test_documents_with_a_mask_that_hides_padding_are_refused():
    _, training = trainer(Samples(hidden=3))
    with pytest.raises(ModelError, match="does not keep documents apart"):
        training.step()
