"""Hugging Face's causal models train under context parallelism as in one process, or are refused."""

import pytest
import torch
from hugging_face_stand_ins import SEQ, Alone, build, check

from shoal.errors import ModelError, PlanError
from shoal.parallel import parallelize, require_layout
from shoal.spec.plan import Plan

ROBERTA = {
    "is_decoder": True,
    "pad_token_id": 1,
    "max_position_embeddings": SEQ + 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.fixture(scope="module")
def alone():
    return Alone()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_it_trains_as_in_one_process(ranks, alone, kind):
    check(ranks, alone, kind, "cp=2")


@pytest.mark.parametrize(
    "plan",
    [
        "cp=4",
        "cp=4,context=ulysses",  # two ranks share a head of keys
        "cp=2,tp=2",
        "cp=2,tp=2,tensor=async,context=ulysses,shard=zero3",
        "dp=2,cp=2,shard=zero3,recompute=full",
        "dp=2,cp=2,shard=zero3,recompute=full,context=ulysses,precision=bf16",
    ],
)
def test_it_composes(ranks, alone, plan):
    check(ranks, alone, "qwen3", plan)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", NO_DROPOUT),  # learned positions, one layer for query, key and value
        ("gpt_neox", {}),  # rotary positions of a part of each head
        ("granite", {"attention_multiplier": 0.2}),  # scores scaled otherwise
        ("mixtral", {"num_local_experts": 4, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": SEQ}),  # a window that leaves nothing out
    ],
)
def test_other_positions_scales_and_layers_are_the_same(ranks, alone, kind, changes):
    check(ranks, alone, kind, "cp=2", **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mistral", {"sliding_window": SEQ - 1}, "a window of 15 tokens(.|\n)*use sequence=15"),
        ("llama", {"attention_dropout": 0.1}, "a dropout of 0.1"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("gemma2", {}, "caps the attention scores"),
        ("bloom", {}, "AttentionInterface"),
        ("llama4_text", {"pad_token_id": 0}, "layers of chunked_attention"),
    ],
)
def test_what_attention_over_ranks_does_not_know_is_refused_before_the_start(kind, changes, message):
    with torch.device("meta"):
        model = build(kind, changes)
    with pytest.raises((ModelError, PlanError), match=message):
        require_layout(model, Plan.parse("cp=2"), SEQ)


def test_too_few_heads_for_ulysses_are_refused():
    model = build("llama", {})
    require_layout(model, Plan.parse("cp=2,tp=2,context=ulysses"), SEQ)
    with pytest.raises(PlanError, match="a rank has only 2 query heads"):
        require_layout(model, Plan.parse("cp=4,tp=2,context=ulysses"), SEQ)


def refused_at_start(kind, changes):
    with pytest.raises(ModelError) as caught:
        parallelize(build(kind, changes), "cp=2")
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt_oss", {"pad_token_id": 0, "layer_types": ["full_attention"] * 2}, "gets s_aux"),
        (
            "deepseek_v3",
            dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
            | {"q_lora_rank": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
            | {"n_group": 1, "topk_group": 1},
            "values and keys of different widths",
        ),
        ("roberta", {"is_decoder": False}, "is not causal"),
    ],
)
def test_what_only_a_forward_shows_is_refused_before_the_first_step(ranks, kind, changes, message):
    assert message in ranks.run(refused_at_start, 2, kind, changes)[0]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (
            "opt",
            {"dropout": 0.0, "ffn_dim": 48, "word_embed_proj_dim": 32},
        ),  # passes base_model by
        ("roberta", ROBERTA),  # counts positions from above its padding token, which it leaves out
        ("xlm-roberta", ROBERTA),
        ("camembert", ROBERTA),
        ("data2vec-text", ROBERTA),
    ],
)
@pytest.mark.parametrize("plan", ["cp=2", "cp=2,context=ulysses,recompute=full"])
def test_positions_that_a_model_counts_are_those_of_the_whole_sequence(ranks, alone, kind, changes, plan):
    check(ranks, alone, kind, plan, **changes)


def refused(kind, changes, given):
    parallel = parallelize(build(kind, changes), "cp=2")
    with pytest.raises((ModelError, PlanError)) as caught:
        parallel(torch.arange(SEQ // 2)[None], **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "given", "message"),
    [
        ("llama", {}, {"attention_mask": torch.ones(1, SEQ // 2)}, "attention_mask was given"),
        ("llama", {}, {"position_ids": torch.arange(SEQ // 2)[None]}, "position_ids of 8 positions"),
        ("mistral", {"sliding_window": 4}, {}, "a window of 4 tokens"),
    ],
)
def test_what_only_a_forward_shows_is_refused_there(ranks, kind, changes, given, message):
    assert message in ranks.run(refused, 2, kind, changes, given)[0]
