"""The products of rows with experts' weights: grouped ones against a loop, and against torch's gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.expert_products import GroupedProducts, LoopedProducts, _can_group


def products_of_runs(dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Counts, rows, two weights, and gradients of what these make of the rows."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    weights = [random(4, 24, 8), random(4, 16, 8)]
    return torch.tensor([5, 0, 9, 2]), random(16, 8), weights, [random(16, 24), random(16, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_equals_the_loop(dtype: torch.dtype) -> None:
    counts, rows, weights, gradients = products_of_runs(dtype)
    results = []
    with torch.no_grad():
        for products in (GroupedProducts(counts), LoopedProducts(counts)):
            outputs = [products.results(rows, weight) for weight in weights]
            of_rows = products.rows_gradient(gradients, weights)
            of_weights = [products.weight_gradient(gradient, rows) for gradient in gradients]
            results.append((*outputs, of_rows, *of_weights))
    for grouped, looped in zip(*results, strict=True):
        # bf16 keeps 8 bits; both sum in fp32.
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(grouped, looped, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_s_gradients_are_those_of_torch(dtype: torch.dtype) -> None:
    counts, rows, weights, gradients = products_of_runs(dtype)
    outputs = [F.grouped_mm(rows, weight.mT, offs=counts.cumsum(0).int()) for weight in weights]
    of_rows, *of_weights = torch.autograd.grad(outputs, [rows, *weights], gradients)
    products = GroupedProducts(counts)
    with torch.no_grad():
        assert torch.equal(products.rows_gradient(gradients, weights), of_rows)
        for gradient, expected in zip(gradients, of_weights, strict=True):
            assert torch.equal(products.weight_gradient(gradient, rows), expected)


def test_on_a_cpu_experts_are_a_loop() -> None:
    assert not _can_group(torch.ones(1, 8).bfloat16(), torch.ones(1, 8, 8).bfloat16())
