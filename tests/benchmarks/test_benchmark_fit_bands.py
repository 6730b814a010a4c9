"""Bands hold nine in ten rows, of kinds with many rows and with few; the data file is of this cost model."""

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from fit_bands import Row, bands_of, coverage, quantile  # noqa: E402

from shoal.predict.cost.outlook import band_of  # noqa: E402
from shoal.predict.cost.outlook.band import kind_of  # noqa: E402
from shoal.predict.validate import is_fitted, published_workload, read_table  # noqa: E402
from shoal.predict.validate.predictions import compare_steps  # noqa: E402
from shoal.predict.validate.steps import machine_of  # noqa: E402
from shoal.spec.plan import SettledPlan  # noqa: E402

VALUES = st.floats(-10, 10)
WEIGHTS = st.floats(0.1, 5)


@given(st.lists(st.tuples(VALUES, WEIGHTS), min_size=1), st.floats(0, 1))
def test_a_quantile_has_its_share_of_the_weight_at_or_below_it(rows, level):
    found = quantile(rows, level)
    whole = sum(weight for _, weight in rows)
    assert sum(weight for value, weight in rows if value <= found) >= level * whole - 1e-6
    assert sum(weight for value, weight in rows if value < found) <= level * whole + 1e-6


@pytest.mark.parametrize("sizes", [(100, 100), (200, 12), (120, 6, 6, 6)])
def test_bands_of_some_rows_hold_nine_in_ten_of_others(sizes):
    found = []
    for seed in range(100):
        noise = random.Random(seed)
        shifts = [noise.gauss(0, 0.03) for _ in sizes]

        def rows(noise=noise, shifts=shifts):
            kinds = enumerate(zip(sizes, shifts, strict=True))
            return [
                Row(("all", str(kind)), "one", noise.gauss(shift, 0.08))
                for kind, (size, shift) in kinds
                for _ in range(size)
            ]

        found.append(coverage(rows(), rows()))
    assert 0.87 < sum(found) / len(found) < 0.95


def test_a_kind_with_few_rows_is_near_the_wider_one_and_one_with_many_is_near_its_own():
    wide = [Row(("all", "wide"), "one", noise) for noise in (index / 100 - 0.5 for index in range(101))]
    for count, is_own in ((2, False), (2000, True)):
        bands = bands_of([*wide, *(Row(("all", "still"), "two", 0.0) for _ in range(count))])
        low, high, rows = bands["all", "still"]
        assert rows == count
        assert (low == high == 0.0) == is_own


def test_the_shipped_bands_hold_nine_in_ten_held_out_rows_that_are_here():
    held = []
    for name in ("published_steps", "steps_one_h100", "steps_with_experts"):
        rows = {
            row.line: row for row in read_table(BENCHMARKS / "data" / f"{name}.csv") if not is_fitted(row)
        }
        for compared in compare_steps(list(rows.values())):
            if compared.quantity != "step":
                continue
            row = rows[compared.line]
            plan = SettledPlan.of(SettledPlan.parse(compared.plan), row.batch)
            workload, machine = published_workload(row), machine_of(row)
            if row.products != "bf16":  # its Plan says bf16
                assert kind_of(workload, machine, plan, row.products)[2].endswith(row.products)
                continue
            band = band_of(workload, machine, plan)
            held.append(band.low <= compared.measured / compared.predicted <= band.high)
    assert len(held) > 100
    assert 0.85 < sum(held) / len(held) < 0.99
