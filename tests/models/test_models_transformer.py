"""The transformer against references written out, and against Hugging Face's Llama."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.errors import ModelError
from shoal.models import Transformer, TransformerConfig
from shoal.models.transformer import Attention, Rotary

SMALL = TransformerConfig(vocab_size=61, layers=3, hidden=48, heads=6, kv_heads=2, ffn=80, seq=40)


def small(seed: int = 0, **changes: object) -> Transformer:
    """A small model on the CPU whose weights are large enough for attention to be far from uniform."""
    model = Transformer(TransformerConfig(**(SMALL.model_dump() | changes)))
    model.initialize(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
            else:
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
    return model.eval()


def tokens(batch: int, seq: int, seed: int = 0) -> Tensor:
    return torch.randint(SMALL.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(seed))


def relative_error(value: Tensor, reference: Tensor) -> float:
    return float((value - reference).abs().max() / reference.abs().max())


def naive_attention(attention: Attention, hidden: Tensor, base: float) -> Tensor:
    """Every head and position in a loop, softmax from its definition, in fp64."""
    attention = attention.double()
    query, key, value = (
        layer(hidden.double()).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for layer in (attention.query, attention.key, attention.value)
    )
    query, key = complex_rotary(query, base), complex_rotary(key, base)
    shared_by = query.shape[1] // key.shape[1]
    mixed = torch.zeros_like(query)
    for head in range(query.shape[1]):
        for position in range(query.shape[2]):
            seen_keys = key[:, head // shared_by, : position + 1]
            scores = torch.einsum("bd,bsd->bs", query[:, head, position], seen_keys)
            powers = (scores / math.sqrt(attention.head_dim)).exp()
            weights = powers / powers.sum(-1, keepdim=True)
            seen_values = value[:, head // shared_by, : position + 1]
            mixed[:, head, position] = torch.einsum("bs,bsd->bd", weights, seen_values)
    return attention.output(mixed.transpose(1, 2).flatten(-2))


def complex_rotary(heads: Tensor, base: float) -> Tensor:
    """The paper's form: dims i and i + d/2 as one complex number, multiplied by exp(i * angle)."""
    first, second = heads.double().chunk(2, -1)
    dim = heads.shape[-1]
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(heads.shape[-2], dtype=torch.float64)[:, None] * frequency
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


@settings(max_examples=25, deadline=None)
@given(kv_heads=st.sampled_from([1, 2, 3, 6]), seq=st.integers(1, 12), seed=st.integers(0, 99))
def test_attention_is_a_causal_softmax_over_shared_keys(kv_heads: int, seq: int, seed: int) -> None:
    model = small(seed, kv_heads=kv_heads)
    attention = model.blocks[0].attention
    hidden = torch.randn(2, seq, SMALL.hidden, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        value = attention(hidden, model.rotary(seq, hidden.device))
        # fp32 against fp64: sums of some tens of terms, each rounded to 6e-8.
        assert relative_error(value, naive_attention(attention, hidden, SMALL.rope_base)) < 1e-5


def test_grouped_queries_equal_full_heads_with_repeated_weights() -> None:
    grouped, full = small(kv_heads=2), small(kv_heads=6)
    weights = grouped.state_dict()
    for name in weights:
        if ".key." in name or ".value." in name:
            by_head = weights[name].unflatten(0, (2, SMALL.head_dim))
            weights[name] = by_head.repeat_interleave(3, 0).flatten(0, 1)
    full.load_state_dict(weights)
    batch = tokens(2, 17)
    with torch.no_grad():
        torch.testing.assert_close(grouped(batch), full(batch), rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    head_dim=st.integers(1, 32).map(lambda half: 2 * half),
    seq=st.integers(1, 300),
    base=st.sampled_from([100.0, 10_000.0, 500_000.0]),
)
def test_rotary_multiplies_pairs_as_complex_numbers(head_dim: int, seq: int, base: float) -> None:
    heads = torch.randn(2, 3, seq, head_dim)
    # An angle of 300 radians, rounded to fp32, is off by up to 3e-5.
    turned = Rotary(head_dim, base)(seq, heads.device).turn(heads)
    assert relative_error(turned, complex_rotary(heads, base)) < 1e-4


def test_rotary_products_depend_on_distance_alone() -> None:
    query, key = torch.randn(16), torch.randn(16)
    turn = Rotary(16, 10_000.0)(30, query.device).turn
    queries, keys = turn(query.expand(1, 1, 30, 16))[0, 0], turn(key.expand(1, 1, 30, 16))[0, 0]
    products = queries @ keys.T
    torch.testing.assert_close(products[1:, 1:], products[:-1, :-1], rtol=1e-4, atol=1e-4)


def test_norms_divide_by_the_root_mean_square() -> None:
    norm = small().norm
    hidden = 3 * torch.randn(2, 5, SMALL.hidden)
    wide = hidden.double()
    formula = norm.weight.double() * wide / (wide.square().mean(-1, keepdim=True) + SMALL.norm_eps).sqrt()
    # A handful of fp32 roundings, 6e-8 each.
    torch.testing.assert_close(norm(hidden).double(), formula, rtol=1e-6, atol=1e-6)


def test_norms_and_rotary_lose_nothing_but_the_last_rounding_in_bf16() -> None:
    hidden = torch.randn(2, 5, SMALL.hidden).bfloat16()
    norm = small().norm.bfloat16()
    reference = norm.float()(hidden.float())
    assert torch.equal(norm.bfloat16()(hidden), reference.bfloat16())
    heads = torch.randn(1, 2, 200, 8).bfloat16()
    turn = Rotary(8, 10_000.0)(200, heads.device).turn
    assert torch.equal(turn(heads), turn(heads.float()).bfloat16())


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_hugging_face(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = small(tie_embeddings=tied, rope_base=5_000.0, norm_eps=1e-4)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=SMALL.vocab_size,
            num_hidden_layers=SMALL.layers,
            hidden_size=SMALL.hidden,
            num_attention_heads=SMALL.heads,
            num_key_value_heads=SMALL.kv_heads,
            intermediate_size=SMALL.ffn,
            max_position_embeddings=SMALL.seq,
            rope_theta=5_000.0,
            rms_norm_eps=1e-4,
            tie_word_embeddings=tied,
        )
    ).eval()
    copied = theirs.load_state_dict(
        {in_hugging_face(name): weight for name, weight in model.state_dict().items()}, strict=False
    )
    assert copied.unexpected_keys == []
    assert copied.missing_keys == (["lm_head.weight"] if tied else [])
    batch = tokens(2, 33)
    with torch.no_grad():
        # The same sums in another order, in fp32.
        assert relative_error(model(batch), theirs(batch).logits) < 1e-5


def in_hugging_face(name: str) -> str:
    """The name that Hugging Face's Llama gives to one of our parameters."""
    for ours, theirs in {
        "embed": "model.embed_tokens",
        "blocks": "model.layers",
        "head": "lm_head",
        "feed_forward_norm": "post_attention_layernorm",
        "attention_norm": "input_layernorm",
        "feed_forward": "mlp",
        "attention": "self_attn",
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "output": "o_proj",
        "gate": "gate_proj",
        "up": "up_proj",
        "down": "down_proj",
    }.items():
        name = ".".join(theirs if part == ours else part for part in name.split("."))
    return f"model.{name}" if name.startswith("norm") else name


@settings(max_examples=20, deadline=None)
@given(changed=st.integers(1, 19), seed=st.integers(0, 99))
def test_a_token_changes_no_logits_before_it(changed: int, seed: int) -> None:
    model, batch = small(), tokens(1, 20, seed)
    other = batch.clone()
    other[0, changed] = (other[0, changed] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = model(batch), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])


def test_a_model_built_on_meta_and_materialised_equals_one_built_on_the_cpu() -> None:
    for tied in (False, True):
        config = SMALL.model_copy(update={"tie_embeddings": tied})
        with torch.device("meta"):
            model = Transformer(config)
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        model.initialize(3)
        reference = Transformer(config)
        reference.initialize(3)
        with torch.no_grad():
            assert torch.equal(model(tokens(2, 9)), reference(tokens(2, 9)))


def test_the_state_holds_parameters_only() -> None:
    model = small()
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_bf16_weights_give_bf16_logits_close_to_fp32() -> None:
    model, batch = small(), tokens(2, 20)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        wide = model(batch)
        narrow = model.bfloat16()(batch)
    assert narrow.dtype == torch.bfloat16
    # bf16 keeps 8 bits, 0.4 %; three layers of two branches add up a few of those.
    assert float((narrow.float() - wide).norm() / wide.norm()) < 0.05


def test_autocast_trains_fp32_weights() -> None:
    model, batch = small(), tokens(2, 20)
    with torch.autocast("cpu", torch.bfloat16):
        model(batch).float().square().mean().backward()
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.float32
        for parameter in model.parameters()
    )


def test_dropout_acts_in_training_only() -> None:
    model, batch = small(dropout=0.5), tokens(2, 20)
    with torch.no_grad():
        assert torch.equal(model(batch), small()(batch))
        model.train()
        assert not torch.equal(model(batch), model(batch))


def test_every_parameter_gets_a_gradient() -> None:
    model = small()
    model(tokens(2, 20)).square().mean().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())


def test_blocks_are_a_list_of_one_block_a_layer() -> None:
    blocks = small().blocks
    assert isinstance(blocks, nn.ModuleList)
    assert len(blocks) == SMALL.layers


def test_a_sample_longer_than_the_context_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="41 tokens is longer than the model's context") as refusal:
        small()(tokens(1, 41))
    assert refusal.value.possible == "up to 40 tokens"
