"""The store in which the processes of a training meet, reachable at one address alone.

torch's own server listens on every interface of rank 0's host unless it gets a socket. Here it gets one that
is bound to the address where the others look for it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from shoal.collectives.sealed_store import SealedStore
from shoal.collectives.secret_file import read_secret

_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable of torch: "True" if the launcher serves the store, so that rank 0 does not."""


def open_store(
    master: tuple[str, int],
    rank: int,
    ranks: int,
    timeout: timedelta,
    environment: Mapping[str, str] = os.environ,
) -> Store:
    """Return the common store of these processes; rank 0 serves it, unless their launcher does.

    It listens at the master's address. It listens on every interface only if that is no address of this
    host, or a name that this host alone takes for loopback: then others may know the host by another address.

    With SHOAL_SECRET_FILE its values are sealed: see `SealedStore`.

    Args:
        master: Host and port where the processes meet.
        rank: This process's rank.
        ranks: Number of processes.
        timeout: Time limit for all to come, and for later calls.
        environment: Environment that says whether the launcher serves the store, and where the secret is.

    Raises:
        ConfigError: The file of the secret cannot be used.
        RuntimeError: The processes did not all meet.
    """
    secret = read_secret(environment)
    store = _connected(master, rank, ranks, timeout, environment)
    return store if secret is None else SealedStore(store, secret)


def _connected(
    master: tuple[str, int], rank: int, ranks: int, timeout: timedelta, environment: Mapping[str, str]
) -> Store:
    host, port = master
    if rank != 0 or environment.get(_AGENT) == "True":
        return TCPStore(host, port, ranks, False, timeout)
    listening = _listen(host, port)
    if listening is None:
        return TCPStore(host, port, ranks, True, timeout, multi_tenant=True)
    return TCPStore(host, port, ranks, True, timeout, multi_tenant=True, master_listen_fd=listening.detach())


def _listen(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at the host's address; None where only torch's own choice is possible."""
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        if is_loopback and not _means_loopback(host):
            return None
        return socket.create_server((str(address[0]), port), family=family, backlog=2048)
    return None  # no address of this host, or this process serves a store there already


def _means_loopback(host: str) -> bool:
    """Return whether every host takes this text for itself; a name may be 127.0.1.1 on its own host alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
