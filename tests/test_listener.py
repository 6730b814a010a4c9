"""Listeners: whatever strangers do and whatever the system lacks, who proves itself is let in."""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from shoal.channel import answer, challenge
from shoal.listener import Listener, again_if_reset, converse, listen, loopback, take

TOKEN = b"a token of some length"
ENDS = b"ends"
Admitted = queue.Queue[socket.socket]


@contextlib.contextmanager
def opened(
    limit: float = 5.0, most: int = 128
) -> Iterator[tuple[tuple[str, int], queue.Queue[socket.socket]]]:
    """A Listener: its address, and the connections that it admitted."""
    admitted = Admitted()
    with Listener(
        listen("127.0.0.1", 0),
        lambda: challenge(TOKEN, ENDS),
        lambda each, _: admitted.put(each),
        limit=limit,
        most=most,
    ) as listener:
        yield ("127.0.0.1", listener.port), admitted


def enter(address: tuple[str, int], token: bytes = TOKEN) -> bool:
    """Connect and prove to know the token; return whether the other end knows it."""

    def connect() -> bool:
        with socket.create_connection(address, timeout=60) as connected:
            return converse(connected, answer(token, ENDS), 60)

    return again_if_reset(connect)


@contextlib.contextmanager
def strangers(address: tuple[str, int], number: int) -> Iterator[list[socket.socket]]:
    """Silent connections."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(number)]


def test_silent_strangers_take_no_threads_and_keep_nobody_out() -> None:
    with opened(limit=3600, most=8) as (address, admitted):
        before = threading.active_count()
        with strangers(address, 100):
            assert enter(address)
            assert threading.active_count() == before
        assert admitted.get(timeout=60).getblocking()


def test_a_stranger_that_drips_bytes_has_one_deadline() -> None:
    with opened(limit=0.5) as (address, _), strangers(address, 1) as (dripping,):
        assert len(dripping.recv(1000)) == 32, "the challenge"
        dripping.settimeout(0.05)  # between two bytes
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(95):  # the last byte of a proof is never sent
                dripping.send(b"x")
                with contextlib.suppress(TimeoutError):
                    assert dripping.recv(1) == b"", "nobody is let in"
                    break
            else:
                pytest.fail("95 bytes took longer than the limit of all")


def test_the_oldest_makes_room_and_learns_that_it_may_come_again() -> None:
    with opened(limit=3600, most=2) as (address, _), strangers(address, 3) as (first, second, third):
        assert len(third.recv(1000)) == 32
        with pytest.raises(ConnectionResetError):
            assert first.recv(32) == first.recv(1), "whether the challenge came or not"
        assert len(second.recv(1000)) == 32
        second.settimeout(0.01)
        with pytest.raises(TimeoutError):
            second.recv(1)


def test_a_wrong_token_is_told_apart_from_a_lack_of_room() -> None:
    with opened() as (address, admitted):
        with pytest.raises(ConnectionResetError) as caught:
            enter(address, b"another token")
        assert caught.value.errno is None
        assert admitted.empty()


SHORT_OF_DESCRIPTORS = """
import os, resource, socket, sys
from shoal.channel import challenge
from shoal.listener import Listener, listen
listener = Listener(listen("127.0.0.1", 0), lambda: challenge(b"t", b"ends"), lambda each, _: each.close())
held = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (held + 4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(listener.port, flush=True)
sys.stdin.read()
"""


def test_a_lack_of_descriptors_ends_no_listener() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SHORT_OF_DESCRIPTORS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = "127.0.0.1", int(process.stdout.readline())

        def connect() -> bool:
            with socket.create_connection(address, timeout=60) as connected:
                return converse(connected, answer(b"t", ENDS), 60)

        with strangers(address, 40):
            assert again_if_reset(connect), "beside them"
        assert connect(), "after them"
        process.communicate("", timeout=60)


class _Refusing:
    """A listening socket whose `accept` fails a few times."""

    def __init__(self, errors: list[OSError]) -> None:
        self._socket, self._errors = listen("127.0.0.1", 0), errors

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)

    def __enter__(self) -> _Refusing:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def accept(self) -> object:
        if self._errors:
            raise self._errors.pop()
        return self._socket.accept()


def test_no_error_of_accept_ends_a_listener() -> None:
    numbers = ["EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "ECONNABORTED", "EPERM", "EPROTO"]
    errors = [OSError(getattr(errno, each), each) for each in numbers]
    listener = Listener(_Refusing(errors), lambda: challenge(TOKEN, ENDS), lambda each, _: each.close())  # type: ignore[arg-type]
    assert enter(("127.0.0.1", listener.port))
    assert not errors
    listener.close()


def test_closing_lets_go_of_the_port_and_of_strangers() -> None:
    with opened() as (address, _), strangers(address, 2) as (one, _):
        one.recv(32)
    with pytest.raises(OSError):
        one.recv(1)
    listen(*address).close()


def test_converse_waits_for_the_whole_no_longer_than_its_limit() -> None:
    here, there = socket.socketpair()
    with here, there:
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.02):
                there.send(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TimeoutError):
            converse(here, take(1 << 20), 0.5)
        stop.set()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", ""])
def test_it_listens_at_addresses_of_both_families(host: str) -> None:
    with listen(host, 0) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection((host or "127.0.0.1", port), timeout=60) as connected:
            assert connected.getpeername()[1] == port
    assert loopback() == "127.0.0.1"
