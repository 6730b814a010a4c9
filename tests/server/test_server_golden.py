"""Workers that take turns: each gradient is of values that all the other workers have updated since.

So descent on a quadratic has a closed recursion: x' = x - rate / (1 + s) curvature (x_s - target), with x_s
the values s updates ago.
"""

import numpy as np
import pytest
import torch
from reference_codecs import sent
from server_stand_ins import train
from torch import nn
from turns import Turns

from shoal.parallel.exchange.server import Terms
from shoal.parallel.exchange.stability import most_stable_step

ELEMENTS = 3000
CURVATURE = torch.exp2(4 * torch.rand(ELEMENTS, generator=torch.Generator().manual_seed(1)) - 2)
CURVATURE[0] = 4.0  # the largest
TARGET = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(2)) ** 3


class Spring(nn.Module):
    """Values that are pulled to a target, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self) -> torch.Tensor:
        return (CURVATURE * (self.weight - TARGET) ** 2).sum() / 2


def in_turn(workers, updates, rate, compress="none"):
    """The values after updates by workers that join, and then push, in the order of their numbers."""
    turns = Turns(workers, updates // workers)
    trained = train(
        Terms(workers=workers, shares=updates, staleness=10 * updates),
        workers=workers,
        make=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        compress=compress,
        model=Spring,
        loss=lambda model, share: model(),
        change=turns.guide,
    )
    assert not trained.errors
    assert [each["staleness"] for each in trained.applied] == [min(at, workers - 1) for at in range(updates)]
    return trained.values[0].numpy()


def recursion(staleness, updates, rate):
    """All values, in fp64."""
    curvature, target = CURVATURE.double().numpy(), TARGET.double().numpy()
    values = [np.zeros(ELEMENTS)]
    for at in range(updates):
        late = min(at, staleness)
        values.append(values[-1] - rate / (1 + late) * curvature * (values[-1 - late] - target))
    return values


@pytest.mark.parametrize("workers", [1, 3, 4])
@pytest.mark.parametrize(("factor", "is_stable"), [(0.96, True), (1.04, False)])
def test_late_gradients_converge_exactly_below_the_largest_stable_step(workers, factor, is_stable):
    """Servers divide a step by 1 + s, so the learning rate may be that much larger."""
    staleness, updates = workers - 1, 150 * workers
    rate = factor * workers * most_stable_step(4.0, staleness)
    values = in_turn(workers, updates, rate)
    expected = recursion(staleness, updates, rate)[-1]
    # Roundings of 2^-24 grow as the values do.
    np.testing.assert_allclose(values, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())
    far = np.abs(values - TARGET.numpy())
    assert (far[0] < 0.1 * abs(TARGET[0])) if is_stable else (far[0] > 10 * abs(TARGET[0]))
    assert np.median(far) < 1e-3  # where curvatures are lower there is no danger


@pytest.mark.parametrize("compress", ["int8", "sign", "topk:16:2bit", "random:4", "threshold:2"])
def test_compressed_updates_of_two_workers_have_the_bits_of_the_formula(compress):
    """Pushes are encoded with feedback, and each update moves the view that workers have."""
    rate, updates, curvature, target = np.float32(1 / 8), 20, CURVATURE.numpy(), TARGET.numpy()
    values, views, left = np.zeros(ELEMENTS, np.float32), [np.zeros(ELEMENTS, np.float32)], [0, 0]
    for at in range(updates):
        worker, clock, late = at % 2, at // 2, min(at, 1)
        given = curvature * (views[-1 - late] - target) + left[worker]
        seed = (clock * 0x9E3779B97F4A7C15 + worker * 0xBF58476D1CE4E5B9) % 2**62
        payload = sent(compress, given, seed)
        left[worker] = given - payload
        values = values - rate / np.float32(1 + late) * payload
        views.append(views[-1] + sent(compress, values - views[-1], at + 1))
    assert np.array_equal(in_turn(2, updates, float(rate), compress), values)
