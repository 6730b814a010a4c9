"""Models that were compiled before they are laid over ranks have the names and the training of plain ones."""

import pytest
import torch
from parallel_stand_ins import one_step, tokens, transformer

from shoal.errors import ModelError
from shoal.parallel import parallelize


def compile_call(model):
    model.compile(backend="eager")
    return model


def compile_block(model):
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    model.blocks[2].compile(backend="eager")
    return model


COMPILED = {
    "wrapped": lambda model: torch.compile(model, backend="eager"),
    "in place": compile_call,
    "blocks": compile_block,
}


def train(plan, how):
    model = transformer()
    if how is not None:
        model = COMPILED[how](model)
        with pytest.warns(UserWarning, match="compile=blocks"):
            parallel = parallelize(model, plan)
    else:
        parallel = parallelize(model, plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    for step in range(2):
        one_step(parallel, tokens(step))
        optimizer.step()
        optimizer.zero_grad()
    return (
        [name for name, _ in parallel.named_parameters()],
        list(parallel.state_dict()),
        parallel.full_state_dict(),
    )


@pytest.mark.parametrize("how", COMPILED)
@pytest.mark.parametrize("plan", ["dp=2", "dp=2,shard=zero3"])
def test_a_compiled_model_trains_under_the_names_of_the_plain_one(ranks, plan, how):
    names, keys, state = train("", None)
    for found, found_keys, _ in (results := ranks.run(train, 2, plan, how)):
        assert (found, found_keys) == (names, keys)
    assert list(results[0][2]) == list(state)
    torch.testing.assert_close(results[0][2], state, rtol=1e-4, atol=1e-5)  # fp32 sums in another order


def test_states_of_compiled_models_are_loaded():
    other = transformer()
    other.initialize(5)
    state = torch.compile(other, backend="eager").state_dict()
    parallel = parallelize(transformer(), "")
    assert "_orig_mod.embed.weight" in state
    parallel.load_state_dict(state)
    torch.testing.assert_close(dict(parallel.state_dict()), dict(other.state_dict()), rtol=0, atol=0)
    parallel.load_state_dict(transformer().state_dict())
    parallel.load_full_state_dict(state)
    torch.testing.assert_close(dict(parallel.state_dict()), dict(other.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_that_fp32_would_not_hold_are_refused(trained, dtype):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].requires_grad_(trained).to(dtype)
    with pytest.raises(ModelError, match=rf"1.weight is {dtype}"):
        parallelize(model, "")
