"""Files of owners: the keys are documented, errors say units and examples, unlikely figures are told."""

import dataclasses
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from test_cluster_files import CLUSTERS

from shoal.errors import ClusterError
from shoal.spec.cluster import PRESETS, Calibrated, Cluster, Device, Host, Level, Part, Power, Prices
from shoal.spec.cluster.device import commented_toml
from shoal.spec.cluster.money import derived
from shoal.spec.cluster.plausible import implausible
from shoal.spec.cluster.tables import keys_of

TABLES = (Calibrated, Cluster, Device, Host, Level, Part, Power, Prices)
MINE = Cluster.preset("dgx-h100", 64)


@pytest.mark.parametrize("kind", TABLES)
def test_every_key_has_a_unit_and_an_example_that_can_be_read(kind):
    assert list(keys_of(kind)) == [field.name for field in dataclasses.fields(kind)]
    for name, (unit, example) in keys_of(kind).items():
        assert unit
        if not example.startswith("[") or name == "tile":
            tomllib.loads(f"{name} = {example}")


def test_examples_of_needed_keys_make_a_cluster():
    def table(kind):
        needed = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
        lines = (f"{name} = {keys_of(kind)[name].example}" for name in needed)
        return "\n".join(line for line in lines if "[[" not in line and "= [" not in line)

    text = f'name = "mine"\ndevice = "h100"\n[[levels]]\n{table(Level)}'
    assert Cluster.of(tomllib.loads(text), "examples").devices == 8
    assert Device(**tomllib.loads(table(Device))).name == "H100-SXM"


@pytest.mark.parametrize("kind", TABLES)
def test_a_key_that_is_missing_is_told_with_its_unit_and_an_example(kind):
    said = tomllib.loads(commented_toml(MINE.replace(parts=(Part(device=MINE.device, devices=64),))))
    said["parts"][0]["device"] = said["device"]
    tables = {"Cluster": said, "Device": said["device"], "Level": said["levels"][0], "Part": said["parts"][0]}
    needed = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    for name in needed:
        if (kind, name) == (Part, "device"):
            continue  # that of the Cluster
        table = tables[kind.__name__]
        value = table.pop(name)
        with pytest.raises(ClusterError, match=f"has no '{name}'") as refused:
            Cluster.of(said, "mine.toml")
        assert keys_of(kind)[name].unit in refused.value.possible
        assert keys_of(kind)[name].example in refused.value.change
        table[name] = value
    assert Cluster.of(said, "mine.toml").devices == 64


@given(CLUSTERS)
def test_tables_of_a_cluster_make_it_again(cluster):
    assert Cluster.of(cluster.described(), "tables") == cluster
    assert Cluster.of(dataclasses.asdict(cluster), "tables") == cluster


@given(CLUSTERS)
def test_text_to_be_edited_loses_no_digit(cluster):
    assert Cluster.of(tomllib.loads(commented_toml(cluster)), "text") == cluster


def test_text_to_be_edited_has_units_and_short_numbers():
    lines = commented_toml(MINE).splitlines()
    assert any(line.split() == ["bf16", "=", "989e12", "#", "FLOP/s"] for line in lines)
    assert any(line.startswith("price = 2.99 ") and "# dollars" in line for line in lines)
    assert max(len(line) for line in lines if "source" not in line) <= 110


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_looks_wrong_about_a_preset(name):
    assert implausible(Cluster.preset(name)) == []


def outside(**changes):
    inner, last = MINE.levels
    return MINE.replace(levels=(inner, replace(last, **changes)))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (outside(bandwidth=400e9), "400 Gbit/s are 5e+10"),
        (outside(latency=14e-3), "latency=0.014 s"),
        (outside(share=0.05), "share=0.05"),
        (outside(oversubscription=700.0), "7 : 1"),
        (MINE.replace(levels=(replace(MINE.levels[0], bandwidth=7e12), MINE.levels[1])), "is too much"),
        (
            MINE.replace(levels=(replace(MINE.levels[0], bandwidth=30e9), MINE.levels[1])),
            "more than the level inside",
        ),
        (MINE.replace(device=replace(MINE.device, memory=16e9)), "a H100-SXM-80GB has 8.5"),
        (MINE.replace(device=replace(MINE.device, peak={"bf16": 1979e12})), "with sparsity"),
        (MINE.replace(device=replace(MINE.device, bandwidth=26.8e12)), "more than any device has"),
        (MINE.replace(device=replace(MINE.device, dispatch=0.04)), "write microseconds"),
        (MINE.replace(device=replace(MINE.device, product_share=0.1)), "product_share=0.1"),
        (MINE.replace(price=98.0), "a node's price / 8"),
        (MINE.replace(failures=0.5), "fails every 2 hours"),
        (MINE.replace(jitter=0.5), "2 % are 0.02"),
        (MINE.replace(reserved=40e9), "more than a quarter"),
        (MINE.replace(prices=Prices(spot=5.0, interruptions=1e-4)), "more than the price on demand"),
        (MINE.replace(prices=Prices(spot=1.0)), "no prices.interruptions"),
        (MINE.replace(power=Power(device=10200.0)), "a node's power / 8"),
        (MINE.replace(host=replace(MINE.host, memory=64e9)), "host.memory"),
        (MINE.replace(host=replace(MINE.host, devices=3)), "host.devices=3"),
        (
            MINE.replace(
                parts=(
                    Part(device=MINE.device, devices=56),
                    Part(device=replace(MINE.device, memory=16e9), devices=8),
                )
            ),
            "a part's device has memory",
        ),
    ],
)
def test_unlikely_figures_are_told_with_what_may_have_been_meant(made, told):
    (warning,) = [each for each in implausible(made) if told in each]
    assert warning


def test_what_follows_is_counted_over_the_parts_that_work():
    a100 = Device.preset("a100-80")
    parts = (Part(device=MINE.device, devices=32), Part(device=a100, devices=16, pace=0.5))
    found = derived(MINE.replace(failed=1, spare=1, parts=parts, price=2.0))
    assert (found.devices, found.nodes, found.paid) == (48, 6, 56)
    assert found.peak["bf16"] == pytest.approx(32 * 989e12 + 16 * 156e12)
    assert "fp8" not in found.peak
    assert found.memory_of_all == 32 * MINE.device.memory + 16 * a100.memory
    assert found.memory == min(MINE.device.memory, a100.memory) - MINE.reserved
    assert found.network == 8 * 50e9
    assert found.dollars == 2.0 * 56
    assert found.kilowatts == pytest.approx(48 * MINE.power.watts / 1e3)
    assert found.between_failures == pytest.approx(3600 / (48 * MINE.failures))
    alone = derived(Cluster.preset("laptop"))
    assert (alone.network, alone.dollars, alone.between_failures) == (None, None, None)
