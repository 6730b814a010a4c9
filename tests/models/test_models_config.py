"""Shapes, what follows from them, and the presets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shoal.errors import ModelError
from shoal.models import Transformer, TransformerConfig, next_token_loss, preset, preset_names

SMALL = {"vocab_size": 61, "layers": 3, "hidden": 48, "heads": 6, "kv_heads": 2, "ffn": 80, "seq": 40}

# In millions, from the name or from the paper that the preset follows.
PUBLISHED = {
    "tiny": 1,
    "tiny-experts": 3.4,
    "12m": 12.6,
    "12m-experts": 42,
    "125m": 125,
    "350m": 350,
    "1b": 1_100,
    "llama2-7b": 6_738,
    "llama2-13b": 13_016,
    "llama2-70b": 68_977,
    "llama3-8b": 8_030,
    "llama3-70b": 70_554,
}


@st.composite
def configurations(draw: st.DrawFn) -> TransformerConfig:
    kv_heads, groups, half = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    heads = kv_heads * groups
    return TransformerConfig(
        vocab_size=draw(st.integers(1, 300)),
        layers=draw(st.integers(1, 4)),
        hidden=heads * 2 * half,
        heads=heads,
        kv_heads=kv_heads,
        ffn=draw(st.integers(1, 100)),
        seq=draw(st.integers(1, 64)),
        tie_embeddings=draw(st.booleans()),
        experts=draw(st.sampled_from([0, 0, 2, 5])),
        expert_ffn=draw(st.sampled_from([None, 7])),
    )


def counted(config: TransformerConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(config).parameters())


@settings(max_examples=50, deadline=None)
@given(config=configurations())
def test_the_closed_form_counts_the_parameters_of_the_model(config: TransformerConfig) -> None:
    assert config.parameter_count() == counted(config)


@pytest.mark.parametrize("name", preset_names())
def test_the_closed_form_counts_the_parameters_of_a_preset(name: str) -> None:
    assert preset(name).parameter_count() == counted(preset(name))


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_as_large_as_its_name_says(name: str) -> None:
    tolerance = 0.0005 if name.startswith("llama") else 0.2 if name == "tiny" else 0.03
    assert preset(name).parameter_count() == pytest.approx(PUBLISHED[name] * 1e6, rel=tolerance)


def test_presets_go_from_small_to_large_in_a_family() -> None:
    ours = [preset(name).parameter_count() for name in ("tiny", "12m", "125m", "350m", "1b")]
    assert ours == sorted(ours)


@settings(max_examples=10, deadline=None)
@given(config=configurations(), batch=st.integers(1, 3))
def test_flops_equal_those_that_torch_counts(config: TransformerConfig, batch: int) -> None:
    model = Transformer(config)
    tokens = torch.zeros(batch, config.seq, dtype=torch.long)
    # The plain kernel computes the full square of positions, and its backward recomputes nothing.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        next_token_loss(model(tokens), tokens).backward()
    assert config.flops_per_token(config.seq) * tokens.numel() == counter.get_total_flops()


def test_flops_of_gpt3_come_near_the_published_total() -> None:
    # 3.14e23 FLOP for 300 B tokens (Brown et al. 2020, table D.1), which leaves attention and the
    # embeddings out: with SwiGLU of 8/3 the width, the blocks are as large.
    gpt3 = TransformerConfig(
        vocab_size=50257, layers=96, hidden=12288, heads=96, kv_heads=96, ffn=32768, seq=2048
    )
    assert gpt3.flops_per_token(2048) * 300e9 == pytest.approx(3.14e23, rel=0.05)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        preset("tiny").layers = 3  # type: ignore[misc]


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ModelError, match=r"there is no preset 'llama3-8B'.*did you mean 'llama3-8b'"
    ) as refusal:
        preset("llama3-8B")
    assert refusal.value.possible == ", ".join(preset_names())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hiden": 3}, r"no field 'hiden' \(did you mean 'hidden'\?\)"),
        ({"hidden": 50}, "hidden=50 is not a multiple of heads=6"),
        ({"kv_heads": 4}, "heads=6 is not a multiple of kv_heads=4"),
        ({"hidden": 54}, "heads of odd width 9"),
        ({"layers": 0}, "'layers' cannot be 0"),
        ({"layers": "many"}, "'layers' cannot be 'many'"),
        ({"ffn": 2.5}, r"'ffn' cannot be 2\.5"),
        ({"dropout": 1.0}, r"'dropout' cannot be 1\.0"),
        ({"rope_base": -1}, "'rope_base' cannot be -1"),
        ({"norm_eps": 0}, "'norm_eps' cannot be 0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        TransformerConfig(**(SMALL | changes))


def test_a_missing_field_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'layers' is missing"):
        TransformerConfig(**{name: value for name, value in SMALL.items() if name != "layers"})
