"""The loss against its definition."""

import math
from types import SimpleNamespace

import pytest
import torch

from shoal.errors import ModelError
from shoal.models import logits_of, next_token_loss


def test_the_loss_is_the_mean_negative_log_likelihood_in_nats() -> None:
    logits = torch.randn(3, 5, 11, dtype=torch.float64)
    targets = torch.randint(11, (3, 5))
    total = 0.0
    for sample in range(3):
        for position in range(5):
            powers = [math.exp(logit) for logit in logits[sample, position].tolist()]
            total -= math.log(powers[targets[sample, position]] / sum(powers))
    # Fifteen fp32 terms of about 3 nats.
    assert next_token_loss(logits, targets).item() == pytest.approx(total / 15, rel=1e-6)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    loss = next_token_loss(torch.zeros(2, 4, 256), torch.zeros(2, 4, dtype=torch.long))
    assert loss.item() == pytest.approx(math.log(256))


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(2, 64, 1000).bfloat16()
    targets = torch.randint(1000, (2, 64))
    loss = next_token_loss(logits, targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, next_token_loss(logits.float(), targets))


def test_logits_are_found_in_the_output_of_hugging_face() -> None:
    logits = torch.randn(1, 2, 3)
    assert logits_of(SimpleNamespace(logits=logits)) is logits
    assert logits_of(logits) is logits


def test_an_output_without_logits_is_refused_by_its_type() -> None:
    with pytest.raises(ModelError, match="returned tuple, which holds no logits"):
        next_token_loss((torch.zeros(1, 2, 3),), torch.zeros(1, 2, dtype=torch.long))


def test_logits_that_do_not_match_the_targets_are_refused_by_shape() -> None:
    with pytest.raises(ModelError, match=r"\(1, 2, 3\) do not match targets of shape \(1, 4\)"):
        next_token_loss(torch.zeros(1, 2, 3), torch.zeros(1, 4, dtype=torch.long))
