"""The loss against its definition."""

import math
from types import SimpleNamespace

import pytest
import torch

from shoal.errors import ModelError
from shoal.models import Transformer, TransformerConfig, logits_of, loss, next_token_loss
from shoal.models.loss import IGNORED, LaterLogits


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_made_in_parts_give_the_loss_and_the_gradients_of_whole_ones(monkeypatch, dtype):
    monkeypatch.setattr(loss, "_CHUNK", 5 * 37)  # five rows at a time, of 26
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 13, 8, dtype=dtype), torch.randn(37, 8, dtype=dtype)
    targets = torch.randint(37, (2, 13))
    targets[0, 3:7] = IGNORED
    found = []
    for make in (lambda one, other: one @ other.T, LaterLogits):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        value = next_token_loss(make(*leaves), targets)
        (3 * value).backward()
        found.append([value, *(leaf.grad.float() for leaf in leaves)])
    for part, whole in zip(found[1], found[0], strict=True):
        # In bf16 logits of about 8, rounded to 0.03, are the same; their gradients are rounded to 0.4 %.
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(part, whole, rtol=tolerance, atol=tolerance * 0.1)
    with torch.no_grad():
        torch.testing.assert_close(LaterLogits(hidden, weight).logits, hidden @ weight.T)


def test_the_factor_of_a_loss_is_not_rounded_to_the_type_of_the_logits():
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 16, dtype=torch.bfloat16), torch.randn(50, 16, dtype=torch.bfloat16)
    targets = torch.randint(50, (64,))
    sums = []
    for factor in (1.0, 1 / 3):  # bf16 has no 1/3: 0.33398 is 0.2 % more
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        (next_token_loss(LaterLogits(*leaves), targets) * factor).backward()
        sums.append(torch.stack([leaf.grad.double().norm() for leaf in leaves]))
    # The roundings of 800 or more elements, each up to 0.4 %, cancel: their norm is exact to 0.4 % / 28.
    torch.testing.assert_close(sums[1] * 3, sums[0], rtol=5e-4, atol=0)


def test_a_transformer_leaves_logits_to_the_loss_only_where_they_are_many_and_train():
    model = Transformer(
        TransformerConfig(vocab_size=5, layers=1, hidden=4, heads=1, kv_heads=1, ffn=4, seq=8)
    )
    model.initialize(0)
    model.most_logits = 3 * 5
    assert isinstance(model(torch.zeros(1, 3, dtype=torch.int64)), torch.Tensor)
    assert isinstance(model(torch.zeros(1, 4, dtype=torch.int64)), LaterLogits)
    with torch.no_grad():
        assert isinstance(model(torch.zeros(1, 4, dtype=torch.int64)), torch.Tensor)
