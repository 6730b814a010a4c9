"""Blocks of attention, joined by their log-sum-exps, are attention to all keys at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.parallel.context.ring_attention import (
    EfficientOnCuda,
    FlashOnCpu,
    FlashOnCuda,
    PlainProducts,
    kernel_for,
)


def operands(heads, kv_heads, queries, keys, dtype=torch.float32, device="cpu"):
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = [(2, heads, queries, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8), (2, heads, queries, 8)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


@settings(max_examples=40)
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    queries=st.integers(1, 20),
    keys=st.integers(1, 20),
    causal=st.booleans(),
    rows=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_cpu_kernel_and_plain_products_agree(heads, queries, keys, causal, rows, dtype):
    keys = queries if causal else keys
    *inputs, gradient = operands(*heads, queries, keys, dtype)
    plain, fused = PlainProducts(rows), FlashOnCpu()
    results = []
    for kernel in (plain, fused):
        output, logsumexp = kernel.forward(inputs, causal=causal)
        assert logsumexp.dtype == dtype
        gradients = kernel.backward(gradient, inputs, output, logsumexp, causal=causal)
        results.append((output, logsumexp, *gradients))
    for value, expected in zip(*results, strict=True):
        # sums of some tens of terms in fp32
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_plain_products_have_the_gradients_of_the_definition(causal):
    *inputs, gradient = operands(4, 2, 10, 10, torch.float64)
    query, key, value = (tensor.requires_grad_() for tensor in inputs)
    scores = query @ key.repeat_interleave(2, 1).mT / 8**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(10, 10, dtype=torch.bool).triu(1), -torch.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    expected.backward(gradient)
    with torch.no_grad():
        kernel = PlainProducts(rows=3)
        output, logsumexp = kernel.forward((query, key, value), causal=causal)
        gradients = kernel.backward(gradient, (query, key, value), output, logsumexp, causal=causal)
    torch.testing.assert_close(output, expected.detach())
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1).detach())
    for value, leaf in zip(gradients, inputs, strict=True):
        torch.testing.assert_close(value, leaf.grad)


@pytest.mark.parametrize("kernel", [FlashOnCpu(), PlainProducts(4)])
def test_a_block_has_its_part_of_the_gradients_with_the_output_and_logsumexp_of_all_keys(kernel):
    query, key, value, gradient = operands(4, 2, 6, 12)
    output, logsumexp = kernel.forward((query, key, value), causal=False)
    whole = kernel.backward(gradient, (query, key, value), output, logsumexp, causal=False)
    parts = [
        kernel.backward(gradient, (query, keys, values), output, logsumexp, causal=False)
        for keys, values in zip(key.chunk(3, 2), value.chunk(3, 2), strict=True)
    ]
    of_query, of_key, of_value = zip(*parts, strict=True)
    torch.testing.assert_close(sum(of_query), whole[0])
    torch.testing.assert_close(torch.cat(of_key, 2), whole[1])
    torch.testing.assert_close(torch.cat(of_value, 2), whole[2])


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(FlashOnCuda(), torch.bfloat16), (EfficientOnCuda(), torch.float32)]
)
@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_the_cuda_kernels_agree_with_plain_products(kernel, dtype, device):
    """On the meta device the shapes only, where there is no GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    *inputs, gradient = operands(4, 2, 40, 24, dtype, device)
    results = []
    for each in (kernel, PlainProducts()):
        output, logsumexp = each.forward(inputs, causal=False)
        gradients = each.backward(gradient, inputs, output, logsumexp, causal=False)
        results.append((output, logsumexp, *gradients))
    for value, expected in zip(*results, strict=True):
        if device == "meta":
            assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
        else:
            # rounding of the inputs' dtype, over sums of tens of terms
            torch.testing.assert_close(value, expected, rtol=5e-2, atol=5e-2)


def test_a_device_without_a_kernel_gets_plain_products():
    query, key, value, _ = operands(2, 1, 4, 4, device="meta")
    assert isinstance(kernel_for((query, key, value), causal=True), PlainProducts)
    query, key, value, _ = operands(2, 1, 4, 4)
    assert isinstance(kernel_for((query, key, value), causal=True), FlashOnCpu)
