"""What stands in a stage's model in place of other stages' parts gives what they would, or says why not."""

import pytest
import torch
from stage_stand_ins import LOOPED, ONE_EACH, TOKENS, TUPLES, V_SHAPED, Tuples, check, cut, train_stages
from torch import nn

from shoal.errors import ModelError
from shoal.parallel.pipeline.stage_layout import StageLayout
from shoal.parallel.pipeline.stages import take_stages

pytestmark = pytest.mark.usefixtures("one_thread")


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
    [
        (Named, "inner.layers.0 returns a dict"),
        (Fickle, "a tuple of 2 at first and returns a tuple of 4 now"),
    ],
)
def test_what_no_gap_could_give_is_refused(build, message):
    (stage,) = take_stages(build(), TUPLES, {0: range(2)})
    with pytest.raises(ModelError, match=message):
        [stage(TOKENS[:, :-1]) for _ in range(2)]


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
    with pytest.raises(ModelError, match="the forward reaches piece 0 of a model after pieces that"):
        train_stages(stages)
