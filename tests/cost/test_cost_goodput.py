"""Goodput and jitter, against simulation and published runs."""

import math
import random
from statistics import fmean

import pytest

from shoal.predict.cost.outlook.long_run import goodput
from shoal.predict.cost.time.jitter import lognormal_maximum, normal_maximum
from shoal.spec.cluster import Cluster, Device, Level

DEVICE = Device(name="d", memory=80e9, bandwidth=3e12, peak={"bf16": 1e15}, units=132)


def cluster(devices, failures, price=0.0):
    levels = (Level(name="network", devices=devices, bandwidth=50e9),)
    return Cluster(name="c", device=DEVICE, levels=levels, failures=failures, price=price)


def simulated(between, trained, save, restart, checkpoints, generator):
    """Seconds that a run takes whose failures come by chance, second by second of its life."""
    clock, done, next_failure = 0.0, 0, generator.expovariate(1 / between)
    while done < checkpoints:
        ends = clock + trained + save
        if ends <= next_failure:
            clock, done = ends, done + 1
            continue
        clock = next_failure
        while True:  # restarts until one is not disturbed
            next_failure = clock + generator.expovariate(1 / between)
            if clock + restart <= next_failure:
                clock += restart
                break
            clock = next_failure
    return clock


@pytest.mark.parametrize(
    ("failures", "save", "restart"), [(1e-3, 30.0, 300.0), (1e-2, 5.0, 60.0), (5e-2, 20.0, 100.0)]
)
def test_goodput_is_what_a_simulated_run_reaches(failures, save, restart):
    found = goodput(cluster(16, failures), step=7.0, save=save, restart=restart)
    trained = found.interval * found.step
    seconds = simulated(found.between_failures, trained, save, restart, 20_000, random.Random(0))
    # 20,000 intervals meet thousands of failures: the mean is known to better than 1 %
    assert found.share == pytest.approx(20_000 * trained / seconds, rel=0.01)
    assert found.saving == pytest.approx(20_000 * save / seconds, rel=0.01)


def test_shares_sum_to_one_and_none_is_negative():
    for failures in (0.0, 1e-5, 1e-2, 1.0):
        found = goodput(cluster(1024, failures), step=5.0, save=60.0, restart=600.0)
        shares = (found.share, found.saving, found.restarting, found.lost)
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0


def test_with_few_failures_goodput_is_what_first_order_says():
    found = goodput(cluster(100, 1e-6), step=1.0, save=10.0, restart=100.0)
    between = 3600 / (100 * 1e-6)
    interval = math.sqrt(2 * between * 10)
    assert found.interval == pytest.approx(interval, rel=1e-3)
    first_order = 1 - 10 / interval - (interval / 2 + 100) / between
    assert found.share == pytest.approx(first_order, abs=1e-5)


def test_the_interval_is_within_a_permille_of_the_best_one():
    machine = cluster(1000, 1e-4)
    found = goodput(machine, step=1.0, save=20.0, restart=200.0)

    def share(trained):
        between = found.between_failures
        return trained / (between * math.exp(200 / between) * math.expm1((trained + 20) / between))

    assert found.share == pytest.approx(share(found.interval))
    assert found.share > 0.999 * max(share(trained) for trained in range(10, 5000, 10))


def test_at_llama_3s_rate_of_failures_ninety_per_cent_asks_for_restarts_of_minutes():
    # arXiv:2407.21783, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 H100, and "higher
    # than 90 % effective training time"
    machine = cluster(16_384, 419 / (54 * 24 * 16_384))
    quick = goodput(machine, step=5.0, save=10.0, restart=300.0)
    slow = goodput(machine, step=5.0, save=60.0, restart=1200.0)
    assert quick.between_failures == pytest.approx(54 * 86_400 / 419)
    assert quick.share > 0.9 > slow.share


def test_days_and_dollars_are_those_of_the_devices_hours():
    found = goodput(cluster(8, 0.0, price=2.0), step=2.0, save=0.0, restart=0.0)
    assert found.days(tokens=86_400 * 1000, tokens_per_step=2000) == pytest.approx(1)
    assert found.dollars(tokens=86_400 * 1000, tokens_per_step=2000) == pytest.approx(24 * 8 * 2)
    failing = goodput(cluster(8, 1e-2, price=2.0), step=2.0, save=60.0, restart=600.0)
    assert failing.days(1e9, 2000) == pytest.approx(found.days(1e9, 2000) / failing.share)


def test_a_machine_that_fails_before_it_restarts_never_ends():
    found = goodput(cluster(1_000_000, 1.0), step=1.0, save=100.0, restart=1000.0)
    assert found.share == 0
    assert found.days(1e9, 1e6) == math.inf


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_the_expected_maximum_is_what_drawing_gives(ranks):
    generator = random.Random(ranks)
    rounds, variation = 20_000, 0.1
    normal = [max(generator.gauss(1, variation) for _ in range(ranks)) for _ in range(rounds)]
    sigma = math.sqrt(math.log1p(variation**2))
    lognormal = [
        max(generator.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(ranks)) for _ in range(rounds)
    ]
    # a maximum varies by at most 0.1, so the mean of 20,000 of them by 0.0007
    assert normal_maximum(ranks, variation) == pytest.approx(fmean(normal), abs=0.003)
    assert lognormal_maximum(ranks, variation) == pytest.approx(fmean(lognormal), abs=0.003)


def test_expected_maxima_of_few_are_those_in_closed_form():
    assert normal_maximum(1, 0.3) == pytest.approx(1)
    assert lognormal_maximum(1, 0.3) == pytest.approx(1)
    assert normal_maximum(2, 1.0) == pytest.approx(1 + 1 / math.sqrt(math.pi))
    assert normal_maximum(3, 1.0) == pytest.approx(1 + 3 / (2 * math.sqrt(math.pi)))


def test_the_expected_maximum_of_many_follows_the_asymptote():
    # Fisher and Tippett, 1928: the largest of n is near a + 0.5772 / b, where n ranks leave one above a
    for ranks in (10**4, 10**6):
        log = 2 * math.log(ranks)
        b = math.sqrt(log)
        a = b - (math.log(math.log(ranks)) + math.log(4 * math.pi)) / (2 * b)
        # the next term of the asymptote is of the order of 1 / b^3
        assert normal_maximum(ranks, 1.0) == pytest.approx(1 + a + 0.5772 / b, abs=2 / b**3)


def test_without_variation_nobody_waits():
    assert normal_maximum(4096, 0.0) == pytest.approx(1)
    assert lognormal_maximum(4096, 0.0) == pytest.approx(1)


def test_spare_nodes_are_paid_for_and_train_nothing():
    alone = Cluster.parse("dgx-h100:64")
    with_spare = Cluster.parse("dgx-h100:80").replace(spare=2)
    assert with_spare.devices == alone.devices
    runs = [goodput(each, step=1.0, save=10.0, restart=300.0) for each in (alone, with_spare)]
    assert runs[1].share == runs[0].share
    assert runs[1].dollars(1e12, 1e6) == pytest.approx(runs[0].dollars(1e12, 1e6) * 80 / 64)
