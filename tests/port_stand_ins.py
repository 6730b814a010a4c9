"""Ports for servers that a test starts in other processes, which can only be told a number."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket

_FIRST, _EACH = 20_000, 2_000
"""Below the ports that the system gives to connections: it could give one of those away before it is used."""


def _places() -> itertools.cycle[int]:
    worker = re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or "5"
    first = _FIRST + _EACH * (int(worker) % 6)
    begin = os.getpid() % _EACH
    return itertools.cycle([*range(first + begin, first + _EACH), *range(first, first + begin)])


_PLACES = _places()


def free_port() -> int:
    """A port that nobody listens at, and that no other worker of pytest is told."""
    for port in itertools.islice(_PLACES, _EACH):
        with contextlib.suppress(OSError):  # it is in use
            socket.create_server(("127.0.0.1", port)).close()
            return port
    raise AssertionError("no port is free")
