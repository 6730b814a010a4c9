"""Clusters: what they refuse, and how they are made larger and smaller."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ClusterError
from shoal.predict.cost.collectives import collective_seconds
from shoal.spec.cluster import Cluster, Device, Level
from shoal.spec.plan import Group

DEVICE = {"name": "d", "memory": 80e9, "bandwidth": 3e12, "peak": {"bf16": 1e15}, "units": 132}
INSIDE = Level(name="inside", devices=8, bandwidth=400e9)
POD = Level(name="pod", devices=64, bandwidth=50e9)
SPINE = Level(name="spine", devices=256, bandwidth=50e9, oversubscription=4.0)


def cluster(*levels, **fields):
    return Cluster(name="c", device=Device(**DEVICE), levels=levels or (INSIDE, POD, SPINE), **fields)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("memory", 80, "memory=80"),  # GB
        ("memory", -1e9, "memory=-1"),
        ("bandwidth", 3350.0, "bandwidth=3350"),  # GB/s
        ("peak", {"bf16": 989.0}, "peak.bf16=989"),  # TFLOP/s
        ("units", 0, "units=0"),
        ("product_share", 1.2, "product_share=1.2"),
        ("attention_share", 0.0, "attention_share=0"),
        ("launch", 2.0, "launch=2"),  # microseconds
        ("dispatch", -1e-6, "dispatch=-1"),
    ],
)
def test_a_device_refuses_what_no_device_has_and_names_it(field, value, named):
    with pytest.raises(ClusterError, match=f"the device d has {named}"):
        Device(**DEVICE | {field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bandwidth", 450.0),  # GB/s
        ("bandwidth", -1.0),
        ("devices", 0),
        ("share", 0.0),
        ("share", 1.5),
        ("reduction_share", 2.0),
        ("latency", 5.0),  # microseconds
        ("setup", -1e-6),
        ("half_size", -1.0),
        ("oversubscription", 0.5),  # upside down
    ],
)
def test_a_level_refuses_what_no_links_have_and_names_it(field, value):
    with pytest.raises(ClusterError, match=f"the level inside has {field}="):
        Level(**{"name": "inside", "devices": 8, "bandwidth": 400e9} | {field: value})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"price": -1.0}, "price=-1"),
        ({"failures": -1e-5}, "failures=-1e-05"),
        ({"reserved": 90e9}, "reserved=9"),
    ],
)
def test_a_cluster_refuses_figures_that_cannot_be(fields, named):
    with pytest.raises(ClusterError, match=f"c has {named}"):
        cluster(**fields)


def test_a_cluster_has_levels_that_are_made_of_whole_groups_of_the_one_within():
    with pytest.raises(ClusterError, match="no levels"):
        Cluster(name="c", device=Device(**DEVICE), levels=())
    with pytest.raises(ClusterError, match="joins 12 devices, and the level inside it joins 8"):
        cluster(INSIDE, Level(name="pod", devices=12, bandwidth=50e9))
    with pytest.raises(ClusterError, match="joins 8 devices, and the level inside it joins 64"):
        cluster(POD, INSIDE)
    with pytest.raises(ClusterError, match="joins 96 devices, and the level inside it joins 64"):
        cluster(INSIDE, POD, Level(name="row", devices=96, bandwidth=50e9), SPINE)
    assert cluster(INSIDE, POD, Level(name="row", devices=96, bandwidth=50e9)).devices == 96


@pytest.mark.parametrize(
    ("devices", "joined"),
    [
        (1, (1, 1, 1)),
        (3, (3, 3, 3)),
        (8, (8, 8, 8)),
        (24, (8, 24, 24)),
        (64, (8, 64, 64)),
        (96, (8, 64, 96)),
        (128, (8, 64, 128)),
        (1024, (8, 64, 1024)),
    ],
)
def test_levels_are_cut_to_part_of_a_node_whole_nodes_or_whole_pods(devices, joined):
    found = cluster().with_devices(devices)
    assert tuple(level.devices for level in found.levels) == joined
    assert found.devices == devices
    assert found.with_devices(devices) == found


@given(st.integers(1, 200))
def test_whole_nodes_are_accepted_and_the_last_pod_may_be_a_part(nodes):
    found = cluster().with_devices(8 * nodes)
    assert [level.devices for level in found.levels] == [8, min(64, 8 * nodes), 8 * nodes]


@given(st.integers(9, 5000).filter(lambda devices: devices % 8))
def test_a_part_of_a_second_node_is_refused_with_what_would_do(devices):
    with pytest.raises(ClusterError, match="that inside joins") as refused:
        cluster().with_devices(devices)
    for possible in (devices // 8 * 8, devices // 8 * 8 + 8):
        assert str(possible) in refused.value.possible
        assert cluster().with_devices(possible).devices == possible


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 40))
def test_failed_and_spare_nodes_stand_beside_the_devices_that_plans_use(failed, spare, nodes):
    made = cluster(failed=failed, spare=spare)
    assert made.devices == 8 * (32 - failed - spare)
    found = made.with_devices(8 * nodes)
    assert (found.devices, found.failed, found.spare) == (8 * nodes, failed, spare)
    assert found.levels[-1].devices == 8 * (nodes + failed + spare)
    assert found.with_devices(8 * nodes) == found
    assert made.with_devices(4).levels[-1].devices == 4  # of one node, beside which nothing stands


@pytest.mark.parametrize("fields", [{"failed": -1}, {"spare": -1}, {"failed": 16, "spare": 16}])
def test_numbers_of_failed_and_spare_nodes_that_cannot_be_are_refused(fields):
    with pytest.raises(ClusterError, match=r"c has (failed|spare|failed \+ spare)="):
        cluster(**fields)


def test_no_devices_are_refused_and_so_are_more_than_any_links_join():
    with pytest.raises(ClusterError, match="devices=0"):
        cluster().with_devices(0)
    with pytest.raises(ClusterError, match="no links to others"):
        cluster(INSIDE).with_devices(16)


def test_clusters_that_differ_in_what_a_fit_changes_have_different_hashes():
    # A fit looks up thousands of them in caches: if their hashes were equal, each would be compared with all.
    cluster = Cluster.preset("laptop")
    inner, *others = cluster.levels
    varied = [
        replace(cluster, levels=(replace(inner, **{name: value}), *others))
        for name, value in {"latency": 1e-7, "bandwidth": 1e9, "setup": 1e-7, "copy_rate": 1e9}.items()
    ]
    varied += [replace(cluster, jitter=0.15), replace(cluster, noise=0.15)]
    varied.append(replace(cluster, device=replace(cluster.device, launch=1.5e-7)))
    assert len({hash(each) for each in (cluster, *varied)}) == 1 + len(varied)


def test_a_mesh_that_is_cut_keeps_the_links_between_those_that_are_left():
    mesh = Level(name="mesh", devices=8, bandwidth=7 * 64e9, mesh=True)
    assert cluster(mesh).with_devices(3).levels[0].bandwidth == pytest.approx(2 * 64e9)
    assert cluster(INSIDE).with_devices(3).levels[0].bandwidth == INSIDE.bandwidth


@pytest.mark.parametrize("members", range(2, 9))
def test_a_group_in_a_mesh_uses_the_links_among_its_members_and_in_a_switch_all_of_them(members):
    mesh = Level(name="mesh", devices=8, bandwidth=7 * 64e9, mesh=True, share=0.5)
    assert mesh.rate(members) == pytest.approx((members - 1) * 64e9 * 0.5)
    assert INSIDE.rate(members) == pytest.approx(400e9 * INSIDE.share)


def test_an_oversubscribed_level_carries_so_much_less():
    assert SPINE.rate(2) == pytest.approx(POD.rate(2) / 4)


@given(
    st.integers(1, 100),
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]),
    st.floats(8, 1e9),
)
def test_collectives_over_a_part_of_a_pod_have_a_time(nodes, name, size):
    made = cluster().with_devices(8 * nodes)
    seconds = collective_seconds(name, size, Group(made.devices), made)
    assert 0 < seconds < math.inf
    apart = Group(nodes, stride=8)  # one rank of each node
    assert 0 <= collective_seconds(name, size, apart, made) < math.inf
