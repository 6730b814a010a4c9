"""Strangers who greet an aggregator that has no secret: they cost it little, and keep nobody out."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

PATIENCE = 60.0  # seconds, on a machine that is busy
MAGIC = b"shoal/n1"
PULSE = -1

PROGRAM = """
import resource, sys
most = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
from shoal.collectives import Aggregator
with Aggregator("127.0.0.1:0") as aggregator:
    print(aggregator.address.rpartition(":")[2], flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def aggregator(descriptors: int) -> Iterator[tuple[int, int]]:
    """The port and the process of an aggregator that may have so many descriptors."""
    command = [sys.executable, "-c", PROGRAM, str(descriptors)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
        process.kill()


def greet(
    port: int, *, hosts: int, stream: int, streams: int, host: int = 0, session: bytes = b""
) -> socket.socket:
    """Greet, and return the connection once the aggregator has answered."""
    connected = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    numbers = struct.pack("<6i", 0, host, hosts, stream, streams, 60_000)
    connected.sendall(MAGIC + (session or os.urandom(32)) + numbers)
    if connected.recv(len(MAGIC), socket.MSG_WAITALL) != MAGIC:
        connected.close()
        raise ConnectionResetError
    return connected


def memory(pid: int) -> float:
    """MiB of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_a_greeting_takes_memory_for_one_connection_whatever_it_announces() -> None:
    with aggregator(4096) as (port, pid), contextlib.ExitStack() as opened:
        before = memory(pid)
        for _ in range(300):
            opened.enter_context(greet(port, hosts=4096, stream=0, streams=64))
        assert memory(pid) - before < 30, "a MiB for each was 300"


@pytest.mark.parametrize("stream", [0, PULSE])
def test_beyond_half_of_the_descriptors_the_oldest_sessions_make_room(stream: int) -> None:
    with aggregator(200) as (port, pid), contextlib.ExitStack() as opened:
        strangers = [opened.enter_context(greet(port, hosts=2, stream=stream, streams=1)) for _ in range(400)]
        session = os.urandom(32)
        ours = [
            opened.enter_context(greet(port, hosts=2, host=host, stream=0, streams=1, session=session))
            for host in range(2)
        ]
        assert len(os.listdir(f"/proc/{pid}/fd")) < 200
        with contextlib.suppress(ConnectionResetError):
            while strangers[0].recv(1000):  # signs of life, and then the end
                pass
        for each in ours:  # their session goes on: nothing comes, and no end
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(1)


def test_a_session_that_has_reduced_nothing_makes_room_for_others() -> None:
    with aggregator(2000) as (port, _), contextlib.ExitStack() as opened:
        first, *_ = [opened.enter_context(greet(port, hosts=1, stream=0, streams=1)) for _ in range(300)]
        assert first.recv(1) == b"", "there are 256"
