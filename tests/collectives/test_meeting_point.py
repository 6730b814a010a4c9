"""The store of a training: it can be reached where its processes look for it, and nowhere else."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from port_stand_ins import free_port

from shoal.collectives.tcp_store import open_store

LIMIT = timedelta(seconds=20)


def is_open(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=120).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("host", "elsewhere"), [("127.0.0.1", "127.0.0.2"), ("127.0.0.3", "127.0.0.1")])
def test_processes_meet_at_the_address_of_the_master_alone(host: str, elsewhere: str) -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        stores = list(pool.map(lambda rank: open_store((host, port), rank, 2, LIMIT, {}), range(2)))
    stores[1].set("from 1", "here")
    assert stores[0].get("from 1") == b"here"
    assert is_open(host, port)
    assert not is_open(elsewhere, port)


def test_a_second_store_of_a_process_shares_the_first() -> None:
    master = "127.0.0.1", free_port()
    first, second = (open_store(master, 0, 1, LIMIT, {}) for _ in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_a_host_whose_own_name_is_loopback_there_alone_is_reachable_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **named: look_up("127.0.1.1", *rest, **named)
    )
    port = free_port()
    monkeypatch.setattr("shoal.collectives.tcp_store.TCPStore", lambda *given, **named: named)
    assert open_store(("node1", port), 0, 2, LIMIT, {}) == {"multi_tenant": True}  # torch's: every interface


def test_a_store_of_the_launcher_is_not_served_again() -> None:
    master = "127.0.0.1", free_port()
    server = open_store(master, 0, 1, LIMIT, {})
    client = open_store(master, 0, 1, LIMIT, {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    server.set("key", "value")
    assert client.get("key") == b"value"
