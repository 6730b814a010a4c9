"""Layouts that people write for models of their own: they train as one device does, or are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.errors import PlanError
from shoal.parallel import Split, TensorLayout, parallelize, require_layout
from shoal.spec.plan import Plan

HEADS, HEAD_DIM, WIDTH, SEQ = 4, 3, 12, 5


class Fused(nn.Module):
    """Attention whose query, key and value are one product, in one of the two orders that models have."""

    def __init__(self, by_part):
        super().__init__()
        self.by_part = by_part
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        mixed = self.mixed(hidden)
        if self.by_part:  # as in GPT-NeoX: a head's query, key and value follow one another
            query, key, value = mixed.unflatten(-1, (-1, 3, HEAD_DIM)).transpose(1, 2).unbind(-2)
        else:
            parts = mixed.chunk(3, -1)
            query, key, value = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value)
        return hidden + self.output(attended.transpose(1, 2).flatten(2))


class Doubled(nn.Module):
    """A feed-forward layer whose gate and other half are one product."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * 16), nn.Linear(16, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(F.glu(self.up(hidden)))


class Nested(nn.Module):
    """Layers that are not children of the module whose input they read."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"up": nn.Linear(WIDTH, 16), "down": nn.Linear(16, WIDTH)})

    def forward(self, hidden):
        return hidden + self.inner["down"](F.gelu(self.inner["up"](hidden)))


class Scaled(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


class Language(nn.Module):
    """An embedding and a head, with what is changed about them."""

    def __init__(self, padding=None, bias=False):
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH, padding_idx=padding)
        self.head = nn.Linear(WIDTH, 8, bias=bias)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


MODELS = {
    "by part": lambda: nn.Sequential(Fused(by_part=True), Fused(by_part=True)),
    "nested": lambda: nn.Sequential(Nested(), Nested()),
    "itself": Nested,
}
LAYOUTS = {
    "by part": TensorLayout(
        {"[01]": Split({"mixed": HEADS}, {"output": HEADS}, by_part=("mixed",))}, embedding=None, head=None
    ),
    "nested": TensorLayout({"?": Split({"inner.up": 16}, {"inner.down": 16})}, embedding=None, head=None),
    "itself": TensorLayout({"": Split({"inner.up": 16}, {"inner.down": 16})}, embedding=None, head=None),
}


def train(kind, plan):
    """Outputs of three steps of SGD, and the whole model after them on rank 0."""
    torch.manual_seed(0)
    parallel = parallelize(MODELS[kind](), plan, layout=LAYOUTS[kind])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    outputs = []
    for _ in range(3):
        hidden = torch.randn(2, SEQ, WIDTH)
        result = parallel(hidden)
        F.mse_loss(result, hidden.flip(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(result.detach())
    return outputs, parallel.full_state_dict()


@pytest.mark.parametrize("kind", MODELS)
def test_layers_in_any_place_and_fused_by_part_train_as_on_one_device(ranks, kind):
    (outputs, state), _ = ranks.run(train, 2, kind, "tp=2,tensor=plain")
    expected, whole = ranks.run(train, 1, kind, "tp=1")[0]
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(state, whole)


def refusal(model, layout):
    with pytest.raises(PlanError) as caught:
        require_layout(model, Plan.parse("tp=2,tensor=plain"), SEQ, layout)
    return str(caught.value)


def without_vocabulary(pattern, split):
    return TensorLayout({pattern: split}, embedding=None, head=None)


@pytest.mark.parametrize(
    ("model", "split", "parts"),
    [
        (Fused(by_part=False), Split({"mixed": HEADS}, {"output": HEADS}), "has 4 parts of 9"),
        (Fused(by_part=False), Split({"mixed": 3 * HEADS}, {"output": HEADS}), "has 12 parts of 3"),
        (Doubled(), Split({"up": 16}, {"down": 16}), "has 16 parts of 2"),
        (Doubled(), Split({"up": 32}, {"down": 16}), "has 32 parts of 1"),
    ],
)
def test_a_fused_layer_that_would_be_cut_across_is_refused(model, split, parts):
    message = refusal(model, without_vocabulary("", split))
    assert parts in message
    assert "fused" in message
    assert "by_part=('" in message


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            without_vocabulary("*", Split({"inner.upp": 16}, {})),
            "no such layer (did you mean 'inner.up'?)\n  possible: inner.up, inner.down",
        ),
        (without_vocabulary("", Split({"inner": 16}, {})), "inner, which is a ModuleDict"),
        (without_vocabulary("iner", Split({}, {})), "(did you mean 'inner'?)"),
        (without_vocabulary("", Split({"inner.up": 5}, {})), "5 parts, and it is 16 wide"),
        (
            without_vocabulary("", Split({"inner.up": 16}, {"inner.down": 16}, by_part=("up",))),
            "`by_part` names up",
        ),
    ],
)
def test_a_name_that_fits_nothing_is_told_with_those_that_do(layout, words):
    assert words in refusal(Nested(), layout)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Scaled(WIDTH, 16), "which is a Scaled"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 16)), "computed from other parameters"),
    ],
)
def test_a_layer_that_does_more_than_multiply_is_refused(layer, words):
    model = Nested()
    model.inner["up"] = layer
    assert words in refusal(model, LAYOUTS["itself"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Language(padding=0), "embed by the vocabulary, and it has padding_idx=0"),
        (Language(bias=True), "head by the vocabulary, and it has a bias"),
    ],
)
def test_a_vocabulary_that_does_more_than_look_up_and_multiply_is_refused(model, words):
    assert words in refusal(model, TensorLayout())


def test_a_star_stands_for_dots_too():
    model, split = nn.ModuleDict({"text": nn.Sequential(Nested())}), LAYOUTS["itself"].splits[""]
    require_layout(model, Plan.parse("tp=2,tensor=plain"), SEQ, without_vocabulary("*0", split))
