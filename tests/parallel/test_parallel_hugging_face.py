"""Hugging Face's causal models train under tensor parallelism as in one process, or are refused."""

import pytest
import torch
from parallel_stand_ins import assembled, owned_parts
from torch import nn

from shoal.errors import PlanError
from shoal.models import logits_of, next_token_loss
from shoal.parallel import parallelize
from shoal.parallel.hugging_face import has_tensor_plan, layout_of_hugging_face
from shoal.plan import Plan

transformers = pytest.importorskip("transformers")

STEPS, BATCH, SEQ = 4, 4, 12
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ,
    "use_cache": False,
}


def build(kind, changes):
    config = transformers.AutoConfig.for_model(kind, **(SHAPE | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # they begin at zero, which would hide one that is added twice
            nn.init.normal_(parameter)
    return model


def train(kind, plan, changes):
    """Losses and gradient norms by step, and the weights at the end, which are whole on every rank."""
    parallel = parallelize(build(kind, changes), plan)
    # Adam would divide a wrong factor out, and make rounding of gradients near zero large.
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.2, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(STEPS):
        tokens = parallel.local(torch.randint(SHAPE["vocab_size"], (BATCH, SEQ + 1), generator=generator))
        loss = next_token_loss(parallel(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norm = parallel.gradient_norm()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        parallel.axes.data.all_reduce(total, "loss").wait()
        results.append((total.item() / parallel.axes.data.size, norm))
    return results, owned_parts(parallel)


@pytest.fixture(scope="module")
def alone():
    known = {}

    def trained(kind, changes):
        key = (kind, *sorted(changes.items()))
        if key not in known:
            known[key] = train(kind, "dp=1", changes)
        return known[key]

    return trained


def check(ranks, alone, kind, plan, **changes):
    expected, owned = alone(kind, changes)
    results = ranks.run(train, Plan.parse(plan).ranks, kind, plan, changes)
    for losses, _ in results:
        # fp32 sums in another order, over a few steps
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    reference, whole = assembled([owned]), assembled([parts for _, parts in results])
    assert whole.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(
            whole[name], value, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("tp", [2, 4])  # with four, two ranks share a head of keys and values
def test_it_trains_as_in_one_process(ranks, alone, kind, tp):
    check(ranks, alone, kind, f"tp={tp},tensor=plain")


@pytest.mark.parametrize("shard", ["zero1", "zero3"])
def test_it_composes_with_data_parallelism(ranks, alone, shard):
    check(ranks, alone, "llama", f"dp=2,tp=2,tensor=plain,shard={shard}")


@pytest.mark.parametrize("plan", ["tp=4,tensor=plain", "dp=2,tp=2,tensor=plain,shard=zero3"])
def test_the_head_may_share_the_weight_of_the_embedding(ranks, alone, plan):
    check(ranks, alone, "llama", plan, tie_word_embeddings=True)


def test_layers_may_have_biases_and_be_recomputed(ranks, alone):
    check(ranks, alone, "llama", "tp=2,tensor=plain,recompute=full", attention_bias=True, mlp_bias=True)


def test_any_layer_of_the_plan_may_come_by_another_name(ranks, alone):
    check(ranks, alone, "phi", "tp=2,tensor=plain", resid_pdrop=0.0, embd_pdrop=0.0, num_key_value_heads=4)


@pytest.mark.parametrize("tp", [2, 4])
def test_attention_may_repeat_heads_itself(ranks, alone, tp):
    check(ranks, alone, "llama", f"tp={tp},tensor=plain", attn_implementation="eager")


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {}, ("model.embed_tokens", "lm_head")),
        ("llama", {"tie_word_embeddings": True}, ("model.embed_tokens", "lm_head")),
        ("llama", {"pad_token_id": 0}, (None, "lm_head")),
        ("llama", {"pad_token_id": 0, "tie_word_embeddings": True}, (None, None)),
        ("phi", {"num_key_value_heads": 4}, ("model.embed_tokens", None)),
        ("granite", {"logits_scaling": 2.0}, ("model.embed_tokens", None)),
    ],
)
def test_a_vocabulary_is_split_where_that_is_all(ranks, alone, kind, changes, expected):
    layout = layout_of_hugging_face(build(kind, changes))
    assert (layout.embedding, layout.head) == expected
    check(ranks, alone, kind, "tp=2,tensor=plain", **changes)


def gathered_logits(kind):
    parallel = parallelize(build(kind, {}), "tp=2,tensor=plain")
    return logits_of(parallel(torch.arange(SEQ)[None])).detach()


def test_logits_that_were_split_can_be_gathered(ranks):
    with torch.no_grad():
        expected = build("llama", {})(torch.arange(SEQ)[None]).logits
    for logits in ranks.run(gathered_logits, 2, "llama"):
        # fp32 sums in another order
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_window_of_attention_is_the_same(ranks, alone):
    check(ranks, alone, "mistral", "tp=4,tensor=plain", sliding_window=4)


def test_the_layout_names_every_layer_once():
    model = build("llama", {})
    layout = layout_of_hugging_face(model)
    assert list(layout.splits) == [
        f"model.layers.{layer}.{part}" for layer in range(2) for part in ("self_attn", "mlp")
    ]
    attention = layout.splits["model.layers.0.self_attn"]
    assert attention.columns == {"q_proj": 4, "k_proj": 2, "v_proj": 2}
    assert attention.rows == {"o_proj": 4}
    assert has_tensor_plan(model)
    assert not has_tensor_plan(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3", {"head_dim": 8}, "q_norm.weight works on what is split"),
        ("olmo2", {}, "as 'colwise_gather_output'"),
        ("phi3", {"pad_token_id": 0}, "as 'rowwise_split_input'"),
        ("mixtral", {}, "mlp.experts"),
        ("gpt_neox", {}, "neither known attention nor"),
        ("phi", {"resid_pdrop": 0.1}, "config.resid_pdrop"),
        ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}, "no plan for tensor parallelism"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(kind, changes, message):
    model = build(kind, changes)
    with pytest.raises(PlanError, match=message):
        layout_of_hugging_face(model)


def refused(plan, changes):
    with pytest.raises(PlanError) as caught:
        parallelize(build("llama", changes), plan)
    return str(caught.value)


def test_a_split_of_the_sequence_is_refused_with_what_is_possible(ranks):
    assert "add tensor=plain" in ranks.run(refused, 2, "tp=2", {})[0]


def test_heads_that_do_not_divide_are_refused(ranks):
    odd = {"num_attention_heads": 2, "num_key_value_heads": 2}
    assert "does not divide the 2 parts" in ranks.run(refused, 4, "tp=4,tensor=plain", odd)[0]
