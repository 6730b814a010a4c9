"""Clusters as files: what is written reads back equal, and what cannot be read is told by name."""

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ClusterError
from shoal.spec.cluster import PRESETS, Cluster, Device, Host, Level
from shoal.spec.cluster.device import toml_of

RATES = st.floats(1e6, 1e18)
SECONDS = st.floats(0, 0.5)
SHARES = st.floats(1e-6, 1)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
CLUSTERS = st.builds(
    lambda levels, device, **fields: Cluster(levels=tuple(levels), device=device, **fields),
    levels=st.lists(
        st.builds(
            Level,
            name=TEXTS,
            devices=st.just(8),
            bandwidth=RATES,
            share=SHARES,
            latency=SECONDS,
            mesh=st.booleans(),
            reduces=st.booleans(),
            source=TEXTS,
        ),
        min_size=1,
        max_size=3,
    ),
    device=st.builds(
        Device,
        name=TEXTS,
        memory=RATES | st.integers(10**6, 10**15),
        bandwidth=RATES,
        peak=st.dictionaries(TEXTS, RATES, min_size=1, max_size=2),
        units=st.integers(1, 1000),
        tile=st.tuples(st.integers(1, 512), st.integers(1, 512)),
        dispatch=SECONDS,
    ),
    name=TEXTS,
    price=st.floats(0, 100),
    failures=st.floats(0, 1),
)


@given(CLUSTERS)
def test_a_file_gives_back_the_cluster_to_the_last_digit(tmp_path_factory, cluster):
    path = tmp_path_factory.mktemp("clusters") / "cluster.toml"
    cluster.write(path)
    assert Cluster.read(path) == cluster
    assert Cluster.parse(str(path)) == cluster


def test_a_file_may_leave_out_what_has_a_default(tmp_path):
    cluster = Cluster.preset("laptop")
    cluster.write(tmp_path / "whole.toml")
    short = (tmp_path / "whole.toml").read_text().partition("[host]")[0]
    (tmp_path / "short.toml").write_text(short)
    assert Cluster.read(tmp_path / "short.toml") == cluster.replace(host=Host())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_written_changed_and_read(tmp_path, name):
    path = tmp_path / "cluster.toml"
    Cluster.preset(name).write(path)
    assert Cluster.read(path) == Cluster.preset(name)
    assert Cluster.parse(f"{path}:2") == Cluster.preset(name, 2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda said: said.pop("levels"), "has no 'levels'"),
        (lambda said: said.update(levels=[]), "no levels of links"),
        (lambda said: said.update(levels=8), "levels=8"),
        (lambda said: said.update(pirce=2.0), "unknown key 'pirce' .did you mean 'price'"),
        (lambda said: said.update(price="2 dollars"), "price='2 dollars'"),
        (lambda said: said.update(price=-2.0), "price=-2"),
        (lambda said: said["device"].pop("memory"), "the device of .* has no 'memory'"),
        (lambda said: said["device"].update(memory=80), "memory=80"),
        (lambda said: said["device"].update(units=13.5), "units=13.5"),
        (lambda said: said["device"].update(units=True), "units=True"),
        (lambda said: said["device"].update(tile=[128]), "tile="),
        (lambda said: said["device"].update(peak={"bf16": "fast"}), "peak="),
        (lambda said: said["levels"][1].pop("bandwidth"), "level 2 of .* has no 'bandwidth'"),
        (lambda said: said["levels"][0].update(bandwith=1e9), "level 1 of .* unknown key 'bandwith'"),
        (lambda said: said["levels"][0].update(bandwidth=-1e9), "bandwidth=-1"),
        (lambda said: said["levels"][0].update(mesh=1), "mesh=1"),
        (lambda said: said["levels"][1].update(devices=12), "joins 12 devices"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_and_told_what(tmp_path, change, told):
    path = tmp_path / "cluster.toml"
    Cluster.preset("dgx-h100", 64).write(path)
    said = tomllib.loads(path.read_text())
    change(said)
    path.write_text(toml_of(said))
    with pytest.raises(ClusterError, match=told):
        Cluster.read(path)


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path):
    with pytest.raises(ClusterError, match="cannot be read: No such file"):
        Cluster.parse(str(tmp_path / "none.toml"))
    (tmp_path / "cluster.toml").write_text("name = dgx")
    with pytest.raises(ClusterError, match="is not TOML"):
        Cluster.read(tmp_path / "cluster.toml")
    with pytest.raises(ClusterError, match="cannot be written"):
        Cluster.preset("laptop").write(tmp_path)


def test_a_cluster_that_was_changed_is_another(tmp_path):
    cluster = Cluster.preset("dgx-h100", 64)
    slower = replace(cluster.levels[1], share=0.5)
    assert cluster.replace(levels=(cluster.levels[0], slower)) != cluster
    assert hash(Cluster.preset("dgx-h100", 64)) == hash(cluster)
