"""Dollars and energy of devices, by kind of price."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ClusterError
from shoal.predict.cost.outlook import goodput
from shoal.spec.cluster import (
    KINDS_OF_PRICE,
    PRESETS,
    Cluster,
    Power,
    Prices,
    dollars,
    kilowatt_hours,
    price_of,
    priced,
)
from shoal.spec.cluster.tables import table

PRICES = Prices(reserved=2.0, spot=1.0, interruptions=1e-3)
POWER = Power(device=700.0, overhead=300.0, pue=1.5)
MINE = Cluster.preset("dgx-h100", 64).replace(price=3.0, prices=PRICES, power=POWER)


@given(st.floats(0, 1e7), st.integers(1, 64))
def test_dollars_and_energy_are_those_of_each_device_and_hour(seconds, devices):
    hours = devices * seconds / 3600
    for kind, price in zip(KINDS_OF_PRICE, (3.0, 2.0, 1.0), strict=True):
        assert dollars(MINE, seconds, devices=devices, kind=kind) == pytest.approx(price * hours)
    assert kilowatt_hours(MINE, seconds, devices=devices) == pytest.approx(1.5 * hours)  # 1 kW x 1.5


def test_spare_nodes_are_paid_and_idle():
    spare = MINE.replace(spare=2)
    assert spare.devices == 48
    assert dollars(spare, 3600) == pytest.approx(dollars(MINE, 3600))
    assert kilowatt_hours(spare, 3600) == pytest.approx(48 / 64 * kilowatt_hours(MINE, 3600))
    assert dollars(MINE.replace(failed=2), 3600) == pytest.approx(48 * 3.0)


def test_spot_devices_are_interrupted_beside_their_failures():
    spot = priced(MINE, "spot")
    assert (spot.price, spot.failures) == (1.0, MINE.failures + 1e-3)
    assert priced(MINE, "reserved") == MINE.replace(price=2.0)
    # A third of the price is not a third of the cost: 64 devices are interrupted every 15 hours.
    costs = [goodput(priced(MINE, kind), 1.0, 30.0, 300.0).dollars(1e6, 1.0) for kind in KINDS_OF_PRICE]
    assert costs[0] / 3 < costs[2] < costs[1] < costs[0]


def test_a_kind_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(ClusterError, match="did you mean 'reserved'"):
        price_of(MINE, "reservd")
    with pytest.raises(ClusterError, match="has no price spot") as refused:
        dollars(Cluster.preset("dgx-h100"), 60.0, kind="spot")
    assert "on-demand ($2.99)" in refused.value.possible
    with pytest.raises(ClusterError, match="does not say what power"):
        kilowatt_hours(MINE.replace(power=Power()), 60.0)


@pytest.mark.parametrize(
    "made", [lambda: Prices(spot=-1.0), lambda: Power(device=-1.0), lambda: Power(device=700.0, pue=0.9)]
)
def test_figures_that_cannot_be_are_refused(made):
    with pytest.raises(ClusterError, match=r"has (spot|device|pue)="):
        made()


def test_every_device_of_the_tables_has_one_power():
    devices = [device for power in table("power").values() for device in power["of"]]
    assert sorted(devices) == sorted(table("devices"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_cost_less_reserved_and_least_on_spot_and_say_where_prices_are_from(name):
    preset = Cluster.preset(name)
    prices = preset.prices
    assert bool(prices.source) == bool(preset.price)
    assert bool(prices.spot) == bool(prices.interruptions)
    if prices.reserved:
        assert prices.spot < prices.reserved < preset.price
    assert preset.power.source
    assert preset.power.watts > 0
