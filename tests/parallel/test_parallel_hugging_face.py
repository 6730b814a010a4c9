"""Hugging Face's causal models train under tensor parallelism as in one process, or are refused."""

import pytest
import torch
from hugging_face_stand_ins import SEQ, Alone, build, check
from torch import nn

from shoal.errors import ModelError, PlanError
from shoal.models import logits_of
from shoal.models.tiny_hugging_face import small_configuration
from shoal.parallel import parallelize, require_layout
from shoal.parallel.hugging_face.layout import has_tensor_plan, layout_of_hugging_face
from shoal.spec.plan import Plan


@pytest.fixture(scope="module")
def alone():
    return Alone()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("plan", ["tp=4,tensor=plain", "tp=2"])  # with four, two ranks share a head of keys
def test_it_trains_as_in_one_process(ranks, alone, kind, plan):
    check(ranks, alone, kind, plan)


@pytest.mark.parametrize("plan", ["tp=4", "tp=2,tensor=async,recompute=selective", "dp=2,tp=2,shard=zero3"])
def test_the_residual_stream_may_be_split(ranks, alone, plan):
    check(ranks, alone, "qwen3", plan)


@pytest.mark.parametrize("shard", ["zero1", "zero3"])
def test_it_composes_with_data_parallelism(ranks, alone, shard):
    check(ranks, alone, "llama", f"dp=2,tp=2,tensor=plain,shard={shard}")


@pytest.mark.parametrize("plan", ["tp=4,tensor=plain", "dp=2,tp=2,shard=zero3"])
def test_the_head_may_share_the_weight_of_the_embedding(ranks, alone, plan):
    check(ranks, alone, "llama", plan, tie_word_embeddings=True)


def test_layers_may_have_biases_and_be_recomputed(ranks, alone):
    check(ranks, alone, "llama", "tp=2,recompute=full", attention_bias=True, mlp_bias=True)


def test_weights_may_compute_in_bf16(ranks, alone):
    check(ranks, alone, "llama", "dp=2,tp=2,shard=zero3,precision=bf16,recompute=full")


@pytest.mark.parametrize("shard", ["zero1", "zero3"])
def test_experts_of_transformers_train_under_data_parallelism(ranks, alone, shard):
    check(ranks, alone, "mixtral", f"dp=2,shard={shard}", num_local_experts=4)


def test_any_layer_of_the_plan_may_come_by_another_name(ranks, alone):
    check(ranks, alone, "phi", "tp=2,tensor=plain", resid_pdrop=0.0, embd_pdrop=0.0, num_key_value_heads=4)


@pytest.mark.parametrize("plan", ["tp=4,tensor=plain", "tp=2"])
def test_attention_may_repeat_heads_itself(ranks, alone, plan):
    check(ranks, alone, "llama", plan, attn_implementation="eager")


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


def test_a_plan_may_name_the_embedding_or_leave_it_out():
    model = build("llama", {"tie_word_embeddings": True})
    plan = {word: style for word, style in model.config.base_model_tp_plan.items() if word != "embed_tokens"}
    model.config.base_model_tp_plan = plan
    left_out = layout_of_hugging_face(model)
    model.config.base_model_tp_plan = plan | {
        "embed_tokens": "embedding_rowwise"
    }  # transformers 5.15 to 5.20
    assert layout_of_hugging_face(model) == left_out


def gathered_logits(plan):
    parallel = parallelize(build("llama", {}), plan)
    return logits_of(parallel(torch.arange(SEQ)[None], attention_mask=PADDED)).detach()


PADDED = (torch.arange(SEQ) >= 5).long()[None]


@pytest.mark.parametrize("plan", ["tp=2,tensor=plain", "tp=2"])
def test_logits_that_were_split_can_be_gathered_and_padding_is_not_seen(ranks, plan):
    with torch.no_grad():
        expected = build("llama", {})(torch.arange(SEQ)[None], attention_mask=PADDED).logits
    for logits in ranks.run(gathered_logits, 2, plan):
        # fp32 sums in another order
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def with_labels(plan):
    parallel, tokens = parallelize(build("llama", {}), plan), torch.arange(SEQ)[None]
    with pytest.raises(ModelError) as caught:
        parallel(tokens, labels=tokens)
    return str(caught.value)


@pytest.mark.parametrize("plan", ["tp=2", "cp=2"])
def test_a_loss_of_its_own_is_refused_where_it_would_be_wrong(ranks, plan):
    assert "shoal.models.next_token_loss" in ranks.run(with_labels, 2, plan)[0]


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,tensor=plain", "dp=2,tp=2,shard=zero3"])
def test_experts_of_transformers_stay_whole_under_tensor_parallelism(ranks, alone, plan):
    check(ranks, alone, "mixtral", plan, num_local_experts=4)


def test_ranks_of_their_own_for_its_experts_are_refused():
    with pytest.raises((ModelError, PlanError), match="no experts to divide over 2 ranks"):
        require_layout(build("mixtral", {}), Plan.parse("dp=2,ep=2"), SEQ)


@pytest.mark.parametrize("plan", ["tp=4,tensor=plain", "tp=2"])
def test_a_window_of_attention_is_the_same(ranks, alone, plan):
    check(ranks, alone, "mistral", plan, sliding_window=4)


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
        ("olmo2", {}, "as 'colwise_gather_output'"),
        ("phi3", {"pad_token_id": 0}, "as 'rowwise_split_input'"),
        ("gpt_neox", {}, "neither attention nor"),
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


def test_a_split_of_the_sequence_is_refused_where_the_vocabulary_is_whole(ranks):
    text = ranks.run(refused, 2, "tp=2", {"pad_token_id": 0})[0]
    assert "add tensor=plain" in text
    assert "model.embed_tokens has padding_idx=0" in text


def test_a_layer_that_needs_the_whole_sequence_is_named():
    transformers = pytest.importorskip("transformers")
    config = small_configuration("deepseek_v3", {})
    config.pad_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        PlanError, match=r"here model\.layers\.0\.self_attn needs it whole\n.*add tensor=plain"
    ):
        require_layout(model, Plan.parse("tp=2"), 16)


def test_heads_that_do_not_divide_are_refused(ranks):
    odd = {"num_attention_heads": 2, "num_key_value_heads": 2}
    assert "does not divide the 2 parts" in ranks.run(refused, 4, "tp=4,tensor=plain", odd)[0]
