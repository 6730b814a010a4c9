"""Listens for connections of strangers, and hands over those that prove themselves in time.

One thread drives the handshakes of all strangers. A handshake is a generator: it yields bytes to send, or the
most bytes that it wants next, which it gets; its return value goes to who owns the Listener. It refuses with
OSError or ValueError. Nothing that a stranger does, and nothing that the system lacks, ends a Listener:

    `limit`      seconds for a whole handshake, however its bytes come; then the connection is closed
    `most`       strangers that have a connection; the others wait in the system's queue
    `_PATIENCE`  seconds after which the oldest stranger has to make room if another waits: its connection is
                 reset, so that it knows that it may come again
    no descriptor, no memory: the oldest stranger makes room, and it accepts again after a pause

`csrc/transport/listener.cc` does the same for the native core.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, TypeVar, final

__all__ = [
    "Handshake",
    "Listener",
    "again_if_reset",
    "converse",
    "head_of_request",
    "listen",
    "loopback",
    "take",
]

T = TypeVar("T")
Handshake = Generator[bytes | int, bytes, T]

_LIMIT = 5.0
_MOST = 256
_PATIENCE = 0.25
_FULL = 0.01  # seconds without accepting while there is no room
_EXHAUSTED = 0.1  # seconds without accepting after the system lacked something
_BACKLOG = 4096  # connections in the system's queue, which drops others: those try again after a second
_RESET = struct.pack("ii", 1, 0)  # linger for no time: closing resets the connection
_TRIES = 3
_LARGEST_HEAD = 1 << 14  # bytes of a request's head


@dataclass(eq=False, slots=True)
class _Stranger(Generic[T]):
    """A connection whose handshake is under way; `step` is what the handshake yielded last."""

    socket: socket.socket
    handshake: Handshake[T]
    since: float
    step: bytes | int
    events: int = 0


@final
class Listener(Generic[T]):
    """Accept connections until it is closed. A context manager.

    Args:
        listening: The socket, which the Listener owns.
        handshake: Makes the handshake for a new connection.
        admit: Gets a connection, blocking, and what its handshake returned, on the Listener's thread. It
            returns at once, and owns the connection unless it raises OSError or RuntimeError.
        limit: Seconds for a handshake.
        most: Strangers that have a connection at a time.

    Attributes:
        port: The port.
    """

    def __init__(
        self,
        listening: socket.socket,
        handshake: Callable[[], Handshake[T]],
        admit: Callable[[socket.socket, T], object],
        *,
        limit: float = _LIMIT,
        most: int = _MOST,
    ) -> None:
        listening.setblocking(False)
        listening.listen(_BACKLOG)
        self._listening = listening
        self._handshake, self._admit = handshake, admit
        self._limit, self._most = limit, most
        self._strangers: dict[_Stranger[T], None] = {}  # the oldest first
        self._resumes: float | None = None  # when it accepts again
        self._is_closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self.port: int = listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="shoal-listener", daemon=True)
        self._thread.start()

    def __enter__(self) -> Listener[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more, and close what is not admitted."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with self._selector, self._listening:
            while not self._is_closed:
                for key, _ in self._selector.select(self._until_due()):
                    if key.data is None:
                        self._accept()
                    elif key.data in self._strangers:  # an earlier event may have closed it
                        self._go_on(key.data)
                self._look_at_clock()
            while self._strangers:
                self._make_room()

    def _until_due(self) -> float | None:
        """Return the seconds until the clock asks for something; None if it does not."""
        due = [stranger.since + self._limit for stranger in self._oldest()]
        due += [] if self._resumes is None else [self._resumes]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        while any(stranger.since + self._limit <= now for stranger in self._oldest()):
            self._close(self._oldest()[0])
        if self._resumes is not None and self._resumes <= now:
            self._resumes = None
            self._selector.register(self._listening, selectors.EVENT_READ)

    def _oldest(self) -> list[_Stranger[T]]:
        return [next(iter(self._strangers))] if self._strangers else []

    def _accept(self) -> None:
        """Accept one connection, of those that wait."""
        if len(self._strangers) >= self._most:
            if self._oldest()[0].since + _PATIENCE > time.monotonic():
                return self._pause(_FULL)
            self._make_room()
        try:
            connected, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it left while it waited
            return None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._make_room()
            return self._pause(_EXHAUSTED)
        connected.setblocking(False)
        handshake = self._handshake()
        stranger = _Stranger(connected, handshake, time.monotonic(), next(handshake))
        self._strangers[stranger] = None
        return self._go_on(stranger)

    def _pause(self, seconds: float) -> None:
        self._selector.unregister(self._listening)
        self._resumes = time.monotonic() + seconds

    def _go_on(self, stranger: _Stranger[T]) -> None:
        """Do what can be done of a handshake now."""
        try:
            while True:
                if isinstance(stranger.step, bytes):
                    stranger.step = stranger.step[stranger.socket.send(stranger.step) :]
                    if stranger.step:
                        continue
                    given = b""
                elif not (given := stranger.socket.recv(stranger.step)):
                    raise ConnectionResetError
                stranger.step = stranger.handshake.send(given)
        except BlockingIOError:
            sends = isinstance(stranger.step, bytes)
            self._await(stranger, selectors.EVENT_WRITE if sends else selectors.EVENT_READ)
        except StopIteration as ended:
            self._part_with(stranger)
            stranger.socket.setblocking(True)
            try:
                self._admit(stranger.socket, ended.value)
            except (OSError, RuntimeError):  # such as no thread
                stranger.socket.close()
        except (OSError, ValueError, MemoryError):
            self._close(stranger)

    def _await(self, stranger: _Stranger[T], events: int) -> None:
        if not stranger.events:
            self._selector.register(stranger.socket, events, stranger)
        elif events != stranger.events:
            self._selector.modify(stranger.socket, events, stranger)
        stranger.events = events

    def _make_room(self) -> None:
        for stranger in self._oldest():
            with contextlib.suppress(OSError):
                stranger.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._close(stranger)

    def _close(self, stranger: _Stranger[T]) -> None:
        self._part_with(stranger)
        stranger.socket.close()

    def _part_with(self, stranger: _Stranger[T]) -> None:
        del self._strangers[stranger]
        if stranger.events:
            self._selector.unregister(stranger.socket)


def converse(connected: socket.socket, handshake: Handshake[T], seconds: float) -> T:
    """Do a handshake on a connection, and wait for the other end; return what the handshake returned.

    Raises:
        OSError: The other end is gone, or the handshake refuses.
        ConnectionResetError: The other end reset the connection; without `errno`, it closed it.
        TimeoutError: The whole handshake was not done in so many seconds.
    """
    until = time.monotonic() + seconds
    step = next(handshake)
    try:
        while True:
            connected.settimeout(max(1e-3, until - time.monotonic()))
            if time.monotonic() > until:
                raise TimeoutError(f"the other end did not prove itself within {seconds:g} s")
            if isinstance(step, bytes):
                step = step[connected.send(step) :]
                if step:
                    continue
                given = b""
            elif not (given := connected.recv(step)):
                raise ConnectionResetError("the other end closed the connection")
            step = handshake.send(given)
    except StopIteration as ended:
        connected.settimeout(None)
        result: T = ended.value
        return result


def again_if_reset(connect: Callable[[], T]) -> T:
    """Return what a function returns that connects; call it again if the other end had no room for it."""
    for _ in range(_TRIES - 1):
        try:
            return connect()
        except ConnectionResetError as error:
            if error.errno is None:
                raise
    return connect()


def take(size: int) -> Handshake[bytes]:
    """Receive so many bytes, as a part of a handshake."""
    taken = b""
    while len(taken) < size:
        taken += yield size - len(taken)
    return taken


def head_of_request() -> Handshake[bytes]:
    """Receive the head of a request of HTTP/1, and what came with it.

    Raises:
        ValueError: It is longer than servers take.
    """
    head = b""
    while b"\r\n\r\n" not in head:
        if len(head) == _LARGEST_HEAD:
            raise ValueError(f"the head of a request has more than {_LARGEST_HEAD} bytes")
        head += yield _LARGEST_HEAD - len(head)
    return head


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of IPv4 or IPv6, or at that of a name.

    Args:
        host: The address or name; empty for every address of this machine.
        port: The port; 0 for any that is free.

    Raises:
        OSError: It is no address of this machine, or the port is taken.
    """
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    return socket.create_server(address, family=family, backlog=_BACKLOG)  # type: ignore[arg-type]


def loopback() -> str:
    """Return the address of this machine that no other reaches: 127.0.0.1, or ::1 where only IPv6 is."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family) as trial:
            trial.bind((address, 0))
            return address
    return "127.0.0.1"
