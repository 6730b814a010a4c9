"""Generation against argmax and against the probabilities that the logits state."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, DataError
from shoal.models import Transformer, TransformerConfig, generate

CONFIG = TransformerConfig(vocab_size=61, layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, seq=16)
PROMPT = torch.tensor([5, 7, 11])


class Fixed(nn.Module):
    """Gives the same logits at every position, and notes the longest input."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)
        self.longest = 0
        self.saw_training = False

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        self.longest = max(self.longest, tokens.shape[1])
        self.saw_training |= self.training
        return SimpleNamespace(logits=self.logits.expand(*tokens.shape, -1))


def model() -> Transformer:
    built = Transformer(CONFIG)
    built.initialize(0)
    return built


def test_temperature_zero_takes_the_likeliest_token_each_time() -> None:
    transformer, row = model(), PROMPT.tolist()
    for token in generate(transformer, PROMPT, tokens=20, temperature=0, seed=1, context=16):
        with torch.no_grad():
            expected = int(transformer(torch.tensor([row[-16:]]))[0, -1].argmax())
        assert token == expected
        row.append(token)
    assert len(row) == 23


def test_a_seed_fixes_what_is_drawn() -> None:
    first, again, other = (
        list(generate(model(), PROMPT, tokens=30, seed=seed, context=16)) for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_the_global_random_state_is_neither_read_nor_moved() -> None:
    state = torch.get_rng_state()
    list(generate(Fixed([0.0, 0.0]), PROMPT, tokens=5, context=4))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    logits = [0.0, 1.0, -1.0, 2.0]
    drawn = list(generate(Fixed(logits), PROMPT, tokens=4000, temperature=temperature, context=1))
    powers = [math.exp(logit / temperature) for logit in logits]
    for token, power in enumerate(powers):
        chance = power / sum(powers)
        # Five standard deviations of a share of 4000 draws.
        assert abs(drawn.count(token) / 4000 - chance) < 5 * math.sqrt(chance * (1 - chance) / 4000)


def test_top_k_draws_from_the_likeliest_only() -> None:
    fixed = Fixed([0.0, 3.0, 0.1, 2.9, -1.0])
    assert set(generate(fixed, PROMPT, tokens=200, top_k=2, temperature=5.0, context=4)) == {1, 3}
    assert set(generate(fixed, PROMPT, tokens=20, top_k=1, context=4)) == {1}
    assert set(generate(fixed, PROMPT, tokens=400, top_k=99, temperature=9.0, context=4)) == {0, 1, 2, 3, 4}


def test_a_temperature_near_zero_does_not_overflow() -> None:
    assert set(generate(Fixed([1.0, 900.0, 2.0]), PROMPT, tokens=5, temperature=1e-30, context=4)) == {1}


def test_the_model_sees_no_more_than_the_context() -> None:
    fixed = Fixed([0.0, 1.0])
    list(generate(fixed, torch.zeros(50, dtype=torch.long), tokens=10, context=8))
    assert fixed.longest == 8


def test_tokens_are_drawn_when_asked_for() -> None:
    assert len(list(itertools.islice(generate(model(), PROMPT, tokens=10**9, context=16), 3))) == 3


def test_the_model_is_in_evaluation_mode_meanwhile_and_training_after() -> None:
    fixed = Fixed([0.0, 1.0]).train()
    list(generate(fixed, PROMPT, tokens=3, context=4))
    assert not fixed.saw_training
    assert fixed.training


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="nothing to continue"):
        generate(model(), torch.zeros(0, dtype=torch.long), tokens=1, context=4)


@pytest.mark.parametrize(
    "changes",
    [{"tokens": -1}, {"temperature": -0.1}, {"temperature": math.nan}, {"top_k": 0}, {"context": 0}],
)
def test_a_number_out_of_range_is_refused_by_name(changes: dict[str, float]) -> None:
    (name,) = changes
    options = {"tokens": 1, "context": 4} | changes
    with pytest.raises(ConfigError, match=f"{name}="):
        generate(model(), PROMPT, **options)
