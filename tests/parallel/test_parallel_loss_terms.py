"""Terms of a loss that read weights themselves, under tp: the gradient of one device, or a refusal."""

from functools import partial

import pytest
import torch
from parallel_stand_ins import tokens, transformer

from shoal.errors import LayoutError, WorkerError
from shoal.models import next_token_loss
from shoal.parallel import parallelize
from shoal.spec.plan import Plan


def gradients(plan, terms, owned=False):
    """Gradients of a loss and a penalty on weights; by name, whole. If it is refused, what is said."""
    parallel = parallelize(transformer(), plan)
    weights = dict((parallel if owned else parallel.module).named_parameters())
    batch = parallel.local(tokens())
    logits = parallel(batch[:, :-1])
    loss = next_token_loss(logits, batch[:, 1:])
    squares = [terms(weight, logits) for weight in weights.values()]
    penalty = sum(each.full_tensor() if hasattr(each, "full_tensor") else each for each in squares)
    try:
        (loss + 0.1 * penalty).backward()
    except LayoutError as refusal:
        return str(refusal)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.copy_(parameter.grad)
    return parallel.full_state_dict()


def square(weight, logits):
    return weight.square().sum()


def distance(weight, logits):
    return torch.cat([weight.flatten(), torch.zeros(1)]).sub(1.0).norm()


def of_activations(weight, logits):
    return logits.square().mean()


def require_equal(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.parametrize(
    "plan", ["tp=2", "tp=4,tensor=plain", "dp=2,tp=2,shard=zero1", "tp=2,precision=bf16"]
)
@pytest.mark.parametrize("terms", [square, distance])
def test_a_term_of_weights_whose_gradients_are_summed_is_refused(ranks, plan, terms):
    size = Plan.parse(plan).ranks
    for text in ranks.run(gradients, size, plan, terms):
        assert "the loss has a term that reads " in text


@pytest.mark.parametrize("plan", ["tp=2", "tp=4,tensor=plain", "dp=2,tp=2,shard=zero1"])
def test_a_term_of_owned_parameters_keeps_its_factor(ranks, plan):
    found = ranks.run(gradients, Plan.parse(plan).ranks, plan, square, True)[0]
    require_equal(found, gradients("dp=1", square))


@pytest.mark.parametrize(("plan", "terms"), [("tp=2,tensor=plain", square), ("tp=2", of_activations)])
def test_other_terms_keep_their_factor(ranks, plan, terms):
    require_equal(ranks.run(gradients, 2, plan, terms)[0], gradients("dp=1", terms))


def in_pipeline(plan, loss):
    """The norm of the gradient of a loss."""
    parallel = parallelize(transformer(), plan)
    batch = parallel.local(tokens())
    if parallel.plan.pp == 1:
        loss(parallel, parallel(batch[:, :-1]), batch[:, 1:]).backward()
    else:
        pairs = [(each[:, :-1], each[:, 1:]) for each in batch.chunk(2)]
        parallel.forward_backward(iter(pairs), len(pairs), partial(loss, parallel))
    return parallel.gradient_norm()


def with_weights(parallel, logits, targets):
    squares = [each.square().sum() for each in parallel.module.parameters()]
    return next_token_loss(logits, targets) + 0.1 * sum(squares)


def with_owned(parallel, logits, targets):
    squares = [each.square().sum() for each in parallel.parameters()]
    return next_token_loss(logits, targets) + 0.1 * sum(squares)


def with_activations(parallel, logits, targets):
    return next_token_loss(logits, targets) + 0.1 * logits.square().mean()


def with_factor(parallel, logits, targets):
    return next_token_loss(logits * parallel.module.norm.weight.exp().mean(), targets)


@pytest.mark.parametrize(
    ("plan", "loss"),
    [
        ("pp=2", with_weights),
        ("pp=2,tp=2", with_owned),
        ("pp=2,schedule=zb-h1,precision=bf16", with_owned),
    ],
)
def test_a_term_of_weights_is_refused_in_a_pipeline(ranks, plan, loss):
    with pytest.raises(WorkerError, match=r"a term that reads \S+ itself.* the last stage computes the loss"):
        ranks.run(in_pipeline, Plan.parse(plan).ranks, plan, loss)


def test_a_term_of_outputs_keeps_its_factor_in_a_pipeline(ranks):
    found = ranks.run(in_pipeline, 2, "pp=2", with_activations)
    assert found == pytest.approx(
        [in_pipeline("dp=1", with_activations)] * 2, rel=1e-5
    )  # sums in another order
