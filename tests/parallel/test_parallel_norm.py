"""The norm of the gradient and its limit are a few operators, whatever the number of parameters."""

from types import SimpleNamespace

import pytest
import torch
from operator_stand_ins import Operators
from torch import nn

from shoal.parallel import parallelize
from shoal.parallel.optimizer.optimizers import limit_gradients
from shoal.train.optimizer import Lion


def with_gradients(layers, plan="dp=1"):
    torch.manual_seed(0)
    parallel = parallelize(nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers))), plan)
    parallel(torch.ones(2, 3)).square().sum().backward()
    return parallel


def test_a_step_of_more_parameters_runs_no_more_operators():
    names = {}
    for layers in (2, 20):
        parallel = with_gradients(layers)
        with Operators() as operators:
            norm = parallel.measure_gradient()
            limit_gradients(parallel.owned, norm.whole, 1e-3)
        names[layers] = operators.names
    assert names[2] == names[20]


@pytest.mark.parametrize("plan", ["dp=1", "dp=1,precision=bf16"])
def test_operators_on_lists_of_tensors_get_one_dtype(plan):
    """With several dtypes torch computes tensor by tensor on GPUs."""
    parallel = with_gradients(3, plan)
    optimizer = Lion(parallel.parameters())
    with Operators() as operators:
        norm = parallel.measure_gradient()
        limit_gradients(parallel.owned, norm.whole, 1e-3)
        optimizer.step()
    assert operators.dtypes
    assert operators.dtypes == [{torch.float32}] * len(operators.dtypes)


def test_gradients_are_scaled_down_to_the_limit_and_never_up():
    parallel = with_gradients(3)
    norm = parallel.measure_gradient().whole
    limit_gradients(parallel.owned, norm, 2 * float(norm))
    assert torch.equal(parallel.measure_gradient().whole, norm)
    limit_gradients(parallel.owned, norm, 0.5 * float(norm))
    # The factor and the products are rounded to fp32.
    torch.testing.assert_close(parallel.measure_gradient().whole, 0.5 * norm, rtol=1e-6, atol=0)


def test_gradients_of_several_dtypes_are_scaled_by_a_factor_in_their_own():
    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    owned = [SimpleNamespace(gradient=torch.ones(3, dtype=dtype)) for dtype in dtypes * 2]
    with Operators() as operators:
        limit_gradients(owned, torch.tensor(3.0, dtype=torch.float64), 1.0)
    assert operators.dtypes == [{dtype} for dtype in dtypes]
    third = torch.tensor(1 / 3, dtype=torch.float64)
    for each in owned:
        assert torch.equal(each.gradient, third.to(each.gradient.dtype).expand(3))
