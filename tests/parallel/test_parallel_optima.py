"""Least squares and logistic regression, whose optimum is known: each method gets as near as its theory says.

A loss has curvatures from mu to L on each worker. With error feedback, a codec that contracts by delta, and
workers whose gradients are all zero at the optimum x*, let z = x - rate mean(e) and

    Psi = |z - x*|^2 + a rate^2 mean |e|^2,    a = 12 L rate / delta

While rate <= min(1 / (4 L), delta / (10 L sqrt(1 - delta))), Psi' <= (1 - min(rate mu / 2, delta / 4)) Psi.
It follows from two bounds (Stich and Karimireddy, arXiv:1909.05350):

    |z' - x*|^2 <= (1 - rate mu / 2) |z - x*|^2 - rate / 2 (f - f*) + 3 L rate |x - z|^2
    |e'|^2 <= (1 - delta / 2) |e|^2 + 2 (1 - delta) / delta |g|^2, and mean |g|^2 <= 2 L (f - f*)
"""

import functools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.parallel import LocalUpdates, Outer, parallelize
from shoal.parallel.exchange.stability import contraction, measured_contraction
from shoal.spec.plan import Compression

SIDE = 8  # of a matrix of unknowns
UNKNOWNS = SIDE * SIDE
LEAST, MOST = 1.0, 2.0  # curvatures of each worker


class Unknowns(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.weight = nn.Parameter(first.clone())

    def forward(self, loss, worker, step):
        return loss(self.weight, worker, step)


def descend(plan, loss, first, steps, rate, outer=None):
    """Descend; return the unknowns after each step, and the least share that this rank's codec kept."""
    model = Unknowns(first)
    parallel = parallelize(model, plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=rate)
    if outer is not None:
        optimizer = LocalUpdates(parallel, optimizer, outer=Outer(*outer))
    size, rank = dist.get_world_size(), dist.get_rank()
    reached, shares = [], [1.0]
    for step in range(steps):
        weight = model.weight.detach().clone().requires_grad_()
        (own,) = torch.autograd.grad(loss(weight, rank, step), weight)
        before = memory(parallel)
        parallel(loss, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        left = memory(parallel)
        if left is not None:
            given = own.flatten() / size + (0.0 if before is None else before)
            shares.append(measured_contraction(given, left))
        reached.append(model.weight.detach().double().flatten().numpy())
    return np.stack(reached), min(shares)


def memory(parallel):
    """What this rank left out of the exchange of the unknowns."""
    (reduction,) = [strategy._reduction for strategy in parallel.strategies]
    (held,) = [each.exchange for each in reduction._sums]
    left = None if held.sum is None else held.sum.memories[0][1].left
    return None if left is None else left[: sum(each.numel() for each in parallel.parameters())].clone()


@functools.cache
def data_of(worker):
    """The matrix of a worker's least squares, and two vectors."""
    chance = torch.Generator().manual_seed(worker)
    one, other = (torch.linalg.qr(torch.randn(UNKNOWNS, UNKNOWNS, generator=chance)).Q for _ in range(2))
    roots = torch.linspace(math.sqrt(LEAST), math.sqrt(MOST), UNKNOWNS)
    return one @ torch.diag(roots) @ other, torch.randn(UNKNOWNS, generator=chance)


FIRST, OPTIMUM = torch.zeros(SIDE, SIDE), torch.randn(UNKNOWNS, generator=torch.Generator().manual_seed(9))


def alike(weight, worker, step):
    """Least squares with one optimum for all workers."""
    return (data_of(worker)[0] @ (weight.flatten() - OPTIMUM)).square().sum() / 2


def unlike(weight, worker, step):
    """Least squares whose workers have optima of their own."""
    matrix, own = data_of(worker)
    return (matrix @ (weight.flatten() - own)).square().sum() / 2


def logistic(weight, worker, step):
    """Logistic regression with curvatures above 1/2, on the same samples for all workers."""
    inputs = data_of(0)[0]
    targets = (torch.arange(UNKNOWNS) % 3 == 0).float()
    scores = 2 * inputs @ weight.flatten()
    loss = nn.functional.binary_cross_entropy_with_logits(scores, targets, reduction="sum")
    return loss + weight.square().sum() / 4


def newton(loss):
    """The optimum, in fp64, of a loss that all workers have."""
    point = torch.zeros(UNKNOWNS, dtype=torch.float64, requires_grad=True)

    def own(weight):
        return loss(weight.to(torch.float32), 0, 0)

    for _ in range(8):
        slope = torch.autograd.functional.jacobian(own, point)
        bend = torch.autograd.functional.hessian(own, point)
        point = (point - torch.linalg.solve(bend, slope)).detach()
    return point.numpy()


# What is assumed of codecs whose guarantee is for the worst vector: the run must keep it.
ASSUMED = {"sign": 0.05, "topk:4:2bit": 0.3, "threshold:1": 0.3, "powersgd:2": 0.1}
KINDS = ["int8", "int4", "fp8", "sign", "topk:4", "topk:4:2bit", "random:4", "threshold:1"]


@pytest.mark.parametrize(
    ("text", "loss"),
    [*((text, alike) for text in KINDS), *((text, logistic) for text in ("sign", "topk:4", "powersgd:2"))],
)
def test_with_feedback_the_optimum_is_reached_at_the_linear_rate_of_theory(ranks, text, loss):
    delta = ASSUMED.get(text) or contraction(Compression.parse(text), UNKNOWNS)
    least, most = (LEAST, MOST) if loss is alike else (0.5, MOST + 0.5)
    optimum = OPTIMUM.double().numpy() if loss is alike else newton(logistic)
    rate, steps = min(1 / 4, delta / (10 * math.sqrt(1 - delta))) / most, 200
    results = ranks.run(descend, 2, f"dp=2,compress={text}", loss, FIRST, steps, rate)
    reached, _ = results[0]
    if text in ASSUMED:
        assert min(share for _, share in results) >= delta
    squares = np.square(reached - optimum).sum(1)
    first = np.square(optimum).sum()
    bound = (1 - min(rate * least / 2, delta / 4)) ** np.arange(1, steps + 1) * first
    slack = 2 * max(1.0, delta / (12 * most * rate))  # from Psi back to x = z + rate mean(e)
    assert (squares <= slack * bound + 1e-10 * first).all()  # roundings of fp32
    assert squares[-1] < 2 * math.exp(-1.5 * rate * least * steps) * first + 1e-10 * first


@pytest.mark.parametrize("text", ["int8", "int4", "fp8"])
def test_rounding_without_feedback_stays_above_the_optimum_by_its_variance(ranks, text):
    """Workers' gradients g_i are not zero at the optimum: E |x - x*|^2 <= rate 2 w sum |g_i|^2 / (mu d^2).

    So it ends for d workers, a variance of w |g|^2 a payload, and rate <= 1 / (L (1 + 2 w / d)), from the
    expansion of |x - rate g - x*|^2 with E g = f'(x). The mean of the last steps is well below the bound,
    as curvatures are above mu, and the worst case of w is not met; without compression nothing is left.
    """
    variance, rate, steps = 1 - contraction(Compression.parse(text), UNKNOWNS), 0.2, 150
    matrices, owns = zip(*(data_of(worker) for worker in range(2)), strict=True)
    bends = [(each.T @ each).double() for each in matrices]
    pulls = [bend @ own.double() for bend, own in zip(bends, owns, strict=True)]
    optimum = torch.linalg.solve(sum(bends), sum(pulls))
    squares = sum(
        (bend @ optimum - pull).square().sum().item() for bend, pull in zip(bends, pulls, strict=True)
    )
    floor = rate * 2 * variance * squares / (LEAST * 4)
    whole, rounded = (
        ranks.run(descend, 2, plan, unlike, FIRST, steps, rate)[0][0] - optimum.numpy()
        for plan in ("dp=2", f"dp=2,compress={text},feedback=0")
    )
    reached = np.square(rounded[50:]).sum(1).mean()
    assert np.square(whole[-1]).sum() < 1e-8
    assert floor / 100 < reached < floor


TRIPLES = torch.tensor([[-3.0, 2.0, 2.0], [2.0, -3.0, 2.0], [2.0, 2.0, -3.0]])


def triple(weight, worker, step):
    return (TRIPLES[worker] @ weight) ** 2 + weight.square().sum() / 4


def test_the_largest_elements_alone_lead_away_from_the_optimum(ranks):
    """Three workers, each of which sends one element of three (Beznosikov et al., arXiv:2002.12410).

    From x = c (1, 1, 1) each gradient is c / 2 (-11, 9, 9) in some order, so that x' = (1 + 11 rate / 6) x.
    Workers send the sixteenth part of a parameter's place in the bucket, which is 16 elements.
    """
    rate, steps, first = 0.01, 300, torch.ones(3)
    without, with_feedback = (
        ranks.run(descend, 3, f"dp=3,compress=topk:16{rest}", triple, first, steps, rate)[0][0]
        for rest in (",feedback=0", "")
    )
    expected = (1 + 11 * rate / 6) ** np.arange(1, steps + 1)
    np.testing.assert_allclose(without, expected[:, None] * np.ones(3), rtol=1e-4)  # 300 roundings of fp32
    assert np.abs(with_feedback[-1]).max() < 0.05
    assert np.abs(with_feedback[-1]).max() < 0.3 * np.abs(with_feedback[steps // 2]).max()


ONES, TURNS = torch.ones(16) / 4, torch.tensor([1.0, -1.0] * 8) / 4


def turning(weight, worker, step):
    """One of two samples of least squares, as a coin falls; both have one optimum, 0."""
    coin = torch.randint(2, (), generator=torch.Generator().manual_seed(step)).item()
    return ((ONES / 2 + (TURNS if coin else -TURNS)) @ weight) ** 2


def test_signs_alone_never_reach_the_optimum(ranks):
    """All gradients have the signs of one direction: Karimireddy et al., arXiv:1901.09847, counterexample 3.

    Of the two directions in which there is a loss, the sum of all elements never changes without feedback.
    """
    without, with_feedback = (
        ranks.run(descend, 2, f"dp=2,compress=sign{rest}", turning, ONES + TURNS, 300, 0.05)[0][0]
        for rest in (",feedback=0", "")
    )
    np.testing.assert_allclose(without @ ONES.numpy(), 1.0, atol=1e-5)
    assert np.abs(with_feedback[-1] @ ONES.numpy()) < 0.05
    assert np.abs(with_feedback[-1] @ TURNS.numpy()) < 0.05


def test_local_updates_end_where_their_closed_form_says(ranks):
    """Workers with unlike data: x' = mean_i(x_i + M_i^every (x - x_i)), with M_i = I - rate H_i.

    Its fixed point is the optimum for every=1 alone, and gets further from it as `every` grows. The outer
    rate and momentum do not change it.
    """
    rate, rounds, away = 0.1, 25, []
    matrices, owns = zip(*(data_of(worker) for worker in range(2)), strict=True)
    bends, owns = [(each.T @ each).double() for each in matrices], [own.double() for own in owns]
    pulls = [bend @ own for bend, own in zip(bends, owns, strict=True)]
    optimum = torch.linalg.solve(sum(bends), sum(pulls)).numpy()
    unit = torch.eye(UNKNOWNS, dtype=torch.float64)
    for every, outer in ((1, (1.0, 0.0)), (4, (0.8, 0.3)), (16, (1.0, 0.0))):
        powers = [torch.linalg.matrix_power(unit - rate * bend, every) for bend in bends]
        fixed = torch.linalg.solve(
            sum(unit - power for power in powers),
            sum((unit - power) @ own for power, own in zip(powers, owns, strict=True)),
        )
        steps = every * max(rounds, 160 // every)
        plan = f"dp=2,exchange=local,every={every}"
        reached = ranks.run(descend, 2, plan, unlike, FIRST, steps, rate, outer)[0][0][-1]
        # 160 steps leave 0.9^160, 5e-8; fp32 rounds
        np.testing.assert_allclose(reached, fixed.numpy(), rtol=0, atol=2e-5)
        away.append(np.linalg.norm(fixed.numpy() - optimum))
    assert away[0] < 1e-12
    assert away[0] < away[1] < away[2]
    assert away[1] > 0.01
