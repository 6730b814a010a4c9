"""Initial values depend on the seed, the name and the shape, and on nothing else."""

import math
import subprocess
import sys
import tempfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ModelError
from shoal.models import Transformer, TransformerConfig, preset
from shoal.models.dropout import normal

CONFIG = TransformerConfig(vocab_size=97, layers=2, hidden=64, heads=4, kv_heads=2, ffn=96, seq=32)


def initialized(seed: int = 0, config: TransformerConfig = CONFIG) -> dict[str, torch.Tensor]:
    model = Transformer(config)
    model.initialize(seed)
    return dict(model.state_dict())


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(list(initialized())), seed=st.integers(-(2**70), 2**70))
def test_values_do_not_depend_on_the_order_of_filling(order: list[str], seed: int) -> None:
    model = Transformer(CONFIG)
    for name in order:
        torch.rand(3)
        model.initialize_parameter(name, model.get_parameter(name), seed)
    reference = initialized(seed)
    assert all(torch.equal(model.get_parameter(name), reference[name]) for name in order)


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(list(initialized())),
    offset=st.integers(0, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_view_into_a_bucket_gets_the_values_of_a_parameter_on_its_own(
    name: str, offset: int, dtype: torch.dtype
) -> None:
    reference = initialized()[name]
    with torch.device("meta"):
        model = Transformer(CONFIG)
    bucket = torch.full((offset + reference.numel() + 5,), 7.0, dtype=dtype)
    view = bucket[offset : offset + reference.numel()].view(reference.shape)
    model.initialize_parameter(name, view, 0)
    assert torch.equal(view, reference.to(dtype))
    assert bool((bucket[:offset] == 7).all() and (bucket[-5:] == 7).all())


def test_a_transposed_tensor_gets_the_same_values() -> None:
    name = "blocks.0.feed_forward.up.weight"
    transposed = torch.empty(CONFIG.hidden, CONFIG.ffn).T
    Transformer(CONFIG).initialize_parameter(name, transposed, 0)
    assert torch.equal(transposed, initialized()[name])


def test_values_do_not_depend_on_the_process_or_its_threads() -> None:
    # Python salts its own hash of text differently in every process.
    program = (
        "import sys, torch; from shoal.models import Transformer, preset;"
        "torch.set_num_threads(torch.get_num_threads() % 2 + 1);"
        "model = Transformer(preset('tiny')); model.initialize(5);"
        "torch.save(model.state_dict(), sys.argv[1])"
    )
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([sys.executable, "-c", program, file.name], check=True)
        elsewhere = torch.load(file.name)
    here = initialized(5, preset("tiny"))
    assert list(elsewhere) == list(here)
    assert all(torch.equal(elsewhere[name], here[name]) for name in here)


def test_deviations_follow_the_role_of_a_weight() -> None:
    config = CONFIG.model_copy(update={"layers": 8, "hidden": 128, "ffn": 256})
    for name, weight in initialized(config=config).items():
        if weight.ndim == 1:
            assert bool((weight == 1).all()), name
            continue
        adds_to_hidden = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        expected = 0.02 / math.sqrt(2 * 8) if adds_to_hidden else 0.02
        # The deviation of n draws is off by a share of 1 / sqrt(2 n); five times that is near certain.
        assert weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * weight.numel())), name
        assert abs(weight.mean().item()) < 5 * expected / math.sqrt(weight.numel()), name


def test_seeds_and_names_give_different_values() -> None:
    first, second = initialized(0), initialized(1)
    shape = first["blocks.0.attention.query.weight"].shape
    alike = [weight for weight in (*first.values(), *second.values()) if weight.shape == shape]
    assert len(alike) == 2 * 2 * CONFIG.layers
    for i, weight in enumerate(alike):
        assert all(not torch.allclose(weight, other, rtol=0.1) for other in alike[:i])


def test_a_name_that_the_model_lacks_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"did you mean 'blocks\.0\.attention\.query\.weight'"):
        Transformer(CONFIG).initialize_parameter("blocks.0.attention.qery.weight", torch.empty(2), 0)


def test_a_tensor_without_memory_is_refused() -> None:
    with torch.device("meta"):
        model = Transformer(CONFIG)
    with pytest.raises(ModelError, match=r"'embed\.weight' is on the meta device"):
        model.initialize(0)


def test_normal_numbers_of_a_hash_are_normal_and_depend_on_their_position_alone(monkeypatch):
    drawn = normal((301, 997), -5, torch.device("cpu"))
    monkeypatch.setattr("shoal.models.dropout._PAIRS", 1000)
    assert torch.equal(drawn, normal((301, 997), -5, torch.device("cpu")))
    assert not torch.equal(drawn, normal((301, 997), 6, torch.device("cpu")))
    values = drawn.double().flatten().sort().values
    rank = torch.arange(1, len(values) + 1) / len(values)
    # Kolmogorov and Smirnov: beyond 1.95 / sqrt(n) one sample of normal numbers in a thousand.
    distance = (torch.special.ndtr(values) - rank).abs().max()
    assert distance < 1.95 / len(values) ** 0.5
    # Neighbours, rows and the two of a pair are uncorrelated: within four deviations of 0.
    for shift in (1, 2, 997):
        flat = drawn.flatten()
        correlation = float((flat[shift:] * flat[:-shift]).mean())
        assert abs(correlation) < 4 / len(flat) ** 0.5
