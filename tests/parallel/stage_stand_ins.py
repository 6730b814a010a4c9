"""Models cut into stages and trained stage by stage in one process, beside the whole."""

import torch
from torch import nn

from shoal.models import next_token_loss
from shoal.parallel.pipeline.stage_layout import StageLayout, stages_of
from shoal.parallel.pipeline.stages import take_stages
from shoal.spec.plan.stages import ranges_of

TOKENS = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(1))
ONE_EACH = [[0], [1], [2], [3]]
LOOPED = [[0, 2], [1, 3]]
V_SHAPED = [[0, 3], [1, 2]]


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
