"""A model that was cut into stages computes what the whole model does, whoever holds which stage."""

import gc
import weakref

import pytest
import torch
from stage_stand_ins import (
    LOOPED,
    ONE_EACH,
    TOKENS,
    TUPLES,
    V_SHAPED,
    Tuples,
    check,
    cut,
    train_stages,
)
from torch import nn

from shoal.errors import ModelError, PlanError
from shoal.models import Transformer, TransformerConfig, logits_of, next_token_loss, set_auxiliary_scale
from shoal.models.dropout import token_keys
from shoal.parallel import parallelize
from shoal.parallel.compiled import compile_blocks
from shoal.parallel.pipeline.stage_layout import StageLayout, parameters_by_piece, stages_of, tied_names
from shoal.parallel.pipeline.stages import take_stages

SHAPE = {"vocab_size": 61, "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": 12}


pytestmark = pytest.mark.usefixtures("one_thread")


def transformer(**changes):
    model = Transformer(TransformerConfig(**(SHAPE | changes)))
    model.initialize(0)
    model.dropout_keys = token_keys(0, 0, torch.arange(2), torch.arange(12))
    return model


def hugging_face(kind, **changes):
    transformers = pytest.importorskip("transformers")
    shape = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 12,
        "pad_token_id": None,
        "use_cache": False,
    }
    config = transformers.AutoConfig.for_model(kind, **(shape | changes))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float().train()


@pytest.mark.parametrize("ranks", [ONE_EACH, LOOPED, V_SHAPED])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("split", [(2, 1, 1, 2), (1, 3, 1, 1)])
def test_a_transformer_trains_as_in_one_piece(ranks, tied, split):
    check(lambda: transformer(tie_embeddings=tied), ranks, split)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_blocks_may_be_recomputed(policy):
    def prepare(model):
        compile_blocks([block for block in model.blocks if any(True for _ in block.parameters())], policy)

    check(lambda: transformer(dropout=0.1), V_SHAPED, (2, 1, 2, 1), prepare=prepare)


def test_blocks_may_be_recomputed_before_the_model_is_cut():
    def build():
        model = transformer()
        compile_blocks(list(model.blocks), "full")
        return model

    check(build, LOOPED, (2, 1, 2, 1))


def test_the_losses_of_routers_join_each_stage_s_own_backward():
    def build():
        model = transformer(experts=4, balance_weight=0.5, z_weight=0.1)
        set_auxiliary_scale(model, 0.25)
        return model

    check(build, LOOPED, (2, 1, 1, 2), loss_of=lambda output, targets: next_token_loss(output, targets) / 4)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        (
            "qwen2",
            {
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "sliding_window": 4,
                "use_sliding_window": True,
            },
        ),
        ("qwen3", {"head_dim": 8}),
        ("mistral", {"sliding_window": 4}),
        ("gemma", {"head_dim": 8}),
        ("phi", {"num_key_value_heads": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
        ("granite", {"logits_scaling": 2.0, "embedding_multiplier": 3.0}),
    ],
)
@pytest.mark.parametrize("ranks", [ONE_EACH, V_SHAPED])
def test_a_causal_model_of_hugging_face_trains_as_in_one_piece(kind, changes, ranks):
    check(lambda: hugging_face(kind, **changes), ranks, (2, 1, 2, 1))


def test_a_stage_may_have_the_embedding_or_the_end_alone():
    check(
        lambda: hugging_face("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), ONE_EACH, (1, 2, 2, 1)
    )
    check(transformer, ONE_EACH, (1, 2, 2, 1))


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(61, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 61)
    )


def test_a_sequential_is_cut_between_any_elements():
    check(sequential, LOOPED, (2, 1, 2, 2))


def test_a_layout_says_how_a_model_of_ones_own_is_cut():
    # The division by 3 stands before the head, and is the last stage's affair.
    check(Tuples, V_SHAPED, (2, 1, 2, 2), TUPLES)
    check(Tuples, ONE_EACH, (1, 3, 1, 2), TUPLES)


def test_names_stay_and_the_rest_is_freed():
    model = transformer()
    names = [name for name, _ in model.named_parameters()]
    others = [weakref.ref(each) for name, each in model.named_parameters() if "blocks.2." not in name]
    (stage,) = take_stages(model, stages_of(model), {1: range(3, 4)})
    gc.collect()
    assert [name for name, _ in model.named_parameters()] == [name for name in names if "blocks.2." in name]
    assert dict(stage.named_parameters()).keys() == set(model.state_dict())
    assert all(each() is None for each in others)


def test_a_model_on_the_meta_device_stays_there():
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**SHAPE))
    first, last = take_stages(model, stages_of(model), {0: range(2), 3: range(4, 6)})
    assert all(parameter.is_meta for parameter in model.parameters())
    names = [{name for name, _ in stage.named_parameters()} for stage in (first, last)]
    pieces = parameters_by_piece(model, stages_of(model))
    assert names == [pieces[0] | pieces[1], pieces[4] | pieces[5]]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (transformer, set()),
        (lambda: transformer(tie_embeddings=True), {"embed.weight"}),
        (lambda: hugging_face("llama", tie_word_embeddings=True), {"model.embed_tokens.weight"}),
        (lambda: hugging_face("gpt2"), {"transformer.wte.weight"}),
    ],
)
def test_tied_parameters_have_the_embedding_s_name(build, expected):
    model = build()
    assert tied_names(model, stages_of(model)) == expected
    (last,) = take_stages(model, stages_of(model), {3: range(4, 6)})
    assert expected <= {name for name, _ in last.named_parameters()}
    assert not any("wpe" in name for name, _ in model.named_parameters())


def test_evaluation_gives_the_same_logits():
    model = transformer(dropout=0.5).eval()
    stages, models = cut(lambda: transformer(dropout=0.5), V_SHAPED, (2, 1, 1, 2))
    hidden = None
    with torch.no_grad():
        for each in models:
            each.eval()
        for before, stage in zip([stages[0], *stages], stages, strict=False):
            stage.learn(before.results)
            hidden = stage(TOKENS[:, :-1], hidden)
        torch.testing.assert_close(logits_of(hidden), model(TOKENS[:, :-1]), rtol=0, atol=0)


class Outside(Tuples):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Shared(Tuples):
    def __init__(self):
        super().__init__()
        self.inner.layers[3].layer = self.inner.layers[0].layer


@pytest.mark.parametrize(
    ("build", "layout", "message"),
    [
        (Tuples, StageLayout(("words",), "inner.layers", ("out",)), "places.weight .* is in no piece"),
        (Outside, TUPLES, "scale of Outside is in no piece"),
        (Tuples, StageLayout(("words", "places"), "layers", ("out",)), "names layers, and Tuples has no"),
        (Tuples, StageLayout(("words", "places"), "inner", ("out",)), "'inner', are a Module"),
        (Shared, TUPLES, "would share the parameter inner.layers.0.layer"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(build, layout, message):
    with pytest.raises(ModelError, match=message):
        take_stages(build(), layout, {0: range(2)})


def with_unused_norm():
    model = Tuples()
    model.norm = nn.LayerNorm(16)
    return model


@pytest.mark.parametrize(
    ("layout", "index", "message"),
    [
        (StageLayout(("out",), "inner.layers", ("words", "places", "norm")), 0, "piece 6 .* got no hidden"),
        (StageLayout(("words", "places"), "inner.layers", ("norm", "out")), 3, "not reach all of stage 3"),
    ],
)
def test_a_layout_that_the_forward_does_not_follow_is_noticed(layout, index, message):
    stages, _ = cut(with_unused_norm, ONE_EACH, (2, 2, 2, 1), layout)
    stages[index].learn([0] * len(stages[index].results))
    with pytest.raises(ModelError, match=message):
        stages[index](TOKENS[:, :-1], torch.zeros(2, 12, 16) if index else None)


def test_a_model_that_is_not_known_is_refused_with_what_is_possible():
    with pytest.raises(ModelError, match="nothing says how Linear"):
        stages_of(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="does not define its stages"):
        stages_of(hugging_face("opt", ffn_dim=48, word_embed_proj_dim=32))


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({0: range(7)}, "not in a model of 6 pieces"),
        ({0: range(3), 1: range(2, 4)}, "another stage has them"),
        ({0: range(0)}, "not in a model"),
    ],
)
def test_ranges_that_are_none_are_refused(ranges, message):
    with pytest.raises(PlanError, match=message):
        take_stages(transformer(), StageLayout(), ranges)
    with pytest.raises(PlanError, match="no module"):
        take_stages(sequential(), stages_of(sequential()), {0: range(1)})


def train_split(text, tied, cut_in_stages):
    """Loss and owned gradients of one step, by a model that is laid over the ranks first and cut then."""
    model = transformer(tie_embeddings=tied)
    model.dropout_keys = None
    parallel = parallelize(model, text)
    shapes = []

    def loss_of(output, targets):
        return next_token_loss(output, parallel.local_sequence(targets))

    tokens = parallel.local_sequence(TOKENS[:, :-1])
    if cut_in_stages:
        stages = take_stages(model, stages_of(model), {0: range(2), 1: range(2, 3), 2: range(3, 6)})
        stages[1].module.blocks[1].register_forward_hook(lambda block, given, out: shapes.append(out.shape))
        with parallel.accumulate():  # the middle of three backwards is not to reduce
            loss = train_stages(stages, tokens, loss_of)
    else:
        with parallel.accumulate():
            loss = loss_of(parallel(tokens), TOKENS[:, 1:])
            loss.backward()
    return (
        loss.detach(),
        [tuple(shape) for shape in shapes],
        {name: each.grad.clone() for name, each in model.named_parameters()},
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("text", "shape"),
    [("tp=2", (2, 6, 32)), ("tp=2,tensor=plain,recompute=full", (2, 12, 32)), ("cp=2", (2, 6, 32))],
)
def test_stages_pass_on_the_part_of_the_stream_that_a_rank_has(ranks, text, shape, tied):
    expected = ranks.run(train_split, 2, text, tied, False)
    for (loss, shapes, found), (whole, _, gradients) in zip(
        ranks.run(train_split, 2, text, tied, True), expected, strict=True
    ):
        assert shapes == [shape]
        torch.testing.assert_close(loss, whole)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def first_values(text):
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**SHAPE))
    (stage,) = take_stages(model, stages_of(model), {2: range(3, 6)})
    parallel = parallelize(model, text)
    with parallel.gathered():
        return {name: each.detach().clone() for name, each in stage.named_parameters()}


@pytest.mark.parametrize("text", ["dp=2", "dp=2,shard=zero3"])
def test_a_stage_of_a_meta_model_gets_the_values_of_the_whole_one(ranks, text):
    whole = dict(transformer().named_parameters())
    for values in ranks.run(first_values, 2, text):
        assert {name.split(".")[0] for name in values} == {"blocks", "norm", "head"}
        for name, value in values.items():
            torch.testing.assert_close(value, whole[name].detach(), rtol=0, atol=0)
