"""Clocks are compared over real sockets: shifted ones, lost packets, strangers, and ranks of one host."""

import os
import socket
import time

import pytest

from shoal.checkpoint import ProcessGroupCoordinator
from shoal.record import AppendFile, ClockExchange, exchange_clocks
from shoal.spec.timeline.timeline import fit, read_ties
from shoal.testing.hosts import Hosts, enter_host, why_no_hosts


def shifted():
    """A clock that is 3,000 s ahead and runs 50 us a second too fast."""
    return 3_000_000_000_000 + round(time.perf_counter_ns() * (1 + 50e-6))


def asked(tmp_path, told, clock, seconds, every=0.02):
    file = AppendFile(tmp_path / "clock-00001.jsonl", "clocks", pytest.fail)
    asker = ClockExchange(clock)
    asker.ask(*told, file, host="b", reference="a", every=every)
    time.sleep(seconds)
    asker.close()
    return read_ties(tmp_path)


def test_a_shifted_clock_that_drifts_is_measured_to_200_us(tmp_path):
    answerer = ClockExchange()
    ties = asked(tmp_path, answerer.answer("127.0.0.1"), shifted, 0.6)
    now = shifted()
    found = fit(ties)
    answerer.close()
    expected = (time.perf_counter_ns() - shifted() - found.base_ns) / 1e9
    assert len(ties) >= 5
    assert found.offset(now) == pytest.approx(expected, abs=200e-6)


def test_strangers_get_no_answer(tmp_path):
    answerer = ClockExchange()
    address, port, token = answerer.answer("127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        for packet in (b"", b"x" * 24, bytes(24), token):
            stranger.sendto(packet, (address, port))
        with pytest.raises(TimeoutError):
            stranger.recv(100)
    assert asked(tmp_path, (address, port, token), time.perf_counter_ns, 0.2)
    answerer.close()


def test_without_an_answer_nothing_is_written_and_nothing_fails(tmp_path):
    answerer = ClockExchange()
    told = answerer.answer("127.0.0.1")
    answerer.close()
    assert asked(tmp_path, told, time.perf_counter_ns, 0.1) == []


def as_a_rank(folder, hosts):
    """Be a rank whose host has a name; return whether it measures."""
    ranks = ProcessGroupCoordinator()
    os.environ["SHOAL_HOST_ID"] = hosts[ranks.rank]
    try:
        exchange = exchange_clocks(ranks, folder, ranks.rank, print, towards="127.0.0.1", every=0.05)
        time.sleep(0.3)
        ranks.all_gather_object(None)
        exchange.close()
    finally:
        del os.environ["SHOAL_HOST_ID"]


@pytest.mark.parametrize(("hosts", "files"), [("aabb", [2]), ("aaaa", [])])
def test_one_rank_of_every_other_host_asks_rank_0(ranks, tmp_path, hosts, files):
    ranks.run(as_a_rank, 4, tmp_path, hosts)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"clock-{rank:05d}.jsonl" for rank in files]
    for tie in read_ties(tmp_path):
        assert (tie.host, tie.reference) == ("b", "a")
        assert abs(tie.offset_ns) < 200_000  # they have one clock


def on_host(process, work):
    """Run a function in a process of its own on a host; return its number."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            enter_host(process)
            work()
            status = 0
        finally:
            os._exit(status)
    return child


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
def test_clocks_of_two_hosts_are_compared_over_a_network(tmp_path):
    read, write = os.pipe()

    def answer():
        told = ClockExchange().answer(hosts.addresses[1])
        os.write(write, f"{told[0]} {told[1]} {told[2].hex()}".encode())
        time.sleep(5)

    def ask():
        address, port, token = os.read(read, 200).decode().split()
        asked(tmp_path, (address, int(port), bytes.fromhex(token)), shifted, 3, every=0.2)

    with Hosts(2) as hosts:
        children = [on_host(hosts.process(0), answer), on_host(hosts.process(1), ask)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    found = fit(read_ties(tmp_path))
    now = time.perf_counter_ns()
    assert found.offset(shifted()) == pytest.approx((now - shifted() - found.base_ns) / 1e9, abs=200e-6)
