"""A model that was cut into stages computes what the whole model does, whoever holds which stage."""

import gc
import weakref

import pytest
import torch
from torch import nn

from shoal.errors import ModelError, PlanError
from shoal.models import Transformer, TransformerConfig, logits_of, next_token_loss, set_auxiliary_scale
from shoal.models.dropout import token_keys
from shoal.parallel import parallelize
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.stage_layout import StageLayout, parameters_by_piece, stages_of, tied_names
from shoal.parallel.stages import take_stages
from shoal.plan.stages import ranges_of

SHAPE = {"vocab_size": 61, "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": 12}
TOKENS = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(1))
ONE_EACH = [[0], [1], [2], [3]]
LOOPED = [[0, 2], [1, 3]]
V_SHAPED = [[0, 3], [1, 2]]


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


def train_whole(model, loss_of=next_token_loss):
    loss = loss_of(model(TOKENS[:, :-1]), TOKENS[:, 1:])
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters()}


def train_stages(stages, inputs=TOKENS[:, :-1], loss_of=next_token_loss):
    """One forward and backward, stage by stage, as ranks would."""
    entering, leaving, hidden = [], [], None
    for before, stage in zip([stages[0], *stages], stages, strict=False):
        stage.learn(before.results)
        entering.append(hidden)
        leaving.append(stage(inputs, hidden))
        if not stage.is_last:
            hidden = leaving[-1].detach().requires_grad_()
    loss = loss_of(leaving.pop(), TOKENS[:, 1:])
    loss.backward()
    for received, output in zip(reversed(entering[1:]), reversed(leaving), strict=True):
        output.backward(received.grad)
    return loss.detach()


def cut(build, ranks, split, layout=None, prepare=lambda model: None):
    """The stages of all ranks in order, and the model of each rank."""
    stages, models = [], []
    for indices in ranks:
        model = build()
        pieces = ranges_of(split)
        layout_here = stages_of(model) if layout is None else layout
        stages += take_stages(model, layout_here, {index: pieces[index] for index in indices})
        prepare(model)
        models.append(model)
    return sorted(stages, key=lambda stage: stage.index), models


def check(build, ranks, split, layout=None, prepare=lambda model: None, **options):
    whole = build()
    expected_loss, expected = train_whole(whole, **options)
    stages, models = cut(build, ranks, split, layout, prepare)
    loss = train_stages(stages, **options)
    torch.testing.assert_close(loss, expected_loss)
    total = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            total[name] = total.get(name, 0) + parameter.grad
    assert total.keys() == expected.keys()
    for name, gradient in expected.items():
        # the same sums; only a tied parameter's two are added in another order
        torch.testing.assert_close(total[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
    return stages, models


@pytest.mark.parametrize("ranks", [ONE_EACH, LOOPED, V_SHAPED])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("split", [(2, 1, 1, 2), (1, 3, 1, 1)])
def test_a_transformer_trains_as_in_one_piece(ranks, tied, split):
    check(lambda: transformer(tie_embeddings=tied), ranks, split)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_blocks_may_be_recomputed(policy):
    def prepare(model):
        recompute_blocks([block for block in model.blocks if any(True for _ in block.parameters())], policy)

    check(lambda: transformer(dropout=0.1), V_SHAPED, (2, 1, 2, 1), prepare=prepare)


def test_blocks_may_be_recomputed_before_the_model_is_cut():
    def build():
        model = transformer()
        recompute_blocks(list(model.blocks), "full")
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


class Tuples(nn.Module):
    """Blocks give tuples, take the hidden state by name, and are asked for their kind."""

    class Block(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind
            self.layer = nn.Linear(16, 16)

        def forward(self, *, state, scale):
            return torch.tanh(self.layer(state)) * scale[self.kind], "cache"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(61, 16)
        self.places = nn.Embedding(12, 16)
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList(self.Block("even" if i % 2 == 0 else "odd") for i in range(5))
        self.out = nn.Linear(16, 61)

    def forward(self, tokens):
        state = self.words(tokens) * 2 + self.places(torch.arange(tokens.shape[1]))
        for index, block in enumerate(self.inner.layers[:]):
            scale = {"even": 1 + index, "odd": 2.0}
            state = block(state=state, scale=scale)[0]
        return self.out(state / 3)


TUPLES = StageLayout(("words", "places"), "inner.layers", ("out",))


def test_a_layout_says_how_a_model_of_ones_own_is_cut():
    # The division by 3 stands before the head, and is the last stage's affair.
    check(Tuples, V_SHAPED, (2, 1, 2, 2), TUPLES)
    check(Tuples, ONE_EACH, (1, 3, 1, 2), TUPLES)


class Shaped(Tuples):
    """The forward asks what blocks give for its shape, and unpacks it."""

    def forward(self, tokens):
        state = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for index, block in enumerate(self.inner.layers):
            assert state.shape == (*tokens.shape, 16)
            state, kind = block(state=state, scale={"even": 1 + index, "odd": 2.0})
            assert kind is not None
        return self.out(state)


@pytest.mark.parametrize("ranks", [ONE_EACH, LOOPED, V_SHAPED])
def test_a_gap_gives_as_many_as_the_block_would(ranks):
    check(Shaped, ranks, (2, 1, 2, 2), TUPLES)


def test_what_is_computed_behind_a_stage_is_not_run_there():
    calls = []

    class Counting(Tuples):
        def forward(self, tokens):
            output = super().forward(tokens)
            calls.append(output.shape)
            return output

    stages, _ = cut(Counting, ONE_EACH, (2, 1, 2, 2), TUPLES)
    train_stages(stages)
    assert calls == [(2, 12, 61)]


def test_what_goes_before_a_block_goes_before_it_in_every_stage():
    def halve(module, arguments, named):
        return arguments, named | {"state": named["state"] / 2}

    def build():
        model = Tuples()
        for block in model.inner.layers:
            block.register_forward_pre_hook(halve, with_kwargs=True)
        return model

    check(build, ONE_EACH, (2, 1, 2, 2), TUPLES)
    check(build, V_SHAPED, (1, 3, 1, 2), TUPLES)


class Named(Tuples):
    """Blocks give the hidden state by name."""

    def __init__(self):
        super().__init__()
        for block in self.inner.layers:
            block.register_forward_hook(lambda block, arguments, result: {"state": result[0]})


class Fickle(Tuples):
    """Blocks give more from the second forward on."""

    def __init__(self):
        super().__init__()
        self.forwards = 0
        for block in self.inner.layers:
            block.register_forward_hook(lambda block, arguments, result: result * self.forwards)

    def forward(self, tokens):
        self.forwards += 1
        return super().forward(tokens)


@pytest.mark.parametrize(
    ("build", "message"),
    [(Named, "inner.layers.0 gives a dict"), (Fickle, "gave a tuple of 2 at first, and now a tuple of 4")],
)
def test_what_no_gap_could_give_is_refused(build, message):
    (stage,) = take_stages(build(), TUPLES, {0: range(2)})
    with pytest.raises(ModelError, match=message):
        [stage(TOKENS[:, :-1]) for _ in range(2)]


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
        (StageLayout(("words", "places"), "inner.layers", ("norm", "out")), 3, "not come to all of stage 3"),
    ],
)
def test_a_layout_that_the_forward_does_not_follow_is_noticed(layout, index, message):
    stages, _ = cut(with_unused_norm, ONE_EACH, (2, 2, 2, 1), layout)
    stages[index].learn([0] * len(stages[index].results))
    with pytest.raises(ModelError, match=message):
        stages[index](TOKENS[:, :-1], torch.zeros(2, 12, 16) if index else None)


class Returning(Tuples):
    """The forward comes to a part of the embedding again at the end."""

    def __init__(self):
        super().__init__()
        del self.places
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens):
        state = self.norm(self.words(tokens))
        for block in self.inner.layers:
            state, _ = block(state=state, scale={"even": 1.0, "odd": 2.0})
        return self.out(self.norm(state))


def test_a_part_that_the_forward_comes_to_again_on_another_stage_is_refused():
    layout = StageLayout(("words", "norm"), "inner.layers", ("out",))
    stages, _ = cut(Returning, ONE_EACH, (2, 1, 2, 2), layout)
    with pytest.raises(ModelError, match="piece 0 of a model is come to behind others"):
        train_stages(stages)


def test_a_model_that_is_not_known_is_refused_with_what_is_possible():
    with pytest.raises(ModelError, match="nothing says how Linear"):
        stages_of(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="does not say its stages"):
        stages_of(hugging_face("opt", ffn_dim=48, word_embed_proj_dim=32))


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({0: range(7)}, "none of a model of 6 pieces"),
        ({0: range(3), 1: range(2, 4)}, "or are taken"),
        ({0: range(0)}, "none of a model"),
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
