"""A second derivative through a Function that has none raises, also where torch is silent."""

import pytest
import torch
from torch.autograd.function import once_differentiable as of_torch

from shoal.errors import ModelError
from shoal.models.once_differentiable import once_differentiable


def product(decorated):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs, weight):
            ctx.save_for_backward(inputs, weight)
            return inputs @ weight

        @staticmethod
        @decorated
        def backward(ctx, gradient):
            inputs, weight = ctx.saved_tensors
            return gradient @ weight.t(), inputs.t() @ gradient

    return Product.apply


def penalty(multiply):
    """The gradient of a gradient penalty with respect to the last weight."""
    torch.manual_seed(0)
    inputs, first, last = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    output = multiply(torch.tanh(inputs @ first), last)
    (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), last, allow_unused=True)[0]


def test_a_second_derivative_that_torch_leaves_out_is_an_error():
    assert penalty(torch.matmul).abs().max() > 0.1
    assert penalty(product(of_torch)) is None  # a part of the derivative is lost in silence
    with pytest.raises(ModelError, match="Product has no second derivative"):
        penalty(product(once_differentiable))


def test_first_derivatives_are_those_of_the_product():
    inputs, weight = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(product(once_differentiable), (inputs, weight))
