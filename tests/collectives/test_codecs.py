"""Codecs: the core and torch give the same bytes, errors are within the bounds of each kind, what is not
finite is never decoded to a wrong number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_stand_ins import Operators, Waits

from shoal.collectives import codec_of
from shoal.collectives.codecs import native, with_torch
from shoal.collectives.ctypes_core import load_core
from shoal.errors import CollectiveError, PlanError
from shoal.spec.plan import BLOCK, CHUNK, Compression

TEXTS = [
    "int8", "int4", "fp8", "sign", "topk:64", "topk:3", "topk:64:2bit", "topk:5:2bit", "topk:4096",
    "threshold:1", "threshold:3", "random:64", "random:7", "random:4096",
]  # fmt: skip
LARGEST = torch.finfo(torch.float32).max
RANDOM = ["int8", "int4", "fp8"]
LENGTHS = st.one_of(
    st.integers(0, 300), st.sampled_from([1023, 1024, 1025, 4095, 4096, 4097, 9001, 12288, 20003])
)
core = load_core()


def vector_units():
    """Those that this processor has; the widest is the one in use."""
    if core is None:
        return []
    widest = core.vector_unit()
    try:
        return [
            name for name in ("portable", "neon", "avx2", "avx512") if core.force_vector_unit(name.encode())
        ]
    finally:
        core.force_vector_unit(widest)


@st.composite
def vectors(draw, finite=True):
    """Random vectors of many magnitudes, with zeros, ties, denormal and huge numbers."""
    count, seed = draw(LENGTHS), draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    spread = draw(st.sampled_from([0.0, 1.0, 8.0]))
    values = values * torch.exp2(spread * torch.randn(count, generator=generator))
    kind = draw(st.sampled_from(["any", "ties", "sparse", "zeros", "denormal", "tiny", "huge", "largest"]))
    if kind == "ties":
        values = values.round()
    elif kind == "sparse":
        values = values * (torch.rand(count, generator=generator) < 0.01)
    elif kind != "any":
        values = (
            values * {"zeros": 0.0, "denormal": 1e-42, "tiny": 1e-36, "huge": 1e37, "largest": 3e38}[kind]
        )
    values = values.clamp(-LARGEST, LARGEST)
    if not finite:
        for place in draw(st.lists(st.integers(0, max(count - 1, 0)), max_size=4 if count else 0)):
            values[place] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return values


def encoded(text, values, seed=0):
    codec = codec_of(Compression.parse(text))
    payload = torch.empty(codec.payload(values.numel()), dtype=torch.uint8)
    return payload[: codec.encode(values, payload, seed=seed)]


def decoded(text, values, seed=0):
    out = torch.full_like(values, 7.0)
    codec_of(Compression.parse(text)).decode(encoded(text, values, seed), out, seed=seed)
    return out


def parts(vector, length):
    return vector.split(length) if vector.numel() else ()


def same(one, other):
    """Equal, with NaN in the same places."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5))


@pytest.mark.parametrize("unit", vector_units())
@pytest.mark.parametrize("text", TEXTS)
@given(values=vectors(finite=False), seed=st.integers(-5, 2**70), offset=st.integers(0, 3))
def test_the_core_and_torch_give_the_same_bytes_and_numbers(unit, text, values, seed, offset):
    compression = Compression.parse(text)
    count = values.numel()
    most = codec_of(compression).payload(count)
    values = torch.cat([torch.zeros(offset), values])[offset:]
    ours, theirs = (torch.zeros(most + offset, dtype=torch.uint8)[offset:] for _ in range(2))
    rests = [torch.empty(count + offset)[offset:] for _ in range(2)]
    widest = core.vector_unit()
    core.force_vector_unit(unit.encode())
    try:
        written = native.encode(core, compression, values, ours, seed, rests[0])
        assert written == with_torch.encode(compression, values, theirs, seed, rests[1])
        assert torch.equal(ours[:written], theirs[:written])
        assert same(*rests)
        in_place = values.clone()
        native.encode(core, compression, in_place, theirs, seed, in_place)
        assert torch.equal(ours[:written], theirs[:written])
        assert same(in_place, rests[0])
        outs = [torch.full((count + offset,), 3.0)[offset:] for _ in range(2)]
        native.decode(core, compression, ours[:written], outs[0], seed)
        with_torch.decode(compression, ours[:written], outs[1], seed)
        assert same(*outs)
        assert same(values - outs[0], rests[0])
        native.add_decoded(core, compression, ours[:written], outs[0], -0.3, seed)
        with_torch.add_decoded(compression, ours[:written], outs[1], -0.3, seed)
        assert same(*outs)
    finally:
        core.force_vector_unit(widest)


@pytest.mark.parametrize("text", TEXTS)
@given(values=vectors(finite=False))
def test_a_part_with_what_is_not_finite_is_decoded_to_nan_and_the_others_are_not(text, values):
    compression = Compression.parse(text)
    length = BLOCK if compression.is_quantised else CHUNK
    length = compression.number if compression.kind == "random" else length
    result = decoded(text, values)
    for part, sent in zip(parts(values, length), parts(result, length), strict=True):
        assert bool(sent.isnan().any()) == bool((~part.isfinite()).any())
        assert not sent.isinf().any()


def steps(text, block):
    """The distance between the two numbers that an element of a block lies between, at most; in fp64."""
    peak, magnitude = block.double().abs().max(), block.double().abs()
    if text == "fp8":
        return torch.maximum(magnitude / 8, peak / 448 / 512)
    return (peak / {"int8": 127, "int4": 7}[text]).expand_as(magnitude)


@pytest.mark.parametrize("text", RANDOM)
@given(values=vectors())
def test_a_decoded_element_is_within_a_step_of_the_element(text, values):
    result = decoded(text, values)
    for part, sent in zip(parts(values, BLOCK), parts(result, BLOCK), strict=True):
        # A scale in fp32 is off by 2^-24 of itself, or by half of the smallest denormal number.
        slack = 1e-6 * part.double().abs().max() + 448 * 2.0**-149
        assert ((sent.double() - part.double()).abs() <= steps(text, part) + slack).all()


@given(values=vectors())
def test_a_decoded_sign_has_the_mean_magnitude_of_its_block(values):
    result = decoded("sign", values)
    for part, sent in zip(parts(values, BLOCK), parts(result, BLOCK), strict=True):
        mean = part.double().abs().mean()
        wanted = torch.where(part < 0, -mean, mean)
        assert torch.allclose(sent.double(), wanted, rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("text", RANDOM)
def test_the_mean_of_many_seeds_is_the_element(text):
    values, seeds = torch.randn(BLOCK, generator=torch.Generator().manual_seed(1)), 2000
    draws = torch.stack([decoded(text, values, seed) for seed in range(seeds)]).double()
    error = draws.mean(0) - values.double()
    # Of two numbers one step apart, the deviation is at most half a step. 1,024 elements: 5 deviations for
    # the worst of them, 4 for their sum, as roundings are independent.
    deviation = steps(text, values) / 2 / seeds**0.5
    slack = 1e-6 * values.abs().max()
    assert (error.abs() <= 5 * deviation + slack).all()
    assert error.sum().abs() <= 4 * deviation.square().sum().sqrt() + BLOCK * slack
    # One seed's errors do not depend on one another.
    errors = (draws - values.double()) / steps(text, values)
    neighbours = (errors[:, 1:] * errors[:, :-1]).mean() / errors.square().mean()
    assert neighbours.abs() <= 4 / (seeds * BLOCK) ** 0.5


@pytest.mark.parametrize("text", ["topk:64", "topk:3", "topk:4096"])
@given(values=vectors())
def test_topk_keeps_what_a_sort_puts_first(text, values):
    number = Compression.parse(text).number
    wanted = torch.zeros_like(values)
    for chunk, out in zip(parts(values, CHUNK), parts(wanted, CHUNK), strict=True):
        order = sorted(range(len(chunk)), key=lambda place: (-abs(chunk[place].item()), place))
        kept = order[: -(-len(chunk) // number)]
        out[kept] = chunk[kept]
    assert torch.equal(decoded(text, values), wanted)


@given(values=vectors())
def test_two_bits_of_a_value_are_its_sign_and_one_of_two_means(values):
    whole, coarse = decoded("topk:16", values), decoded("topk:16:2bit", values)
    for values_part, sent in zip(parts(whole, CHUNK), parts(coarse, CHUNK), strict=True):
        kept = -(-len(sent) // 16)
        chosen = sorted(range(len(sent)), key=lambda place: (-abs(values_part[place].item()), place))[:kept]
        magnitudes = values_part[chosen].double().abs()
        larger = magnitudes > magnitudes.mean()
        for group in (larger, ~larger):
            if group.any():
                found = sent[chosen].double().abs()[group]
                assert torch.allclose(
                    found, magnitudes[group].mean().expand_as(found), rtol=2.0**-8, atol=1e-40
                )
        assert (sent * values_part >= 0).all()


@given(values=vectors(), number=st.integers(1, 5))
def test_threshold_keeps_what_is_above_the_root_mean_square(values, number):
    result = decoded(f"threshold:{number}", values)
    for part, sent in zip(parts(values.double(), CHUNK), parts(result.double(), CHUNK), strict=True):
        limit = number * part.square().mean().sqrt()
        assert (sent != 0)[part.abs() > limit * (1 + 1e-6) + 1e-44].all()
        assert not sent[part.abs() < limit * (1 - 1e-6) - 1e-44].any()
        assert torch.equal(sent, torch.where(sent != 0, part, 0.0))


@pytest.mark.parametrize("text", TEXTS)
def test_a_longer_vector_takes_no_more_operators_and_at_most_one_wait_to_decode(text):
    """On GPUs an operator is a kernel."""
    compression, ran = Compression.parse(text), []
    for chunks in (3, 60):
        values = torch.randn(chunks * CHUNK + 5, generator=torch.Generator().manual_seed(0))
        payload = torch.empty(codec_of(compression).payload(values.numel()), dtype=torch.uint8)
        written = with_torch.encode(compression, values, payload, 0, None)
        with Operators() as operators, Waits() as waits:
            with_torch.decode(compression, payload[:written], torch.empty_like(values), 0)
        ran.append(operators.names)
        assert len(waits.names) <= 1
    assert ran[0] == ran[1]


def test_random_sends_one_of_each_stretch_and_each_as_often():
    values = torch.ones(8 * 1000)
    chosen = torch.stack([decoded("random:8", values, seed) for seed in range(100)])
    assert torch.equal(chosen.view(100, 1000, 8).sum(2), torch.ones(100, 1000))
    counts = chosen.view(-1, 8).sum(0)
    assert ((counts - 12500).abs() < 4 * (100_000 * 7 / 64) ** 0.5).all()


@pytest.mark.parametrize("text", TEXTS)
def test_a_fixed_size_is_that_of_the_plan(text):
    compression = Compression.parse(text)
    for count in (0, 1, 1000, 4096, 10_000):
        written = encoded(text, torch.randn(count)).numel()
        assert written <= codec_of(compression).payload(count)
        if compression.has_fixed_size:
            assert written == compression.payload(count)


@pytest.mark.skipif(core is None, reason="the native core was not built")
def test_the_core_refuses_payloads_that_are_too_short_or_point_outside():
    values, out = torch.randn(5000), torch.empty(5000)
    for text in TEXTS:
        codec = codec_of(Compression.parse(text))
        payload = encoded(text, values)
        with pytest.raises(CollectiveError, match="is not one of 5000 elements"):
            codec.decode(payload[:-1], out)
        with pytest.raises(CollectiveError, match="elements takes"):
            codec.encode(values, payload[:-1].clone(), seed=0)
    codec = codec_of(Compression.parse("topk:64"))
    payload = encoded("topk:64", values)
    payload[codec.payload(CHUNK) :] = 0xFF
    with pytest.raises(CollectiveError, match="is not one of"):
        codec.decode_add(payload, out)


@pytest.mark.parametrize("text", TEXTS)
@given(values=vectors())
def test_what_is_finite_is_decoded_to_finite_numbers_and_leaves_finite_ones_out(text, values):
    codec = codec_of(Compression.parse(text))
    for edge in (values, torch.cat([values, torch.tensor([-LARGEST])]), torch.full_like(values, LARGEST)):
        payload, rest = torch.empty(codec.payload(len(edge)), dtype=torch.uint8), torch.empty_like(edge)
        written = codec.encode(edge, payload, seed=1, residual=rest)
        out = torch.empty_like(edge)
        codec.decode(payload[:written], out, seed=1)
        assert out.isfinite().all()
        assert rest.isfinite().all()


@pytest.mark.parametrize("text", ["none", "powersgd:2"])
def test_kinds_without_a_payload_have_no_codec(text):
    with pytest.raises(PlanError, match="has no codec"):
        codec_of(Compression.parse(text))
