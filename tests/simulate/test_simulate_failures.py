"""Long runs whose nodes fail, played by chance, against closed forms."""

import dataclasses
import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.predict.cost.outlook import best_interval, goodput
from shoal.predict.simulate import FailureModel, failure_course, failure_courses
from shoal.spec.cluster import Cluster, Device, Level

DEVICE = Device(name="d", memory=80e9, bandwidth=3e12, peak={"bf16": 1e15}, units=132)
DAY = 86_400.0


def model(**changes):
    return FailureModel(
        **{"nodes": 100, "replicas": 100, "between": 3600.0, "step": 5.0, "save": 20.0, **changes}
    )


@pytest.mark.parametrize(("between", "save", "restart"), [(3600.0, 20.0, 300.0), (900.0, 30.0, 120.0)])
def test_without_repairs_goodput_is_dalys(between, save, restart):
    cluster = Cluster(
        name="c",
        device=DEVICE,
        levels=(Level(name="network", devices=100, bandwidth=50e9),),
        failures=3600 / between / 100,
    )
    expected = goodput(cluster, step=5.0, save=save, restart=restart)
    found = failure_courses(model(between=between, save=save, restart=restart), 40 * DAY, runs=40)
    assert found.error < 0.002
    assert found.goodput == pytest.approx(expected.share, abs=4 * found.error)
    assert found.lost["saving"] == pytest.approx(expected.saving, rel=0.03)
    assert found.lost["recovery"] == pytest.approx(expected.restarting, rel=0.03)
    assert found.lost["repeated"] == pytest.approx(expected.lost, rel=0.05)


def test_no_interval_is_better_than_youngs():
    best = round(best_interval(20.0, 3600.0) / 5.0)
    shares = {
        interval: failure_courses(model(interval=interval), 40 * DAY, runs=20).goodput
        for interval in (best // 3, best, 3 * best)
    }
    assert max(shares, key=shares.__getitem__) == best


@pytest.mark.parametrize("tail", ["fixed", "exponential", "heavy"])
def test_how_often_spares_are_used_up_follows_the_queue_whatever_the_tail(tail):
    # M/G/infinity: the nodes that are away, at a failure too, are Poisson with mean repair / between.
    load, spares = 3.0, 5
    repaired = model(
        nodes=10_000,
        replicas=10_000,
        hardware=1.0,
        restart=0.0,
        grow=0.0,
        repair=load * 3600,
        repair_tail=tail,
        spares=spares,
        shrinks=True,
    )
    found = failure_courses(repaired, 400 * DAY, runs=5)
    none_left = 1 - sum(math.exp(-load) * load**count / math.factorial(count) for count in range(spares))
    assert found.without_spare == pytest.approx(none_left, rel=0.06)


def test_without_spares_a_run_waits_as_long_as_repairs_take():
    # Nothing fails while it waits, so that a cycle is a time to failure and a repair.
    found = failure_courses(
        model(hardware=1.0, restart=0.0, save=0.0, interval=10**9, step=1.0, copies=1, repair=7200.0),
        100 * DAY,
        runs=10,
    )
    assert found.goodput == pytest.approx(3600 / (3600 + 7200), abs=4 * found.error)


def test_each_measure_gains_what_it_is_for():
    base = model(hardware=0.8, repair=DAY / 2, repair_tail="heavy")
    plain = failure_courses(base, 50 * DAY, runs=20)
    spared = failure_courses(dataclasses.replace(base, spares=40), 50 * DAY, runs=20)
    shrunk = failure_courses(dataclasses.replace(base, shrinks=True), 50 * DAY, runs=20)
    copied = failure_courses(dataclasses.replace(base, spares=40, copies=1), 50 * DAY, runs=20)
    assert plain.lost["waiting"] > 0.5 > spared.lost["waiting"] == pytest.approx(0, abs=0.02)
    assert shrunk.lost["waiting"] == 0 < shrunk.lost["slower"]
    assert spared.lost["repeated"] > 0.04
    assert copied.lost["repeated"] < 0.002
    assert plain.goodput < shrunk.goodput < spared.goodput < copied.goodput


@given(
    st.builds(
        FailureModel,
        nodes=st.just(12),
        replicas=st.sampled_from([1, 3, 12]),
        between=st.floats(10, 10_000),
        step=st.floats(2, 50),
        save=st.floats(0, 50),
        interval=st.integers(1, 50),
        detection=st.floats(0, 50),
        restart=st.floats(0, 500),
        restart_tail=st.sampled_from(["fixed", "exponential", "heavy"]),
        hardware=st.floats(0, 1),
        repair=st.floats(0, 5000),
        repair_tail=st.sampled_from(["fixed", "exponential", "heavy"]),
        spares=st.integers(0, 3),
        copies=st.integers(0, 3),
        copy=st.floats(0, 5),
        shrinks=st.booleans(),
        grow=st.floats(0, 100),
    ),
    st.integers(0, 1000),
)
@example(  # a node comes back during a save, with fewer replicas than the run has
    FailureModel(
        nodes=12, replicas=3, between=10.0, step=2.0, save=1.0, interval=1, detection=1.0, restart=1.0,
        restart_tail="exponential", hardware=1.0, repair=2.0, repair_tail="fixed", spares=1, copies=1,
        copy=0.0, shrinks=True, grow=0.0,
    ),
    0,
)  # fmt: skip
def test_the_parts_of_any_run_sum_to_its_seconds(any_model, seed):
    course = failure_course(any_model, 5_000.0, random.Random(seed))
    assert course.seconds == pytest.approx(5_000.0)
    assert min(course.trained, *course.lost.values()) >= -1e-6


def test_values_out_of_range_are_refused():
    for wrong in ({"replicas": 7}, {"between": 0.0}, {"hardware": 1.5}, {"repair": -1.0}, {"save": math.inf}):
        with pytest.raises(ConfigError, match="is not allowed"):
            model(**wrong)
