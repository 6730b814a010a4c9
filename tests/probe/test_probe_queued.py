"""Timing apart from the host, driven by the clock of a simulated device."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from probe_stand_ins import LAUNCH, LazyCuda, Simulated

from shoal.machine.probe.device import CudaClock, queued_seconds


@pytest.mark.parametrize("kernel", [2e-6, 50e-6, 1e-2])
@pytest.mark.parametrize("host", [5e-6, 43e-6, 400e-6])
def test_the_devices_seconds_are_found_however_slow_the_host_is(kernel, host):
    clock = Simulated(host)
    found = queued_seconds(partial(clock.start, kernel), clock, turn_seconds=0.02)
    assert found == pytest.approx(kernel + LAUNCH, rel=0.03)


def test_the_hold_grows_until_the_host_is_done_before_it_ends():
    """The first call is quick and the others are slow, as where memory must be found."""
    clock = Simulated(1e-6)

    def operation():
        clock.start(3e-6)
        clock.host = 2e-4

    assert queued_seconds(operation, clock, turn_seconds=0.02) == pytest.approx(4e-6, rel=0.03)


@pytest.mark.parametrize("exactness", [0.1, 0.7, 1.5])
def test_a_device_whose_clock_has_changed_is_held_until_the_host_is_done(exactness):
    clock = Simulated(400e-6, exactness)
    found = queued_seconds(partial(clock.start, 2e-6), clock, turn_seconds=0.02)
    assert found == pytest.approx(2e-6 + LAUNCH, rel=0.03)


@pytest.mark.parametrize("rates", [[1.98e9], [0.3e9, 1.2e9, 1.98e9]])
def test_a_hold_lasts_as_long_as_was_asked_for_though_its_kernel_is_loaded_late_and_the_clock_rises(rates):
    cuda = LazyCuda(loading=20e-3, rates=rates)
    with patch.multiple(torch.cuda, _sleep=cuda._sleep, Event=cuda.Event, synchronize=cuda.synchronize):
        CudaClock(torch.device("cuda", 0)).hold(1e-3)
    assert cuda.holds[-1] == pytest.approx(1e-3, rel=0.01)


def test_alone_such_an_operation_shows_the_host():
    """What the simulated machine says without a hold: the reason for it."""
    clock = Simulated(43e-6)
    first = clock.mark()
    for _ in range(50):
        clock.start(2e-6)
    assert clock.between(first, clock.mark()) / 50 > 40e-6
