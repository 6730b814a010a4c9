"""The check of the bench against collectives written out as lists, the rates against nccl-tests' formulas."""

from __future__ import annotations

import math
import operator
from functools import reduce
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.machine.bench import COLLECTIVES, DTYPES, OPERATORS, Row, ratio
from shoal.machine.bench import collective as reference

COMBINE = {"sum": operator.add, "avg": operator.add, "min": min, "max": max, "product": operator.mul}


def written_out(name, inputs, op):
    """What each rank must hold, from what each gave; None where nobody looks."""
    ranks = len(inputs)
    combined = [reduce(COMBINE[op], elements) for elements in zip(*inputs, strict=True)]
    if op == "avg":
        combined = [value / ranks for value in combined]
    part = len(inputs[0]) // ranks
    nowhere = [None] * (ranks - 1)
    joined = list(chain.from_iterable(inputs))
    match name:
        case "all_reduce":
            return [combined] * ranks
        case "reduce":
            return [combined, *nowhere]
        case "reduce_scatter":
            return [combined[rank * part : (rank + 1) * part] for rank in range(ranks)]
        case "all_gather":
            return [joined] * ranks
        case "gather":
            return [joined, *nowhere]
        case "broadcast":
            return [inputs[0]] * ranks
        case "scatter":
            return [inputs[0][rank * part : (rank + 1) * part] for rank in range(ranks)]
        case "all_to_all":
            return [
                [value for given in inputs for value in given[rank * part : (rank + 1) * part]]
                for rank in range(ranks)
            ]
        case "send_recv":
            return [inputs[rank - 1] for rank in range(ranks)]


@settings(max_examples=150)
@given(
    name=st.sampled_from([name for name in COLLECTIVES if name != "barrier"]),
    ranks=st.integers(1, 9),
    parts=st.integers(1, 1500),
    op=st.sampled_from(OPERATORS),
)
def test_what_is_expected_is_what_the_collective_makes_of_what_is_given(name, ranks, parts, op):
    collective, count = COLLECTIVES[name], parts * ranks
    common = {"dtype": torch.float64, "op": op}
    inputs = [reference.given(collective, count, ranks, rank, **common).tolist() for rank in range(ranks)]
    for rank, wanted in enumerate(written_out(name, inputs, op)):
        expected = reference.expected(collective, count, ranks, rank, **common)
        assert (expected if expected is None else expected.tolist()) == wanted


@pytest.mark.parametrize("ranks", [2, 8, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_exact_in_every_type(dtype, ranks):
    collective, common = COLLECTIVES["all_reduce"], {"op": "sum"}
    narrow, wide = getattr(torch, dtype), torch.float64
    total = torch.zeros(3000, dtype=narrow)
    for rank in range(ranks):
        total += reference.given(collective, 3000, ranks, rank, dtype=narrow, **common)
    exact = reference.expected(collective, 3000, ranks, 0, dtype=wide, **common)
    assert total.to(wide).equal(exact)


def test_ranks_give_different_values():
    collective = COLLECTIVES["all_reduce"]
    first, second = (
        reference.given(collective, 100, 2, rank, dtype=torch.float32, op="sum") for rank in range(2)
    )
    assert not first.equal(second)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_bus_factors_are_those_of_nccl_tests(ranks):
    n = ranks
    factors = {name: collective.bus_factor(n) for name, collective in COLLECTIVES.items()}
    assert factors.pop("all_reduce") == 2 * (n - 1) / n
    for name in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        assert factors.pop(name) == (n - 1) / n
    assert set(factors.values()) == {1}


def row(**changed):
    fields = {
        "collective": "all_reduce",
        "backend": "gloo",
        "ranks": 4,
        "bytes": 1 << 20,
        "count": 1 << 18,
        "dtype": "float32",
        "op": "sum",
        "iterations": 3,
        "seconds": (0.002, 0.001, 0.004),
        "wrong": 0,
        "problem": None,
    }
    return Row(**{**fields, **changed})


def test_rates_are_those_of_the_median_round():
    assert row().median == 0.002
    assert math.isclose(row().algbw, (1 << 20) / 0.002)
    assert math.isclose(row().busbw, (1 << 20) / 0.002 * 1.5)
    assert row().as_json()["busbw"] == row().busbw
    assert "busbw" not in row(seconds=()).as_json()


def test_a_ratio_is_taken_round_by_round():
    # Of the medians it would be 1; of the rounds it is the median of 1, 3 and 1/2.
    assert ratio(row(seconds=(2, 3, 1)), row(seconds=(2, 1, 2))) == 1
    assert ratio(row(seconds=(2, 6, 8)), row(seconds=(1, 2, 8))) == 2
    assert ratio(row(seconds=()), row()) is None
