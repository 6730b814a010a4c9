"""The mixture of experts against a loop over tokens and experts, and against Hugging Face's Mixtral."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import ModelError
from shoal.models import (
    Mixture,
    Transformer,
    TransformerConfig,
    auxiliary_loss,
    next_token_loss,
    preset,
    set_auxiliary_scale,
)
from shoal.models.experts import within_capacity

SMALL = TransformerConfig(
    vocab_size=61, layers=2, hidden=32, heads=4, kv_heads=2, ffn=24, seq=40, experts=6, experts_per_token=2
)
WIDTH = SMALL.hidden


def mixture(seed: int = 0, **changes: object) -> Mixture:
    """One whose router is far from even, so that some experts get many rows and some few."""
    layer = Mixture(TransformerConfig(**(SMALL.model_dump() | changes)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.4, generator=generator)
    return layer


def hidden_states(batch: int, seq: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, seq, WIDTH, generator=generator).requires_grad_()


def naive(layer: Mixture, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Output and weighted auxiliary loss, token by token and expert by expert."""
    limit = math.inf
    if layer.capacity is not None:
        limit = math.ceil(layer.capacity * hidden.shape[1] * layer.per_token / layer.experts)
    samples, losses = [], []
    for sample in hidden:
        taken, chosen_of = [0] * layer.experts, [0] * layer.experts
        rows, chances = [], []
        for token in sample:
            logits = layer.router.weight @ token
            chance = logits.exp() / logits.exp().sum()
            experts = sorted(range(layer.experts), key=lambda expert: -chance[expert])[: layer.per_token]
            total = sum(chance[expert] for expert in experts) if layer.renormalize else 1.0
            row = torch.zeros_like(token)
            for expert in experts:
                chosen_of[expert] += 1
                if taken[expert] < limit:
                    taken[expert] += 1
                    inner = F.silu(layer.gate[expert] @ token) * (layer.up[expert] @ token)
                    row = row + chance[expert] / total * (layer.down[expert] @ inner)
            rows.append(row)
            chances.append(chance)
            losses.append(layer.z_weight * logits.exp().sum().log() ** 2 / sample.shape[0])
        samples.append(torch.stack(rows))
        mean = torch.stack(chances).mean(0)
        for expert in range(layer.experts):
            fraction = chosen_of[expert] / (sample.shape[0] * layer.per_token)
            losses.append(layer.balance_weight * layer.experts * fraction * mean[expert])
    return torch.stack(samples), sum(losses) / len(samples)


def gradients_of(layer: nn.Module, *inputs: Tensor) -> list[Tensor]:
    taken = [tensor.grad.clone() for tensor in (*inputs, *layer.parameters())]
    layer.zero_grad()
    for tensor in inputs:
        tensor.grad = None
    return taken


VARIANTS = [
    {},
    {"renormalize": True},
    {"experts_per_token": 1, "z_weight": 0.1},
    {"experts_per_token": 6},
    {"capacity": 0.7, "balance_weight": 0.5},
    {"capacity": 1.0, "experts_per_token": 3, "renormalize": True, "z_weight": 0.02},
    {"experts": 40, "expert_ffn": 8},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_outputs_and_gradients_equal_those_of_a_loop_over_tokens_and_experts(
    changes: dict[str, object],
) -> None:
    layer, hidden = mixture(**changes), hidden_states(3, 11)
    weights = torch.randn(3, 11, WIDTH, generator=torch.Generator().manual_seed(5))
    output = layer(hidden)
    (output * weights).sum().backward()
    loss, gradients = auxiliary_loss(layer), gradients_of(layer, hidden)
    wide, wide_hidden = copy.deepcopy(layer).double(), hidden.detach().double().requires_grad_()
    reference, reference_loss = naive(wide, wide_hidden)
    ((reference * weights).sum() + reference_loss).backward()
    # fp32 against fp64, sums of some tens of terms, each rounded to 6e-8.
    torch.testing.assert_close(output.double(), reference, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.double(), reference_loss.detach(), rtol=1e-5, atol=0)
    for value, expected in zip(gradients, gradients_of(wide, wide_hidden), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-4)


def test_logits_equal_those_of_mixtral() -> None:
    transformers = pytest.importorskip("transformers")
    config = SMALL.model_copy(update={"renormalize": True})
    model = Transformer(config)
    model.initialize(0)
    theirs = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=config.vocab_size,
            num_hidden_layers=config.layers,
            hidden_size=config.hidden,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            intermediate_size=config.ffn,
            num_local_experts=config.experts,
            num_experts_per_tok=config.experts_per_token,
            rope_theta=config.rope_base,
            rms_norm_eps=config.norm_eps,
            sliding_window=None,
        )
    ).eval()
    weights = theirs.state_dict()
    if "model.layers.0.mlp.experts.gate_up_proj" not in weights:
        pytest.skip("this version of transformers does not stack the experts' weights")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    renamed = {in_mixtral(name): weight for name, weight in model.state_dict().items()}
    for layer in range(config.layers):
        experts = f"model.layers.{layer}.mlp.experts"
        halves = (renamed.pop(f"{experts}.gate"), renamed.pop(f"{experts}.up"))
        renamed[f"{experts}.gate_up_proj"] = torch.cat(halves, 1)
    assert set(renamed) == set(weights)
    theirs.load_state_dict(renamed)
    batch = torch.randint(config.vocab_size, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        # The same sums in another order, in fp32.
        torch.testing.assert_close(model.eval()(batch), theirs(batch).logits, rtol=1e-4, atol=1e-5)


def in_mixtral(name: str) -> str:
    """The name that Hugging Face's Mixtral gives to one of our parameters."""
    names = {
        "embed": "model.embed_tokens",
        "blocks": "model.layers",
        "head": "lm_head",
        "norm": "model.norm",
        "feed_forward_norm": "post_attention_layernorm",
        "attention_norm": "input_layernorm",
        "feed_forward": "mlp",
        "attention": "self_attn",
        "query": "q_proj",
        "key": "k_proj",
        "value": "v_proj",
        "output": "o_proj",
        "router": "gate",
        "gate": "experts.gate",
        "up": "experts.up",
        "down": "experts.down_proj",
    }
    return ".".join(names.get(part, part) for part in name.split("."))


def test_a_capacity_that_nothing_overflows_changes_nothing() -> None:
    dropless, hidden = mixture(), hidden_states(2, 13)
    limited = mixture(capacity=SMALL.experts / SMALL.experts_per_token)
    assert torch.equal(dropless(hidden), limited(hidden))


@settings(max_examples=50, deadline=None)
@given(
    batch=st.integers(1, 3),
    seq=st.integers(1, 20),
    per_token=st.integers(1, 3),
    experts=st.integers(3, 9),
    capacity=st.floats(0.1, 3),
    seed=st.integers(0, 999),
)
def test_each_expert_takes_the_first_choices_of_each_sample(
    batch: int, seq: int, per_token: int, experts: int, capacity: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(batch, seq, experts, generator=generator).argsort(-1)[..., :per_token]
    kept = within_capacity(chosen, experts, capacity)
    limit = math.ceil(capacity * seq * per_token / experts)
    for choices, mask in zip(chosen.flatten(1).tolist(), kept.flatten(1).tolist(), strict=True):
        before = [choices[:index].count(choice) for index, choice in enumerate(choices)]
        assert mask == [count < limit for count in before]


def test_a_token_that_no_expert_takes_keeps_its_hidden_state() -> None:
    layer = mixture(experts=4, experts_per_token=1, capacity=0.1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 1.0
        # All go to expert 2, or those with a negative sum to others; a limit of one choice each.
        output = layer(hidden_states(1, 20).abs())
    assert bool(output[0, 0].any())
    assert not bool(output[0, 1:].any())


def test_a_token_changes_nothing_before_it_also_where_choices_are_dropped() -> None:
    layer, hidden = mixture(capacity=0.5), hidden_states(1, 20)
    for changed in range(1, 20):
        other = hidden.detach().clone()
        other[0, changed] = -other[0, changed]
        # Runs of other lengths are multiplied in blocks of other sizes.
        torch.testing.assert_close(
            layer(hidden)[:, :changed], layer(other)[:, :changed], rtol=1e-5, atol=1e-5
        )


def test_the_balance_loss_is_one_when_even_and_as_large_as_the_experts_when_one_takes_all() -> None:
    layer, hidden = mixture(experts_per_token=1), hidden_states(2, 12)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer(hidden)
        assert float(layer.balance_loss) == pytest.approx(1.0)
        layer.router.weight[3] = 100.0
        layer(hidden.abs())
    assert float(layer.balance_loss) == pytest.approx(SMALL.experts)
    assert layer.load.tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("capacity", [None, 0.8])
def test_micro_batches_train_as_the_whole_batch_does(capacity: float | None) -> None:
    config = SMALL.model_copy(update={"capacity": capacity, "z_weight": 0.01, "balance_weight": 1.0})
    tokens = torch.randint(61, (4, 21), generator=torch.Generator().manual_seed(0))
    results = []
    for parts in (1, 2, 4):
        model = Transformer(config)
        model.initialize(0)
        set_auxiliary_scale(model, 1 / parts)
        for part in tokens.chunk(parts):
            (next_token_loss(model(part[:, :-1]), part[:, 1:]) / parts).backward()
        results.append(gradients_of(model))
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            # The same sums in another order: a few roundings of 6e-8 of the largest terms.
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_the_auxiliary_gradients_follow_their_scale() -> None:
    layer, hidden = mixture(balance_weight=1.0), hidden_states(2, 9)
    taken = []
    for scale in (0.0, 1.0, torch.tensor(3.0)):
        set_auxiliary_scale(layer, scale)
        (0 * layer(hidden)).sum().backward()
        taken.append(gradients_of(layer.router)[0])
    assert not bool(taken[0].any())
    # One product more: some roundings of 6e-8.
    torch.testing.assert_close(taken[2], 3 * taken[1], rtol=1e-5, atol=1e-6)
    assert float(taken[1].abs().max()) > 0.01


def test_in_evaluation_nothing_but_the_output_has_a_gradient() -> None:
    layer, hidden = mixture(balance_weight=100.0).eval(), hidden_states(1, 9)
    layer(hidden).sum().backward()
    evaluated = gradients_of(layer, hidden)
    plain = mixture(balance_weight=0.0)
    plain(hidden).sum().backward()
    for value, expected in zip(evaluated, gradients_of(plain, hidden), strict=True):
        assert torch.equal(value, expected)


def test_recomputed_blocks_give_the_same_gradients() -> None:
    layer, hidden = mixture(capacity=0.9, balance_weight=1.0), hidden_states(2, 9)
    layer(hidden).square().sum().backward()
    kept = gradients_of(layer, hidden)
    checkpoint(layer, hidden, use_reentrant=False).square().sum().backward()
    for value, expected in zip(gradients_of(layer, hidden), kept, strict=True):
        assert torch.equal(value, expected)


def test_an_expert_without_rows_has_a_gradient_of_zeros() -> None:
    layer, hidden = mixture(experts=40), hidden_states(1, 2)
    layer(hidden).sum().backward()
    idle = layer.load == 0
    assert int(idle.sum()) >= 36
    assert all(not bool(weight.grad[idle].any()) for weight in (layer.gate, layer.up, layer.down))


def test_bf16_weights_and_autocast_give_outputs_close_to_fp32() -> None:
    layer, hidden = mixture(), hidden_states(2, 9)
    wide = layer(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(hidden)
    cast.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    narrow = layer.bfloat16()(hidden.bfloat16())
    assert narrow.dtype == cast.dtype == torch.bfloat16
    # bf16 keeps 8 bits, 0.4 %; each output adds up a few products of three such factors. Where rounding
    # moves a token to another expert, its row differs more, so rows are compared by their median.
    for other in (cast, narrow):
        errors = (other.float() - wide).detach().norm(dim=-1) / wide.detach().norm(dim=-1)
        assert float(errors.median()) < 0.03


def test_experts_begin_with_values_that_depend_on_seed_and_name_alone() -> None:
    model, reference = Transformer(SMALL), Transformer(SMALL)
    model.initialize(7)
    reference.initialize(8)
    for name in reversed(list(model.state_dict())):
        reference.initialize_parameter(name, reference.get_parameter(name), 7)
    for name, value in model.state_dict().items():
        assert torch.equal(value, reference.get_parameter(name))
    layer = model.blocks[1].feed_forward
    # A few thousand draws each: their deviation is within 5 % of what it is drawn with.
    for weight in (layer.gate, layer.up):
        assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(layer.down.detach().std()) == pytest.approx(0.02 / math.sqrt(2 * SMALL.layers), rel=0.05)
    assert not torch.equal(layer.gate[0], layer.gate[1])


def test_the_state_holds_parameters_only_also_after_a_forward() -> None:
    model = Transformer(SMALL)
    model(torch.zeros(1, 5, dtype=torch.long))
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


def test_a_model_of_experts_can_be_copied_and_pickled() -> None:
    model = Transformer(SMALL)
    tokens = torch.arange(10)[None]
    expected = model(tokens)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens), expected)


def test_a_dense_model_has_no_auxiliary_loss() -> None:
    model = Transformer(SMALL.model_copy(update={"experts": 0}))
    model(torch.zeros(1, 5, dtype=torch.long))
    assert auxiliary_loss(model) is None


def test_the_expert_presets_give_a_token_as_many_parameters_as_the_dense_ones() -> None:
    for name in ("tiny", "12m"):
        dense, experts = preset(name), preset(f"{name}-experts")
        assert experts.active_parameter_count() == pytest.approx(dense.parameter_count(), rel=0.01)
        assert dense.active_parameter_count() == dense.parameter_count()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 7}, "experts_per_token=7 is more than experts=6"),
        ({"experts_per_token": 1, "renormalize": True}, "the router learns nothing"),
        ({"capacity": 0}, "'capacity' cannot be 0"),
        ({"balance_weight": -1}, "'balance_weight' cannot be -1"),
        ({"experts": -1}, "'experts' cannot be -1"),
    ],
)
def test_experts_that_cannot_be_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        TransformerConfig(**(SMALL.model_dump() | changes))
