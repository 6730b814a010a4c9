"""Learning rates, held against torch's schedulers and against formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from shoal.train import OptimizerConfig, learning_rate

PEAK = 3e-3


def rates(steps, *, batch=16, **options):
    config = OptimizerConfig(learning_rate=PEAK, **options)
    return [learning_rate(config, step=step, steps=steps, batch=batch) for step in range(steps)]


def rates_of_torch(steps, warmup, make_rest):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    warm_up = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    rest, milestones = make_rest(optimizer)
    scheduler = SequentialLR(optimizer, [warm_up, *rest], milestones)
    given = []
    for _ in range(steps):
        given.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return given


@pytest.mark.parametrize(("steps", "warmup"), [(100, 10), (37, 1), (12, 5)])
def test_cosine_is_torchs_warm_up_followed_by_its_cosine(steps, warmup):
    def cosine(optimizer):
        return [CosineAnnealingLR(optimizer, steps - 1 - warmup, eta_min=0.1 * PEAK)], [warmup]

    expected = rates_of_torch(steps, warmup, cosine)
    # torch multiplies from step to step, and so gathers rounding errors
    assert rates(steps, warmup=warmup, schedule="cosine", final=0.1) == pytest.approx(expected, rel=1e-9)


def test_constant_then_decay_is_torchs_three_schedulers_in_a_row():
    steps, warmup, decay = 101, 10, 20

    def constant_then_decay(optimizer):
        constant = ConstantLR(optimizer, factor=1.0)
        down = LinearLR(optimizer, start_factor=1.0, end_factor=0.25, total_iters=decay)
        return [constant, down], [warmup, steps - 1 - decay]

    expected = rates_of_torch(steps, warmup, constant_then_decay)
    ours = rates(steps, warmup=warmup, schedule="constant-then-decay", decay=decay / steps, final=0.25)
    assert ours == pytest.approx(expected, rel=1e-9)


SCHEDULES = st.sampled_from(["cosine", "constant-then-decay"])


@given(st.integers(2, 300), st.data(), SCHEDULES, st.floats(0, 1), st.floats(0, 1))
def test_the_rate_rises_to_its_peak_and_falls_to_its_last_share_of_it(steps, data, schedule, decay, final):
    warmup = data.draw(st.integers(0, steps - 2))
    given_rates = np.array(rates(steps, warmup=warmup, schedule=schedule, decay=decay, final=final))
    rise, fall = given_rates[: warmup + 1], given_rates[warmup:]
    # the line through zero one step before the first, and the peak
    np.testing.assert_allclose(rise, PEAK * np.arange(1, warmup + 2) / (warmup + 1), rtol=1e-12)
    assert (np.diff(fall) <= 1e-15).all()
    if schedule == "cosine" or round(decay * steps) >= 1:
        assert given_rates[-1] == pytest.approx(final * PEAK, abs=1e-15)


def test_a_run_that_ends_within_its_warm_up_never_decays():
    assert rates(5, warmup=9) == pytest.approx([PEAK * step / 10 for step in range(1, 6)])


@given(SCHEDULES, st.integers(1, 50))
def test_every_step_has_a_finite_rate_however_short_the_run_is(schedule, steps):
    for warmup in (0, steps - 1, steps, steps + 1):
        given_rates = rates(steps, warmup=warmup, schedule=schedule)
        assert all(0 < rate <= PEAK for rate in given_rates)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_a_batch_of_four_times_the_reference_scales_every_rate(scaling, factor):
    scaled = rates(50, batch=64, scaling=scaling, reference_batch=16)
    assert scaled == pytest.approx([factor * rate for rate in rates(50)])
    assert rates(50, batch=16, scaling=scaling, reference_batch=16) == rates(50)
