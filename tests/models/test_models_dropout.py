"""Masks follow from coordinates alone, and look random all the same.

Seeds are fixed, so a statistic either passes always or fails always; bounds are where chance alone would
exceed them about once in 10,000 seeds.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import ModelError
from shoal.models import Transformer, TransformerConfig
from shoal.models.dropout import Dropout, name_dropouts, token_keys

SHAPE = TransformerConfig(
    vocab_size=31, layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, seq=32, tie_embeddings=True, dropout=0.25
)
SINGLE_TEST = 15.1
"""Chi-square of one degree of freedom that chance exceeds once in 10,000."""


def keys(samples: Tensor | int = 8, positions: Tensor | int = 32, *, seed: int = 1, step: int = 0) -> Tensor:
    samples, positions = (
        torch.arange(given) if isinstance(given, int) else given for given in (samples, positions)
    )
    return token_keys(seed, step, samples, positions)


def dropped(given: Tensor, channels: int = 64, *, p: float = 0.5, name: str = "layer") -> Tensor:
    """The mask `[batch, seq, channels]`, true where an element is dropped."""
    return Dropout(p, name)(torch.ones(*given.shape, channels), given) == 0


def naive_mask(p: float, name: str, seed: int, step: int, sample: int, position: int, channel: int) -> bool:
    """The definition, in Python's own integers modulo 2^64."""
    whole, stride = 2**64, 0x9E3779B97F4A7C15

    def mix(number: int) -> int:
        number %= whole
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % whole
        number = (number ^ number >> 27) * 0x94D049BB133111EB % whole
        return number ^ number >> 31

    salt = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    token = mix(mix(sample * stride + mix(mix(seed + stride) + step)) + position * stride)
    product = (token | 1) * mix(channel * stride + salt) % whole
    # As a signed number the product is below -2^63 + p 2^64: with the upper half first.
    return (product + 2**63) % whole < int(p * whole)


@settings(max_examples=100, deadline=None)
@given(
    p=st.floats(0.01, 0.99),
    name=st.text(max_size=5),
    seed=st.integers(-(2**70), 2**70),
    step=st.integers(0, 2**40),
    sample=st.integers(0, 2**40),
    position=st.integers(0, 2**20),
)
def test_each_element_is_dropped_as_the_definition_says(
    p: float, name: str, seed: int, step: int, sample: int, position: int
) -> None:
    given = token_keys(seed, step, torch.tensor([sample]), torch.tensor([position]))
    mask = dropped(given, 5, p=p, name=name)[0, 0].tolist()
    assert mask == [naive_mask(p, name, seed, step, sample, position, channel) for channel in range(5)]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_the_mask_of_any_part_is_that_part_of_the_mask(data: st.DataObject) -> None:
    samples = torch.tensor(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8)))
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 31), min_size=1, max_size=32)))
    part = dropped(keys(samples, positions))
    assert torch.equal(part, dropped(keys())[samples][:, positions])


def test_positions_may_differ_between_samples() -> None:
    positions = torch.stack([torch.arange(32), torch.arange(32).flip(0)])
    part = dropped(keys(2, positions))
    assert torch.equal(part[1].flip(0), dropped(keys(2))[1])
    assert torch.equal(part[0], dropped(keys(2))[0])


def test_a_model_drops_the_same_whatever_the_rows_of_a_forward_are() -> None:
    model = Transformer(SHAPE)
    model.initialize(0)
    tokens = torch.randint(31, (6, 20), generator=torch.Generator().manual_seed(0))
    whole = forward(model, tokens, keys(6, 20))
    parts = [forward(model, tokens[rows], keys(torch.tensor(rows), 20)) for rows in ([0, 1], [5, 2], [3, 4])]
    # Products of other batch sizes may add up in another order.
    torch.testing.assert_close(torch.cat(parts), whole[[0, 1, 5, 2, 3, 4]])
    assert not torch.allclose(forward(model, tokens, keys(6, 20, step=1)), whole, atol=1e-3)


def forward(model: Transformer, tokens: Tensor, given: Tensor | None) -> Tensor:
    model.dropout_keys = given
    logits: Tensor = model(tokens)
    return logits


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p(p: float) -> None:
    mask = dropped(keys(64, 128), 128, p=p)
    count = mask.numel()
    assert abs(float(mask.sum()) - count * p) < 4 * (count * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_each_sample_position_and_channel_is_dropped_as_often(dim: int) -> None:
    mask = dropped(keys(64, 64), 64, p=0.2)
    others = [other for other in range(3) if other != dim]
    scores = (mask.float().mean(others) - 0.2) / (0.2 * 0.8 / 64**2) ** 0.5
    # The sum of 64 squares has the mean 64 and the deviation sqrt(128).
    assert abs(float(scores.square().sum()) - 64) < 4.5 * 128**0.5


def independence(one: Tensor, other: Tensor) -> float:
    """Chi-square, of one degree of freedom, that two masks are independent of each other."""
    count = one.numel()
    both, first, second = (float(mask.sum()) for mask in (one & other, one, other))
    spread = first * (count - first) * second * (count - second)
    return count * (count * both - first * second) ** 2 / spread


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("distance", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_neighbours_are_independent(dim: int, distance: int, p: float) -> None:
    mask = dropped(keys(64, 64), 64, p=p)
    length = 64 - distance
    assert independence(mask.narrow(dim, 0, length), mask.narrow(dim, distance, length)) < SINGLE_TEST


@pytest.mark.parametrize(
    "other",
    [
        lambda p: dropped(keys(64, 64, step=1), p=p),
        lambda p: dropped(keys(64, 64, seed=2), p=p),
        lambda p: dropped(keys(64, 64), p=p, name="another"),
        lambda p: dropped(keys(64, 64, seed=0, step=1), p=p),
        lambda p: dropped(keys(torch.arange(64, 128), 64), p=p),
    ],
    ids=["step", "seed", "layer", "seed and step exchanged", "samples"],
)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_steps_seeds_layers_and_samples_are_independent(p: float, other: Callable[[float], Tensor]) -> None:
    assert independence(dropped(keys(64, 64), p=p), other(p)) < SINGLE_TEST


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_every_pattern_of_eight_neighbours_is_as_frequent(dim: int) -> None:
    mask = dropped(keys(64, 64), 128).movedim(dim, -1)
    patterns = (mask.unflatten(-1, (-1, 8)).long() * 2 ** torch.arange(8)).sum(-1)
    counts = patterns.flatten().bincount(minlength=256).double()
    expected = counts.mean()
    chi = float(((counts - expected).square() / expected).sum())
    assert abs(chi - 255) < 4.5 * (2 * 255) ** 0.5


@pytest.mark.parametrize("dim", [0, 1])
def test_no_two_channels_or_tokens_go_together(dim: int) -> None:
    elements = dropped(keys(16, 16), 4096) if dim == 0 else dropped(keys(64, 64), 256)
    signs = elements.flatten(0, 1).movedim(dim, -1).double() * 2 - 1  # [4096, 256]
    correlation = (signs.T @ signs).fill_diagonal_(0) / len(signs) ** 0.5
    # The largest of 32,640 normal numbers exceeds 6 once in 15,000 cases.
    assert float(correlation.abs().max()) < 6


def test_the_corners_of_rectangles_are_independent() -> None:
    """Each element comes from one product of two keys: the four of a rectangle must not show it."""
    mask = dropped(keys(64, 64), 64).flatten(0, 1)
    first, second = mask[::2], mask[1::2]
    parity = first[:, ::2] ^ first[:, 1::2] ^ second[:, ::2] ^ second[:, 1::2]
    assert abs(float(parity.double().mean()) - 0.5) < 4 * 0.5 / parity.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_stays_is_divided_by_the_share_that_stays(dtype: torch.dtype) -> None:
    hidden = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    result = Dropout(0.3, "layer")(hidden, keys())
    # Scaled with at least fp32's precision, and rounded once.
    wide = hidden if dtype is torch.float64 else hidden.float()
    expected = (wide * (1 / 0.7)).masked_fill(dropped(keys(), p=0.3), 0).to(dtype)
    assert result.dtype == dtype
    assert torch.equal(result, expected)


def test_the_gradient_is_dropped_and_scaled_as_the_input_was() -> None:
    hidden = torch.randn(8, 32, 64, requires_grad=True)
    upstream = torch.randn(8, 32, 64)
    Dropout(0.3, "layer")(hidden, keys()).backward(upstream)
    assert torch.equal(hidden.grad, upstream.masked_fill(dropped(keys(), p=0.3), 0) * (1 / 0.7))


def test_the_input_is_left_as_it_is() -> None:
    hidden = torch.ones(8, 64, 32).transpose(1, 2)
    result = Dropout(0.5, "layer")(hidden, keys())
    assert bool((hidden == 1).all())
    assert torch.equal(result == 0, dropped(keys()))


@pytest.mark.parametrize("layer", [Dropout(0.5).eval(), Dropout(0.0)])
def test_outside_training_or_with_p_zero_nothing_happens(layer: Dropout) -> None:
    hidden = torch.randn(2, 3, 4)
    assert layer(hidden) is hidden


def test_without_keys_masks_are_new_in_every_call_and_follow_torchs_seed() -> None:
    layer, ones = Dropout(0.5), torch.ones(2, 3, 64)
    torch.manual_seed(3)
    first, second = layer(ones), layer(ones)
    torch.manual_seed(3)
    assert torch.equal(layer(ones), first)
    assert not torch.equal(first, second)
    assert independence(first == 0, second == 0) < SINGLE_TEST


@pytest.mark.parametrize("given", [keys(4, 20), None], ids=["keys", "torch's generator"])
def test_a_recomputed_forward_has_the_same_masks(given: Tensor | None) -> None:
    tokens = torch.randint(31, (4, 20), generator=torch.Generator().manual_seed(0))

    def gradients(model: Transformer) -> list[Tensor]:
        torch.manual_seed(5)
        loss = forward(model, tokens, given).square().mean()
        model.dropout_keys = keys(4, 20, step=9)  # as for the forward of another micro-batch, before backward
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plain, recomputed = Transformer(SHAPE), Transformer(SHAPE)
    for model in (plain, recomputed):
        model.initialize(0)
    for block in recomputed.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for one, other in zip(gradients(plain), gradients(recomputed), strict=True):
        assert torch.equal(one, other)


def test_every_layer_of_a_model_has_a_name_of_its_own() -> None:
    layers = [module for module in Transformer(SHAPE).modules() if isinstance(module, Dropout)]
    assert [layer.name for layer in layers] == [
        f"blocks.{index}.{place}_dropout" for index in range(2) for place in ("attention", "feed_forward")
    ]
    assert not any(isinstance(module, nn.Dropout) for module in Transformer(SHAPE).modules())


def test_names_come_along_when_a_model_is_copied_or_pickled() -> None:
    layer = nn.ModuleDict({"drop": Dropout(0.5)})
    name_dropouts(layer)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin["drop"](torch.ones(8, 32, 64), keys()) == 0, dropped(keys(), name="drop"))


def test_keys_for_other_tokens_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"'layer' got keys for tokens \[8, 32\]") as refusal:
        Dropout(0.5, "layer")(torch.ones(8, 31, 4), keys())
    assert refusal.value.possible == "keys of shape [8, 31]"


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_what_is_not_a_probability_is_refused(p: float) -> None:
    with pytest.raises(ModelError, match="probability"):
        Dropout(p)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_drops_bitwise_the_same() -> None:
    samples, positions = torch.arange(8, device="cuda"), torch.arange(32, device="cuda")
    given = token_keys(1, 0, samples, positions)
    assert torch.equal(given.cpu(), keys())
    mask = Dropout(0.5, "layer")(torch.ones(8, 32, 64, device="cuda"), given) == 0
    assert torch.equal(mask.cpu(), dropped(keys()))
