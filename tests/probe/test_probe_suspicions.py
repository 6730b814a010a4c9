"""What looks wrong is said, and what does not is not."""

from dataclasses import replace

import pytest

from shoal.machine.probe.measurements import HostRates, Measurements
from shoal.machine.probe.probe import suspicions
from shoal.machine.probe.sheet import Sheet, network_rate, rdma_adapters

SHEET = Sheet(
    device="NVIDIA H100 80GB HBM3",
    memory=80e9,
    units=132,
    on_cores=False,
    devices=32,
    devices_per_host=8,
    cores=64,
    inside="scale-up",
    network=50e9,
    rdma=("mlx5_0", "mlx5_1"),
    source="a test",
)
SOUND = Measurements(
    products=(),
    passes=(),
    attention=(),
    launch=2e-6,
    dispatch=6e-6,
    contention=0.1,
    hosts=tuple(
        HostRates(pairing, dict.fromkeys(hosts, 300e9))
        for pairing, hosts in (("even", range(4)), ("odd", range(4)), ("far", range(4)), ("alone", (0, 2)))
    ),
    paces=(600e12,) * 32,
)


def said(measured=SOUND, sheet=SHEET, backend="nccl", environment=None):
    return list(suspicions(measured, sheet, backend, environment or {}))


def with_rates(**rates):
    hosts = [replace(each, rates={**each.rates, **rates.get(each.pairing, {})}) for each in SOUND.hosts]
    return replace(SOUND, hosts=tuple(hosts))


def test_a_sound_machine_gives_no_warning():
    assert said() == []


@pytest.mark.parametrize(
    ("backend", "environment", "told"),
    [
        ("gloo", {}, "the backend gloo uses TCP"),
        ("nccl", {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE is set"),
        ("nccl", {"NCCL_NET": "Socket"}, "NCCL_NET=Socket"),
    ],
)
def test_tcp_where_there_are_rdma_adapters_is_told_with_their_names(backend, environment, told):
    (warning,) = said(backend=backend, environment=environment)
    assert told in warning
    assert "mlx5_0" in warning
    assert said(sheet=replace(SHEET, rdma=()), backend=backend, environment=environment) == []


def test_two_hosts_alone_are_told_not_to_describe_a_fabric():
    (warning,) = said(replace(SOUND, hosts=()), replace(SHEET, devices=16))
    assert "there are only two hosts" in warning


def test_a_rank_is_named_that_is_more_than_a_tenth_off_the_pace():
    (warning,) = said(replace(SOUND, paces=(600e12,) * 30 + (530e12, 560e12)))
    assert "rank 30 computes 12% slower" in warning


def test_a_host_that_is_slow_with_both_neighbours_has_a_slow_adapter():
    slow = with_rates(even={2: 150e9, 3: 150e9}, odd={1: 150e9, 2: 150e9})
    (warning,) = said(slow)
    assert "host 2 reaches 150.00 GB/s with both neighbours" in warning
    assert "adapters" in warning


def test_hosts_that_are_slow_with_one_neighbour_have_a_slow_link_between_them():
    (warning,) = said(with_rates(odd={1: 150e9, 2: 150e9}))
    assert "hosts 1, 2 are slow with one neighbour only" in warning


def test_bandwidth_that_falls_when_all_far_hosts_send_is_oversubscription():
    (warning,) = said(with_rates(far=dict.fromkeys(range(4), 100e9)))
    assert "oversubscribed 3.0 times" in warning


def test_ranks_that_outnumber_their_cores_are_told():
    sheet = replace(SHEET, on_cores=True, devices=4, devices_per_host=4, units=1, cores=2, rdma=())
    (warning,) = said(replace(SOUND, hosts=(), paces=(1e11,) * 4), sheet)
    assert "4 ranks of 1 run on 2 cores" in warning


def test_ranks_whose_cores_others_use_are_told():
    sheet = replace(SHEET, on_cores=True, devices=2, devices_per_host=2, units=1, cores=2, rdma=())
    measured = replace(SOUND, hosts=(), paces=(1e11,) * 2, presence=(0.97, 0.6))
    (warning,) = said(measured, sheet)
    assert "rank 1 had a core for 60%" in warning


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_rate_of_a_host_is_that_of_its_rdma_adapters_where_it_has_any(tmp_path):
    assert network_rate(tmp_path) == 0
    (tmp_path / "net/eth0/device").mkdir(parents=True)
    write(tmp_path / "net/eth0/speed", "25000\n")
    write(tmp_path / "net/lo/speed", "10000\n")  # no hardware behind it
    write(tmp_path / "net/eth1/speed", "-1\n")
    assert network_rate(tmp_path) == 25e9 / 8
    for name in ("mlx5_0", "mlx5_1"):
        write(tmp_path / f"infiniband/{name}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    assert network_rate(tmp_path) == 2 * 400e9 / 8
    assert rdma_adapters(tmp_path) == ("mlx5_0", "mlx5_1")
