"""The bounds of theory hold in simulations, and some vector or gradient comes close to each of them."""

import math

import numpy as np
import pytest
import torch

from shoal.collectives import codec_of
from shoal.parallel.exchange.stability import (
    contraction,
    error_bound,
    measured_contraction,
    most_stable_step,
)
from shoal.spec.plan import Compression


@pytest.mark.parametrize("staleness", [0, 1, 2, 5, 16])
def test_late_gradients_are_stable_exactly_below_the_largest_step(staleness):
    """By the roots of z^(s + 1) - z^s + rate L, and by the recursion itself."""
    curvature = 3.0
    largest = most_stable_step(curvature, staleness)
    for factor, is_stable in ((0.99, True), (1.01, False)):
        rate = factor * largest
        polynomial = np.zeros(staleness + 2)
        polynomial[:2] = 1, -1
        polynomial[-1] += rate * curvature
        assert (abs(np.roots(polynomial)).max() < 1) == is_stable
        values = [1.0] * (staleness + 1)
        for _ in range(2000 * (staleness + 1)):
            values.append(values[-1] - rate * curvature * values[-1 - staleness])
        assert (max(map(abs, values[-4 * (staleness + 1) :])) < 1) == is_stable
    assert largest * (1 + staleness) >= math.pi / 2 / curvature


def test_infinite_staleness_has_no_stable_step():
    assert most_stable_step(1.0, math.inf) == 0


def kept(text, vector, seeds):
    """The mean share of a vector's squared norm that a codec keeps."""
    codec, shares = codec_of(Compression.parse(text)), []
    for seed in range(seeds):
        left = torch.empty_like(vector)
        payload = torch.empty(codec.payload(len(vector)), dtype=torch.uint8)
        codec.encode(vector, payload, seed=seed, residual=left)
        shares.append(measured_contraction(vector, left))
    return sum(shares) / seeds


def worst(text, elements):
    """A vector of which a codec keeps the least, by its bound's derivation."""
    vector = torch.zeros(elements)
    match text.split(":")[0]:
        case "sign" | "random":
            vector[0] = 1.0
        case "topk":
            vector[:] = 1.0
        case "int8" | "int4":
            q, others = (127 if text == "int8" else 7), min(elements, 1024) - 1
            vector[:] = q / (q + math.sqrt(q * q + others))
            vector[::1024] = q
        case "fp8":
            vector[:] = 1 + 1 / 17
            vector[::1024] = 448 / 2**8  # a power of two: mantissas stay
    return vector


@pytest.mark.parametrize("text", ["sign", "topk:64", "topk:3", "random:8", "int8", "fp8"])
@pytest.mark.parametrize("elements", [600, 2048, 8192])
def test_the_worst_vector_keeps_what_is_guaranteed(text, elements):
    """Rounding at random: means over 400 seeds, of many elements, whose relative deviation is below 0.5 %."""
    guaranteed = contraction(Compression.parse(text), elements)
    found = kept(text, worst(text, elements), 1 if text[0] in "st" else 400)
    if text == "random:8":  # all or nothing in each draw: four deviations
        assert found == pytest.approx(guaranteed, abs=4 * math.sqrt(guaranteed / 400))
    else:
        assert 1 - found == pytest.approx(1 - guaranteed, rel=0.02, abs=1e-6)


def test_four_bits_guarantee_nothing_in_blocks_with_one_large_element():
    assert contraction(Compression.parse("int4"), 4096) == 0
    assert kept("int4", worst("int4", 1024), 20) == pytest.approx(
        1 - (math.sqrt(1 + 1023 / 49) - 1) / 2, rel=0.02
    )
    assert contraction(Compression.parse("int4"), 64) > 0.6


@pytest.mark.parametrize(
    "text", ["sign", "topk:64", "topk:16:2bit", "topk:1000:2bit", "random:8", "int8", "fp8"]
)
def test_no_vector_keeps_less_than_what_is_guaranteed(text):
    chance = torch.Generator().manual_seed(0)
    for elements in (5, 700, 4096, 5000):
        normal = torch.randn(elements, generator=chance)
        for vector in (normal, normal**5, normal.sign(), torch.exp(4 * normal), worst(text, elements)):
            # 100 seeds of `random`: four deviations of the share, which is between 0 and 1
            slack = 4 * math.sqrt(1 / 8 / 100) if text == "random:8" else 1e-3
            assert kept(text, vector, 100) > contraction(Compression.parse(text), elements) - slack


def test_the_share_that_sign_keeps_is_its_density():
    vector = torch.randn(3000, generator=torch.Generator().manual_seed(1)) ** 3
    blocks = vector.double().split(1024)
    left_over = sum(each.abs().sum() ** 2 / len(each) for each in blocks) / vector.double().square().sum()
    assert kept("sign", vector, 1) == pytest.approx(left_over.item(), rel=1e-6)


@pytest.mark.parametrize("delta", [1.0, 0.9, 0.3, 0.02])
@pytest.mark.parametrize("feedback", [1.0, 0.9, 0.5, 0.0])
def test_the_error_memory_stays_below_its_bound(delta, feedback):
    """A codec that shrinks every vector alike leaves out most; the bound is reached where delta is small."""
    rest, error, largest = math.sqrt(1 - delta), 0.0, 0.0
    for _ in range(2000):
        error = rest * (1.0 + feedback * error)
        largest = max(largest, error)
    bound = error_bound(delta, feedback)
    assert largest**2 <= bound * (1 + 1e-12)
    if delta <= 0.02:
        assert largest**2 > 0.97 * bound
    if feedback == 1:
        assert bound == pytest.approx(4 * (1 - delta) / delta**2)


def test_the_error_memory_of_topk_stays_below_its_bound():
    """Random gradients, and constant ones, of which the memory grows most."""
    compression = Compression.parse("topk:16")
    codec, elements = codec_of(compression), 4096
    delta = contraction(compression, elements)
    chance = torch.Generator().manual_seed(2)
    for is_constant in (True, False):
        for feedback in (1.0, 0.8):
            error, largest, highest = torch.zeros(elements), 0.0, 0.0
            payload = torch.empty(codec.payload(elements), dtype=torch.uint8)
            for _ in range(100):
                gradient = torch.ones(elements) if is_constant else torch.randn(elements, generator=chance)
                given = gradient + feedback * error
                codec.encode(given, payload, seed=0, residual=error)
                largest = max(largest, error.square().sum().item())
                highest = max(highest, gradient.square().sum().item())
            assert largest <= error_bound(delta, feedback) * highest
            if is_constant and feedback == 1:  # e / g is 0 to 15 in turn: the mean of its square is 77.5
                assert largest / highest == pytest.approx(15 * 31 / 6, rel=0.01)


def test_without_contraction_only_less_feedback_bounds_the_memory():
    assert error_bound(0.0, 1.0) == math.inf
    assert error_bound(0.0, 0.5) == 4.0
