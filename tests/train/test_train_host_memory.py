"""Checkpoints of which each host keeps a part: whichever host is lost, the others have all of it."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from shoal.checkpoint import Piece, Saver, SingleProcess, StoreCoordinator, checkpoints, load, verify
from shoal.launch.gate import Gate
from shoal.launch.memory_files import files_service
from shoal.train.host_memory import HostMemory

HOSTS, RANKS, ELEMENTS = 3, 2, 600
VALUES = torch.arange(float(ELEMENTS))


@contextmanager
def hosts_of(folder, count=HOSTS):
    """The environments of the ranks of some hosts, whose launchers serve the files in their memory."""
    token = folder / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    gates, environments = [], []
    for host in range(count):
        (folder / str(host)).mkdir()
        listening = socket.create_server(("127.0.0.1", 0))
        gates.append(Gate(listening, b"t" * 40, {"files": files_service(folder / str(host))}))
        environments.append({"SHOAL_PEER": f"127.0.0.1:{gates[-1].port}", "SHOAL_TOKEN_FILE": str(token)})
    yield environments
    for gate in gates:
        gate.close()


def on_ranks(hosts, work):
    """What `work` returns for each rank of these hosts, in threads; it gets host, memory and coordinator."""
    store, found = HashStore(), {}
    size = len(hosts) * RANKS

    def one(rank):
        host, folder, environment = hosts[rank // RANKS]
        coordinator = StoreCoordinator(store, rank, size)
        found[rank] = work(host, HostMemory(folder, coordinator, environment), coordinator)

    threads = [threading.Thread(target=one, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


def save(memory, coordinator, step):
    share = ELEMENTS // coordinator.size
    start = coordinator.rank * share
    mine = VALUES[start : start + share] + step
    saver = Saver()
    saver.spread = memory
    piece = Piece("x", (ELEMENTS,), start, start + share, mine)
    return saver.save(memory.directory, step, [piece], {"step": step}, coordinator)


def loaded(path):
    tensor = torch.zeros(ELEMENTS)
    load(path, [Piece.whole("x", tensor)], SingleProcess())
    return tensor


@pytest.mark.parametrize("lost", range(HOSTS))
def test_the_loss_of_any_host_loses_no_file(tmp_path, lost):
    with hosts_of(tmp_path) as environments:
        hosts = [(host, tmp_path / str(host), environments[host]) for host in range(HOSTS)]
        for step in (1, 2):
            on_ranks(hosts, lambda host, memory, ranks, step=step: save(memory, ranks, step))
        held = [path for host in range(HOSTS) for path in checkpoints(tmp_path / str(host))]
        assert len(held) == HOSTS, "each host keeps the newest only"
        assert all(len(list(path.glob("rank-*"))) == 2 * RANKS for path in held), "its own and a neighbour's"

        def take_up(host, memory, ranks):
            (identity,) = memory.find().values()
            return memory.fetch(identity)

        for path in on_ranks([each for each in hosts if each[0] != lost], take_up):
            verify(path)
            assert torch.equal(loaded(path), VALUES + 2)


def test_a_host_that_comes_gets_everything_and_two_lost_neighbours_are_too_many(tmp_path):
    with hosts_of(tmp_path, 4) as environments:
        hosts = [(host, tmp_path / str(host), environments[host]) for host in range(4)]
        on_ranks(hosts[:HOSTS], lambda host, memory, ranks: save(memory, ranks, 5))
        assert all(not found for found in on_ranks(hosts[2:], lambda host, memory, ranks: memory.find()))

        def take_up(host, memory, ranks):
            ((name, identity),) = memory.find().items()
            assert name.name == "step-00000005"
            return memory.fetch(identity)

        found = on_ranks([hosts[0], hosts[1], hosts[3]], take_up)
        assert torch.equal(loaded(found[-1]), VALUES + 5)
        assert found[-1].parent == tmp_path / "3"


def test_a_file_that_was_changed_is_not_taken_from_another_host(tmp_path):
    with hosts_of(tmp_path, 2) as environments:
        hosts = [(host, tmp_path / str(host), environments[host]) for host in range(2)]
        (first,) = set(on_ranks(hosts[:1], lambda host, memory, ranks: save(memory, ranks, 5)))
        file = next(first.glob("rank-*"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

        def take_up(host, memory, ranks):
            (identity,) = memory.find().values()
            try:
                return memory.fetch(identity)
            except Exception as error:
                return error

        for error in on_ranks(hosts, take_up):
            assert "is not what was written" in str(error)
