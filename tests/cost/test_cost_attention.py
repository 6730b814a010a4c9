"""Seconds of attention: bounds, tiles, and how they depend on the shape."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.predict.cost.layout import Layout
from shoal.predict.cost.time.compute import attention_seconds
from shoal.spec.cluster import Device
from shoal.spec.workload import Attention

NAMES = ("a100-80", "h100", "b200", "mi300x", "rtx-4090", "cpu")
DEVICES = st.sampled_from([Device.preset(name) for name in NAMES])


def shaped(length, heads=16, kv_heads=4, width=128, *, causal=True):
    return Attention(length, heads, kv_heads, width, width, causal=causal)


@given(
    DEVICES,
    st.sampled_from(["bf16", "fp32"]),
    st.integers(1, 40_000),
    st.integers(1, 64),
    st.sampled_from([32, 64, 128, 256]),
    st.booleans(),
)
def test_no_attention_is_quicker_than_its_flop_at_the_peak(device, precision, length, heads, width, causal):
    attention = shaped(length, heads, heads, width, causal=causal)
    flop = attention.flop / (2 if causal else 1)
    forward, backward = attention_seconds(attention, device, Layout(1, precision=precision))
    if width <= 128:  # The share is that of width 128; wider heads have fewer exponentials.
        assert forward >= flop / device.flops(precision)
        assert backward >= 2.5 * flop / device.flops(precision)


@pytest.mark.parametrize("name", ["a100-80", "h100", "b200"])
@pytest.mark.parametrize("layout", [Layout(8), Layout(8, tp=2, cp=2)])
def test_long_sequences_reach_the_share_of_the_peak_and_causal_ones_take_half(name, layout):
    device = Device.preset(name)
    whole, causal = shaped(65536, causal=False), shaped(65536)
    flop = whole.flop * layout.microbatch / layout.tp / layout.cp
    rate = device.peak["bf16"] * device.sustained
    for attention, done in ((whole, flop), (causal, flop / 2)):
        forward, backward = attention_seconds(attention, device, layout)
        assert forward == pytest.approx(done / (rate * device.attention_share), rel=0.03)
        assert backward == pytest.approx(2.5 * done / (rate * device.attention_backward_share), rel=0.03)


@given(DEVICES, st.integers(1, 20_000), st.integers(0, 5000), st.integers(1, 32))
def test_more_tokens_heads_or_samples_take_no_less(device, length, more, heads):
    def forward(length, heads, samples):
        return attention_seconds(shaped(length, heads, 1), device, Layout(samples))[0]

    seconds = forward(length, heads, 2)
    assert forward(length + more, heads, 2) >= seconds * (1 - 1e-12)
    assert forward(length, heads + 1, 2) >= seconds
    assert forward(length, heads, 3) >= seconds


def test_narrow_heads_reach_a_smaller_share_since_their_exponentials_are_as_many():
    device = Device.preset("h100")
    narrow = attention_seconds(shaped(16384, 32, 32, 64), device, Layout(4))[0]
    wide = attention_seconds(shaped(16384, 16, 16, 128), device, Layout(4))[0]
    assert 1.2 < narrow / wide < 2  # the same FLOP, twice the exponentials
    unbounded = replace(device, exponentials=0.0)
    equal = [
        attention_seconds(shaped(16384, 2048 // w, 2048 // w, w), unbounded, Layout(4))[0] for w in (64, 128)
    ]
    assert equal[0] == pytest.approx(equal[1], rel=0.05)


def test_one_head_leaves_units_idle():
    device = Device.preset("h100")
    one, many = (attention_seconds(shaped(1024, heads, 1), device, Layout(1))[0] for heads in (1, 8))
    assert many < 1.5 * one


def test_in_fp32_products_take_longer_and_the_rest_as_long():
    device = Device.preset("h100")
    seconds = {
        precision: attention_seconds(shaped(8192), device, Layout(1, precision=precision))[0]
        for precision in ("bf16", "tf32", "fp32")
    }
    assert seconds["bf16"] < seconds["tf32"] < 2 * seconds["bf16"]
    assert seconds["tf32"] < seconds["fp32"]
