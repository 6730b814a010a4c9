"""Whole trainings with looser exchange have the bits of references that share no code with Shoal."""

import numpy as np
import pytest
from golden_stand_ins import RATE, local_reference, local_trainings, trained_reference, trainings
from reference_codecs import split_mix

from shoal.spec.plan import Plan

KINDS = [
    "int8", "int4", "fp8", "sign", "topk:64", "topk:16:2bit", "random:8", "threshold:2", "powersgd:3",
]  # fmt: skip
LAYOUTS = ["dp=4", "dp=2", "dp=4,shard=zero2", "dp=4,shard=zero3,replicate=2"]


def test_the_reference_has_the_random_numbers_of_the_paper():
    """SplitMix64 from 0 begins with this number in Java, and in Vigna's splitmix64.c."""
    assert split_mix(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("feedback", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("text", KINDS)
def test_ten_compressed_steps_have_the_bits_of_the_reference(ranks, text, feedback):
    """All but those whose sums an all-reduce makes in its own order: random; and powersgd, with a QR in fp32.

    Neither chooses by value, so that a rounding stays one: relative 1e-6 for ten steps, times the condition
    of the factors for powersgd.
    """
    layouts = [each for each in LAYOUTS if "powersgd" not in text or each != "dp=4,shard=zero2"]
    for size in (2, 4):
        here = [each for each in layouts if int(each[3]) == size]
        plans = [
            f"{each},compress={text}" + (f",feedback={feedback:g}" if feedback != 1 else "") for each in here
        ]
        results = ranks.run(trainings, size, plans)
        for number, layout in enumerate(here):
            expected = trained_reference(layout, size, text, feedback)
            for trained in results:
                for step, (ours, theirs) in enumerate(zip(trained[number], expected, strict=True)):
                    if text.split(":")[0] in ("random", "powersgd"):
                        slack = 1e-5 if text.startswith("random") else 1e-3
                        np.testing.assert_allclose(ours, theirs, rtol=0, atol=slack)
                    else:
                        assert np.array_equal(ours, theirs), f"{layout}, step {step}"


# Rates that are powers of two; in the last rounds a smaller one, for `stretch`.
FALLING = [RATE] * 4 + [RATE / 2] * 3 + [RATE / 4] * 6
LOCAL = [
    (2, "exchange=local,every=3", 0.5, 0.5),
    (2, "exchange=local,every=2", 1.0, 0.0),
    (2, "exchange=local,every=3,dense=4", 0.5, 0.5),
    (2, "exchange=local,every=2,stretch=4", 0.5, 0.5),
    (2, "exchange=local,every=4,fragments=2,delay=1", 0.5, 0.5),
    (4, "exchange=local,every=4,fragments=2,delay=1,compress=topk:16:2bit,feedback=0.5", 0.5, 0.5),
    (4, "exchange=local,every=3,compress=int8", 1.0, 0.0),
    (4, "exchange=local,every=3,compress=int4,delay=2", 0.5, 0.5),
    (2, "exchange=local,every=2,dense=3,compress=sign,stretch=2", 0.5, 0.25),
    (4, "exchange=local,every=2,fragments=2,compress=fp8", 0.5, 0.5),
    (4, "exchange=local,every=3,compress=threshold:2,feedback=0", 0.5, 0.5),
]


@pytest.mark.parametrize(("workers", "text", "rate", "momentum"), LOCAL)
def test_local_updates_have_the_bits_of_the_reference(ranks, workers, text, rate, momentum):
    settings = {"rate": rate, "momentum": momentum, "rates": FALLING}
    results = ranks.run(local_trainings, workers, [f"dp={workers},{text}"], settings)
    exchange = Plan.parse(f"dp={workers},{text}").exchanged
    order = results[0][0][0]
    expected = local_reference(exchange, workers, order, settings)
    for worker, ((_, trained),) in enumerate(results):
        for step, (ours, theirs) in enumerate(zip(trained, expected, strict=True)):
            assert np.array_equal(ours, theirs[worker]), f"worker {worker}, step {step}"
