"""All-reduce by an aggregator: results, bytes on each link, and errors that name it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from multiprocessing.connection import Connection
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collective_cases import run_cases
from fault_ranks import HEARTBEAT, Ended, Ranks, failure_of, form

from shoal.collectives import Aggregator, Options, is_built
from shoal.collectives.tcp_store import AGGREGATOR_SECRET_FILE
from shoal.errors import CollectiveError, ConfigError
from shoal.testing import RankPool
from shoal.testing.hosts import Hosts, enter_host, why_no_hosts

pytestmark = pytest.mark.skipif(not is_built(), reason="the native core was not built")

IN_NETWORK = {"all_reduce": "in-network"}
SOON = 30.0
"""Seconds after which every rank has to know that the aggregator is gone, on a busy machine."""


@pytest.fixture(scope="module")
def pool():
    with RankPool("shoal") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def aggregator():
    with Aggregator("127.0.0.1:0") as here:
        yield here.address


# --- results ---


@pytest.mark.parametrize(("ranks", "ranks_per_host"), [(2, 1), (3, 1), (4, 2), (3, 2)])
def test_an_aggregator_gives_what_one_process_computes(pool, aggregator, ranks, ranks_per_host):
    pool.run(run_cases, ranks, 7, 8, IN_NETWORK, ranks_per_host, True, None, aggregator)


def group_of_hosts(ranks_per_host, address):
    hosts = {"SHOAL_HOST_ID": f"host {dist.get_rank() // ranks_per_host}", "SHOAL_INTERFACE": "127.0.0.1"}
    with mock.patch.dict(os.environ, hosts):
        return dist.new_group(pg_options=Options(algorithms=IN_NETWORK, aggregator=address))


def inputs(ranks, count, dtype):
    """Every rank's numbers, of very different sizes: sums in another order differ."""
    made = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(rank)
        exponents = torch.randint(-8, 9, (count,), generator=generator)
        made.append(torch.randn(count, generator=generator).mul(2.0**exponents).to(dtype))
    return made


def reduce_floats(address, ranks_per_host, count, dtype):
    group = group_of_hosts(ranks_per_host, address)
    results = []
    for _ in range(2):
        tensor = inputs(dist.get_world_size(), count, dtype)[dist.get_rank()]
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert work.algorithm == "in-network"
        results.append(tensor)
    dist.destroy_process_group(group)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_sums_are_folded_in_the_order_of_hosts_and_equal_in_every_bit(pool, aggregator, dtype):
    count = 1_300_003  # several chunks in every window, and a part of one
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    expected = reduce(torch.add, [each.to(wide) for each in inputs(3, count, dtype)]).to(dtype)
    for results in pool.run(reduce_floats, 3, aggregator, 1, count, dtype):
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_of_a_host_fold_first_and_all_get_the_same_bits(pool, aggregator, ranks):
    count = 900_001
    exact = sum(each.double() for each in inputs(ranks, count, torch.float32))
    size = sum(each.double().abs() for each in inputs(ranks, count, torch.float32))
    told = pool.run(reduce_floats, ranks, aggregator, 2, count, torch.float32)
    first = told[0][0]
    assert all(torch.equal(result, first) for results in told for result in results)
    # Each of the n - 1 additions rounds by half of the last place of a sum that is no larger than `size`.
    assert bool(((first - exact).abs() <= (ranks - 1) * 2.0**-24 * 1.01 * size).all())


# --- what crosses the links ---

NO_HOSTS = why_no_hosts()
PORT = 29_500
REDUCED_BYTES = 8 << 20


@contextmanager
def aggregating(host: int | None = None, address: str = "127.0.0.1") -> Iterator[tuple[str, int]]:
    """An aggregator's address and process, in a network namespace if one is given."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=aggregate, args=(theirs, host, address), daemon=True)
    process.start()
    assert ours.poll(60)
    assert process.pid is not None
    try:
        yield ours.recv(), process.pid
    finally:
        process.kill()
        process.join()


def aggregate(tell: Connection, host: int | None, address: str) -> None:
    if host is not None:
        enter_host(host)
    with Aggregator(f"{address}:0") as here:
        tell.send(here.address)
        here.serve()


def reduce_on_host(processes, ranks_per_host, address, aggregator):
    """All-reduces between namespaces; every rank is in a new process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # those of the loopback have to be formed before the namespace is left
    dist.destroy_process_group()
    enter_host(processes[rank // ranks_per_host])
    environment = {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    with mock.patch.dict(os.environ, environment):
        options = Options(algorithms=IN_NETWORK, aggregator=aggregator)
        dist.init_process_group("shoal", rank=rank, world_size=size, pg_options=options)
        tensor = torch.full((REDUCED_BYTES // 4,), float(rank + 1))
        dist.all_reduce(tensor)
        dist.destroy_process_group()
    return bool((tensor == sum(range(size + 1))).all())


@pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS or "hosts can be emulated")
@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(3, 1), (2, 2)])
def test_each_byte_crosses_a_hosts_link_once_up_and_once_down(hosts, ranks_per_host):
    with Hosts(hosts) as network, RankPool("gloo") as fresh:
        before = [network.traffic(host) for host in range(hosts)]
        processes = [network.process(host) for host in range(hosts)]
        with aggregating(network.switch, network.switch_address) as (address, _):
            ranks = hosts * ranks_per_host
            reduced = fresh.run(
                reduce_on_host, ranks, processes, ranks_per_host, network.addresses[0], address
            )
        assert all(reduced)
        for host in range(hosts):
            traffic = network.traffic(host) - before[host]
            # The store, the handshakes and the heartbeats are beside it. A ring of three hosts has 4/3.
            assert REDUCED_BYTES <= traffic.sent_payload < 1.02 * REDUCED_BYTES
            assert REDUCED_BYTES <= traffic.received_payload < 1.02 * REDUCED_BYTES


# --- errors ---


def reduce_until_it_fails(tell: Connection, rank: int, size: int, store: str, address: str) -> None:
    form(rank, size, store, is_one_host=False, algorithms=IN_NETWORK, aggregator=address)
    tensor = torch.zeros(4 << 20)
    dist.all_reduce(tensor)
    tell.send("ready")
    try:
        while True:
            dist.all_reduce(tensor)
    except CollectiveError as failure:
        tell.send(Ended(time.monotonic(), failure.fault, failure.rank, str(failure)))


def test_a_killed_aggregator_is_named_by_every_rank_soon():
    with aggregating() as (address, process), Ranks(reduce_until_it_fails, 3, address) as ranks:
        ranks.hear()
        os.kill(process, signal.SIGKILL)
        moment = time.monotonic()
        for ended in ranks.hear():
            assert (ended.fault, ended.rank) == ("peer lost", -1), ended
            assert f"the aggregator {address}" in ended.text
            assert "shoal aggregate" in ended.text
            assert ended.moment - moment < SOON


def test_a_stopped_aggregator_is_given_up_after_the_heartbeat():
    with aggregating() as (address, process), Ranks(reduce_until_it_fails, 3, address) as ranks:
        ranks.hear()
        os.kill(process, signal.SIGSTOP)
        moment = time.monotonic()
        for ended in ranks.hear():
            assert (ended.fault, ended.rank) == ("peer stopped", -1), ended
            assert f"the aggregator {address} gave no sign of life" in ended.text
            assert ended.moment - moment < HEARTBEAT + SOON


def compute_for_long(tell: Connection, rank: int, size: int, store: str, address: str) -> None:
    form(rank, size, store, is_one_host=False, algorithms=IN_NETWORK, aggregator=address)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    time.sleep(3 * HEARTBEAT * (1 + rank))  # the others wait for longer than a heartbeat too
    dist.all_reduce(tensor)
    tell.send(tensor.unique().tolist())
    tell.poll(None)  # until both have told: who ends before the other has its result is a lost rank


def test_ranks_that_compute_for_longer_than_a_heartbeat_go_on(aggregator):
    with Ranks(compute_for_long, 2, aggregator) as ranks:
        assert ranks.hear() == [[4.0], [4.0]]


def test_a_killed_rank_is_named_and_not_the_aggregator():
    with aggregating() as (address, _), Ranks(reduce_until_it_fails, 3, address) as ranks:
        ranks.hear()
        ranks.send(1, signal.SIGKILL)
        for ended in ranks.hear(0, 2):
            assert (ended.fault, ended.rank) == ("peer lost", 1), ended


def reduce_different_sizes(tell: Connection, rank: int, size: int, store: str, address: str) -> None:
    form(rank, size, store, is_one_host=False, algorithms=IN_NETWORK, aggregator=address)
    tell.send(failure_of(lambda: dist.all_reduce(torch.zeros(1000 + (rank == 1)))))


def test_different_sizes_are_an_error_and_no_hang(aggregator):
    with Ranks(reduce_different_sizes, 3, aggregator) as ranks:
        for failure in ranks.hear():
            assert failure.fault == "mismatch", failure
            assert "host 1" in str(failure)


def reduce_once(tell: Connection, rank: int, size: int, store: str, address: str) -> None:
    form(rank, size, store, is_one_host=False, algorithms=IN_NETWORK, aggregator=address)
    tell.send(failure_of(lambda: dist.all_reduce(torch.zeros(10))))


def test_an_aggregator_that_is_not_there_is_named_with_what_to_change():
    with Ranks(reduce_once, 2, "127.0.0.1:9") as ranks:
        for failure in ranks.hear():
            assert failure.fault == "refused", failure
            assert "the aggregator 127.0.0.1:9 cannot be reached: Connection refused" in str(failure)
            assert "SHOAL_AGGREGATOR" in str(failure)


def test_an_aggregator_with_a_secret_takes_those_who_know_it(tmp_path, pool):
    files = {name: tmp_path / name for name in ("secret", "other")}
    for number, file in enumerate(files.values()):
        file.touch(mode=0o600)
        file.write_bytes(bytes([number]) * 32)
    with mock.patch.dict(os.environ, {AGGREGATOR_SECRET_FILE: str(files["secret"])}):
        closed = Aggregator("127.0.0.1:0")
    with closed, Aggregator("127.0.0.1:0") as open_to_all:
        assert pool.run(reduce_with_secret, 2, closed.address, str(files["secret"])) == ["3.0", "3.0"]
        for address, file, told in (
            (closed.address, str(files["other"]), "does it know the secret in the rank's SHOAL_AGGREGATOR"),
            (closed.address, "", "or does it ask for a secret?"),
            (open_to_all.address, str(files["secret"]), "does it know the secret in the rank's SHOAL_AGG"),
        ):
            for failure in pool.run(reduce_with_secret, 2, address, file):
                assert f"the aggregator {address} did not let this rank in" in failure
                assert told in failure


def reduce_with_secret(address, file):
    with mock.patch.dict(os.environ, {AGGREGATOR_SECRET_FILE: file}):
        group = group_of_hosts(1, address)
        tensor = torch.full((4,), dist.get_rank() + 1.0)
        try:
            dist.all_reduce(tensor, group=group)
        except CollectiveError as error:
            return str(error)
        return str(float(tensor[0]))


def test_a_wrong_address_is_refused_at_once():
    with pytest.raises(ConfigError, match="HOST:PORT"):
        Options(aggregator="192.0.2.1")
    with pytest.raises(ConfigError, match="has no aggregator"):
        Options(algorithms=IN_NETWORK)
    with pytest.raises(ConfigError, match="no address"):
        Aggregator("no-such-host.invalid:4100")
    with Aggregator("127.0.0.1:0") as here, pytest.raises(ConfigError, match="in use"):
        Aggregator(here.address)


def choose(address):
    group = group_of_hosts(1, address)
    work = dist.all_reduce(torch.zeros(100), group=group, async_op=True)
    work.wait()
    one_host = dist.new_group(pg_options=Options(algorithms=IN_NETWORK, aggregator=address))
    inside = dist.all_reduce(torch.zeros(100), group=one_host, async_op=True)
    inside.wait()
    return work.algorithm, inside.algorithm


def test_ranks_of_one_host_do_without_the_aggregator(pool, aggregator):
    assert pool.run(choose, 2, aggregator) == [("in-network", "one-shot")] * 2
