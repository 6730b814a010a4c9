"""Checkpoints of which each host keeps a part: whichever host is lost, the others have all of it."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from shoal.checkpoint import Piece, Saver, StoreCoordinator, checkpoints, load_verified, read_manifest
from shoal.errors import CheckpointError, CorruptCheckpointError
from shoal.launch.hosts.gate import Gate
from shoal.launch.hosts.memory_files import files_service
from shoal.train.peer_checkpoints import HostMemory

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


def on_ranks(hosts, work, others=()):
    """What `work` returns for each rank of these hosts, in threads; it gets host, memory and coordinator."""
    store, found = HashStore(), {}
    size = len(hosts) * RANKS

    def one(rank):
        host, folder, environment = hosts[rank // RANKS]
        coordinator = StoreCoordinator(store, rank, size)
        found[rank] = work(host, HostMemory(folder, coordinator, others, environment), coordinator)

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


def take_up(memory, coordinator):
    """What a rank loads that wants an equal share, the files that its host has then, and their directory."""
    (identity,) = memory.find().values()
    path = memory.take(identity)
    share = ELEMENTS // coordinator.size
    start = coordinator.rank * share
    tensor = torch.zeros(share)
    wanted = [Piece("x", (ELEMENTS,), start, start + share, tensor)]
    try:
        load_verified(path, read_manifest(path), coordinator, fresh=wanted, spread=memory)
    except CheckpointError as error:
        return error
    return tensor, path


@pytest.mark.parametrize("lost", range(HOSTS))
def test_the_loss_of_any_host_loses_no_file(tmp_path, lost):
    with hosts_of(tmp_path) as environments:
        hosts = [(host, tmp_path / str(host), environments[host]) for host in range(HOSTS)]
        for step in (1, 2):
            on_ranks(hosts, lambda host, memory, ranks, step=step: save(memory, ranks, step))
        held = [path for host in range(HOSTS) for path in checkpoints(tmp_path / str(host))]
        assert len(held) == HOSTS, "each host keeps the newest only"
        assert all(len(list(path.glob("rank-*"))) == 2 * RANKS for path in held), "its own and a neighbour's"

        left = [each for each in hosts if each[0] != lost]
        parts = on_ranks(left, lambda host, memory, ranks: take_up(memory, ranks))
        assert torch.equal(torch.cat([tensor for tensor, _ in parts]), VALUES + 2)


def test_a_host_that_comes_gets_everything_and_two_lost_neighbours_are_too_many(tmp_path):
    with hosts_of(tmp_path, 4) as environments:
        hosts = [(host, tmp_path / str(host), environments[host]) for host in range(4)]
        on_ranks(hosts[:HOSTS], lambda host, memory, ranks: save(memory, ranks, 5))
        assert all(not found for found in on_ranks(hosts[2:], lambda host, memory, ranks: memory.find()))

        parts = on_ranks([hosts[0], hosts[1], hosts[3]], lambda host, memory, ranks: take_up(memory, ranks))
        assert torch.equal(torch.cat([tensor for tensor, _ in parts]), VALUES + 5)
        assert parts[-1][1] == tmp_path / "3" / "step-00000005"
        fetched = {path.name for path in parts[-1][1].glob("*.safetensors")}
        assert fetched == {"rank-00004.safetensors", "rank-00005.safetensors"}, "what its ranks want, no more"


def test_a_file_that_was_changed_is_not_taken_from_another_host(tmp_path):
    with hosts_of(tmp_path, 2) as environments:
        hosts = [(host, tmp_path / str(host), environments[host]) for host in range(2)]
        (first,) = set(on_ranks(hosts[:1], lambda host, memory, ranks: save(memory, ranks, 5)))
        file = next(first.glob("rank-*"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

        for error in on_ranks(hosts, lambda host, memory, ranks: take_up(memory, ranks)):
            assert isinstance(error, CorruptCheckpointError)


def test_files_come_from_a_host_whose_ranks_stand_by(tmp_path):
    with hosts_of(tmp_path, 4) as environments:
        hosts = [(host, tmp_path / str(host), environments[host]) for host in range(4)]
        on_ranks(hosts, lambda host, memory, ranks: save(memory, ranks, 5))
        left = hosts[:2]  # the last is lost, and the one before, which has its files, stands by

        def take_up_part(host, memory, ranks):
            return take_up(memory, ranks)

        assert all(not found for found in on_ranks(left, lambda host, memory, ranks: memory.find()))
        parts = on_ranks(left, take_up_part, [environments[2]["SHOAL_PEER"]])
        assert torch.equal(torch.cat([tensor for tensor, _ in parts]), VALUES + 5)
