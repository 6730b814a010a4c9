"""The benchmark of slow links: its bytes, its predictions and its tables; on two hosts it trains."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from slow_links_hosts import Workers
from slow_links_loss import STEPS, Loss, at_equal_time, runs_of, table
from slow_links_methods import MODEL, NEVER, methods
from slow_links_speed import formula_bytes, predicted_seconds, with_compute

from shoal.models import Transformer
from shoal.spec.cluster import Cluster
from shoal.testing.hosts import Hosts, why_no_hosts

SHOAL = {each.name: each for each in methods(torchft=False) if each.exchange is not None}


def test_int8_every_twenty_steps_sends_eighty_times_fewer_bytes_and_sparse_ones_more_than_146():
    dense = formula_bytes("", 4)
    assert dense / formula_bytes("exchange=local,every=20", 4) == pytest.approx(20)
    assert dense / formula_bytes("exchange=local,every=20,compress=int8", 4) == pytest.approx(80, rel=0.005)
    sparse = [run for run in runs_of() if "local" in run.exchange and "2bit" in run.exchange]
    assert sparse
    assert all(run.fewer > 146 for run in sparse)


def test_powersgd_sends_the_factors_of_all_matrices_and_whole_vectors():
    shapes = [each.shape for each in Transformer(MODEL).parameters()]
    sent = sum(min(2 * sum(shape), shape.numel()) if len(shape) == 2 else shape.numel() for shape in shapes)
    assert formula_bytes("compress=powersgd:2", 4) == pytest.approx(4 * sent * 2 * 3 / 4, rel=1e-3)


def test_a_step_alone_takes_what_was_measured_and_any_exchange_takes_longer():
    cluster = with_compute(Cluster.preset("laptop").with_devices(4), 4, 0.1)
    assert predicted_seconds(NEVER, 4, cluster) == pytest.approx(0.1, rel=1e-3)
    for name, method in SHOAL.items():
        assert predicted_seconds(method.exchange, 4, cluster) >= 0.0999, name


def test_a_course_is_linear_between_its_points():
    course = {100: 3.0, 200: 2.0, 300: 1.5}
    assert [at_equal_time(course, steps) for steps in (50, 100, 150, 250, 400)] == [3.0, 3.0, 2.5, 1.75, 1.5]


def test_losses_stand_beside_those_of_dense_with_the_same_seed():
    all_dense, *others = runs_of()
    local = next(run for run in others if "local" in run.exchange)
    dense = [Loss(loss, {STEPS // 2: 2 * loss, STEPS: loss}) for loss in (1.0, 1.1)]
    lines = table(
        {all_dense: dense, local: [Loss(1.01, {}), Loss(1.1, {})]}, {local.exchange: 1e9}
    ).splitlines()
    assert "+0.50% (+0.00% to +1.00%)" in lines[3]
    assert local.fewer_in_all < STEPS / local.dense
    assert "2.1000" in lines[3], "dense has made as few steps as the other's dense ones"


@pytest.mark.skipif(bool(why_no_hosts()), reason="no network namespaces here")
def test_the_interfaces_count_the_formulas_bytes():
    chosen = [SHOAL["bucketed"], SHOAL["compress=topk:64:2bit"], SHOAL["exchange=local,every=20"]]
    with Hosts(2) as hosts, Workers(hosts, 2, chosen) as ranks:
        for number, method in enumerate(chosen):
            ranks.build(number)
            # A busy machine answers late at times, and TCP then sends a segment of 64 KiB again.
            sent = min(ranks.run(number, max(2, method.round)).sent for _ in range(3))
            # Beside gradients, ranks tell each other of their losses and norms: some kilobytes.
            assert 0 <= sent - formula_bytes(method.exchange, 2) < 8_000, method.name
