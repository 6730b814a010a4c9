"""The products of rows with experts' weights: grouped ones against a loop, and against torch's gradients."""

import pytest
import torch
import torch.nn.functional as F
from operator_stand_ins import Waits
from torch import Tensor

from shoal.models import Mixture, TransformerConfig, grouped_matmul
from shoal.models.grouped_matmul import (
    GroupedProducts,
    LoopedProducts,
    NoProducts,
    Runs,
    _can_group,
    multiply_by_experts,
)


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
        for products in (GroupedProducts(counts), LoopedProducts(counts.tolist())):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_without_rows_has_no_gradient_where_the_kernel_leaves_its_sum_as_it_was(monkeypatch, dtype):
    """A stand-in for Blackwell, whose kernel does not write the sum over no rows."""
    counts, rows, _, gradients = products_of_runs(dtype)
    kernel = F.grouped_mm

    def leaves_garbage(left, right, *, offs):
        result = kernel(left, right, offs=offs)
        if result.dim() == 3:
            result[1] = torch.nan
        return result

    monkeypatch.setattr(F, "grouped_mm", leaves_garbage)
    monkeypatch.setattr(grouped_matmul, "_skips_empty_sums", lambda device: True)
    with torch.no_grad(), Waits() as waits:
        found = GroupedProducts(counts).weight_gradient(gradients[0], rows)
    assert waits.names == []
    expected = LoopedProducts(counts.tolist()).weight_gradient(gradients[0].detach(), rows.detach())
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert not bool(found[1].any())


@pytest.mark.parametrize(("major", "skips"), [(9, False), (10, True), (12, True)])
def test_blackwell_and_later_devices_skip_empty_sums(monkeypatch, major, skips):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert grouped_matmul._skips_empty_sums(torch.device("cuda")) == skips
    assert not grouped_matmul._skips_empty_sums(torch.device("cpu"))


@pytest.mark.parametrize("can_group", [True, False])
def test_without_any_rows_no_kernel_runs_and_all_gradients_are_zeros(monkeypatch, can_group):
    monkeypatch.setattr(grouped_matmul, "_can_group", lambda rows, weight: can_group)
    monkeypatch.setattr(F, "grouped_mm", None)
    rows = torch.empty(0, 8, requires_grad=True)
    weights = [torch.ones(4, 24, 8, requires_grad=True), torch.ones(4, 16, 8, requires_grad=True)]
    runs = Runs(torch.zeros(4, dtype=torch.int64))
    assert isinstance(grouped_matmul.expert_products(rows, runs, weights), NoProducts)
    with Waits() as waits:
        results = multiply_by_experts(rows, runs, weights)
        sum(result.sum() for result in results).backward()
    assert waits.names == []
    assert [result.shape for result in results] == [(0, 24), (0, 16)]
    assert rows.grad.shape == rows.shape
    for weight in weights:
        assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_a_layer_waits_for_its_device_once_to_loop_over_experts(capacity):
    shape = {"vocab_size": 7, "layers": 1, "hidden": 8, "heads": 2, "kv_heads": 2, "ffn": 8, "seq": 6}
    mixture = Mixture(TransformerConfig(**shape, experts=4, capacity=capacity))
    torch.nn.init.normal_(mixture.router.weight)
    hidden = torch.randn(2, 6, 8, requires_grad=True)
    with Waits() as waits:
        mixture(hidden).sum().backward()
    assert waits.names == ["tolist"]
