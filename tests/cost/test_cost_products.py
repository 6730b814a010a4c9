"""Seconds of products: bounds, waves, and rows that were measured on other sizes than those of the fit."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.predict.cost.time.compute import joined, product_seconds
from shoal.spec.cluster import Device

NAMES = ("a100-80", "h100", "b200", "mi300x", "rtx-4090", "cpu")
DEVICES = st.sampled_from([Device.preset(name) for name in NAMES])
SIZES = st.integers(1, 40_000)
PRECISIONS = st.sampled_from(["bf16", "fp8", "fp32"])


@given(DEVICES, PRECISIONS, SIZES, SIZES, SIZES, st.integers(1, 16))
def test_no_product_is_quicker_than_its_flop_at_the_peak_or_its_bytes_at_the_memorys_rate(
    device, precision, rows, inputs, outputs, copies
):
    seconds = product_seconds(device, precision, rows, inputs, outputs, copies)
    width = {"bf16": 2, "fp32": 4, "fp8": 1 if "fp8" in device.peak else 2}[precision]
    assert seconds >= 2 * rows * inputs * outputs * copies / device.flops(precision)
    nbytes = width * copies * (rows * inputs + inputs * outputs + rows * outputs)
    assert seconds >= nbytes / device.bandwidth


@given(DEVICES, PRECISIONS, SIZES, SIZES, SIZES, st.integers(0, 4000))
def test_more_of_any_size_takes_no_less(device, precision, rows, inputs, outputs, more):
    seconds = product_seconds(device, precision, rows, inputs, outputs)
    # Tiles have several sizes: a larger product never has to take longer ones, so that it is no quicker.
    assert product_seconds(device, precision, rows + more, inputs, outputs) >= seconds * (1 - 1e-12)
    assert product_seconds(device, precision, rows, inputs, outputs + more) >= seconds * (1 - 1e-12)
    assert product_seconds(device, precision, rows, inputs + more, outputs) >= seconds * (1 - 1e-12)


@given(DEVICES, SIZES, SIZES, SIZES)
def test_a_product_and_that_of_both_turned_take_equally_long(device, rows, inputs, outputs):
    turned = product_seconds(device, "bf16", outputs, inputs, rows)
    assert product_seconds(device, "bf16", rows, inputs, outputs) == pytest.approx(turned)


@pytest.mark.parametrize("name", ["a100-80", "h100", "b200"])
def test_one_tile_more_than_the_units_takes_another_wave(name):
    """The smallest tile has 16 rows and 32 columns here, and memory bounds nothing."""
    preset = Device.preset(name)
    device = replace(preset, tile=(64, 64), bandwidth=1e18, tile_bandwidth=0.0, fp8_tile_bandwidth=0.0)
    device = replace(device, peak={**device.peak, "fp8": 1e15})
    units = device.units
    full, over, twice = (
        product_seconds(device, "fp8", 16, 8192, 32 * tiles) - device.launch
        for tiles in (units, units + 1, 2 * units)
    )
    assert over == pytest.approx(twice)
    assert over == pytest.approx(2 * full)


def test_inputs_are_divided_where_tiles_leave_units_empty():
    device = Device.preset("h100")
    alone = replace(device, units=1, peak={"bf16": device.peak["bf16"] / device.units})
    one_tile = product_seconds(alone, "bf16", 256, 65536, 128)
    assert product_seconds(device, "bf16", 256, 65536, 128) < one_tile / 4


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.sampled_from([0.0, 0.5, 1.0]))
def test_work_that_is_hidden_takes_between_the_longer_and_both(first, second, stall):
    found = joined(first, second, stall)
    assert max(first, second) <= found <= (first + second) * (1 + 1e-12)
    assert found == joined(second, first, stall)


def test_a_lowered_clock_makes_large_products_longer_and_leaves_small_ones():
    device = replace(Device.preset("h100"), sustained=0.5)
    large = [product_seconds(each, "bf16", 8192, 8192, 8192) for each in (device, device.alone)]
    small = [product_seconds(each, "bf16", 64, 64, 64) for each in (device, device.alone)]
    assert large[0] / large[1] == pytest.approx(2, rel=0.01)
    assert small[0] / small[1] < 1.3


def test_seconds_per_row_fall_as_tiles_fill():
    device = Device.preset("h100")
    each = [product_seconds(device, "bf16", rows, 4096, 4096) / rows for rows in (64, 512, 4096, 32768)]
    assert all(later < earlier for earlier, later in pairwise(each))
