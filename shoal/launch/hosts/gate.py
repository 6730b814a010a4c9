"""The one port of a launcher: who knows the token gets what the first message of its channel asks for.

host    another host's launcher, which stays connected
store   a connection to the store of the ranks, which itself listens on loopback alone
files   files of checkpoints in this host's memory
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from shoal.channel import Channel, challenge, dial, first_message
from shoal.errors import CommunicationError, ConfigError
from shoal.listener import Handshake, Listener, listen, loopback

_AT_ONCE = 1 << 16  # bytes
_MOST = 1 << 22  # bytes that wait to be written, until no more is read
_MOST_SILENT = 128  # pairs whose other end has not answered yet: beyond them, the oldest ends
_PATIENCE = 0.25  # seconds that such a pair has in any case


@dataclass(eq=False, slots=True)
class _End:
    """One connection of a pair; `waiting` is what is to be written to it."""

    socket: socket.socket
    owner: str
    other: _End | None = None
    waiting: bytearray = field(default_factory=bytearray)
    events: int = 0
    since: float = field(default_factory=time.monotonic)


@final
class Pump:
    """Carry what comes from each connection of a pair to the other; when one ends, end both.

    The Pump owns the connections that it is given. Any thread may call `add`, `end` and `close`; its own
    thread alone uses the connections.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ends: set[_End] = set()
        self._silent: dict[_End, None] = {}  # the other ends that have not answered, the oldest first
        self._todo: list[tuple[_End, _End] | str] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._waking, self._wake = os.pipe()
        self._selector.register(self._waking, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="shoal-pump", daemon=True)
        self._thread.start()

    def add(self, one: socket.socket, another: socket.socket, owner: str = "") -> None:
        """Carry bytes between two connections, until one ends or their owner does.

        The second one has a moment to answer where many pairs wait for an answer. A closed Pump closes both.
        """
        left, right = _End(one, owner), _End(another, owner)
        left.other, right.other = right, left
        for end in (one, another):
            end.setblocking(False)
        if not self._tell((left, right)):
            for end in (one, another):
                end.close()

    def end(self, owner: str) -> None:
        """End all pairs of an owner."""
        self._tell(owner)

    def close(self) -> None:
        """End all pairs, and the thread."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.write(self._wake, b"x")
        self._thread.join()

    def _tell(self, what: tuple[_End, _End] | str) -> bool:
        """Leave a task for the thread, unless the Pump is closed: its pipe may be another file by then."""
        with self._lock:
            if self._is_closed:
                return False
            if not self._todo:
                os.write(self._wake, b"x")
            self._todo.append(what)
        return True

    def _run(self) -> None:
        while not self._is_closed:
            for key, mask in self._selector.select():
                if key.data is None:
                    os.read(self._waking, _AT_ONCE)
                    self._obey()
                elif key.data in self._ends:  # an earlier event may have ended it
                    self._move(key.data, mask)
        self._obey()
        for end in list(self._ends):
            self._drop(end)
        self._selector.close()
        os.close(self._waking)
        os.close(self._wake)

    def _obey(self) -> None:
        with self._lock:
            todo, self._todo = self._todo, []
        for what in todo:
            if isinstance(what, str):
                for end in [end for end in self._ends if end.owner == what]:
                    self._drop(end)
                continue
            self._ends.update(what)
            self._silent[what[1]] = None
            for end in what:
                self._listen(end)
        while len(self._silent) > _MOST_SILENT:
            oldest = next(iter(self._silent))
            if oldest.since + _PATIENCE > time.monotonic():
                break
            self._drop(oldest)

    def _move(self, end: _End, mask: int) -> None:
        other = end.other
        assert other is not None
        try:
            if mask & selectors.EVENT_READ:
                data = end.socket.recv(_AT_ONCE)
                if not data:
                    self._drop(end)
                    return
                self._silent.pop(end, None)
                other.waiting += data
                self._write(other)
            if mask & selectors.EVENT_WRITE:
                self._write(end)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(end)
            return
        self._listen(end)
        self._listen(other)

    def _write(self, end: _End) -> None:
        if end.waiting:
            with contextlib.suppress(BlockingIOError):
                del end.waiting[: end.socket.send(end.waiting)]

    def _listen(self, end: _End) -> None:
        """Wait for what can be done with a connection now."""
        assert end.other is not None
        reads = selectors.EVENT_READ if len(end.other.waiting) < _MOST else 0
        events = reads | (selectors.EVENT_WRITE if end.waiting else 0)
        if events == end.events:
            return
        if end.events:
            self._selector.unregister(end.socket)
        if events:
            self._selector.register(end.socket, events, end)
        end.events = events

    def _drop(self, end: _End) -> None:
        for each in (end, end.other):
            assert each is not None
            self._silent.pop(each, None)
            if each in self._ends:
                self._ends.discard(each)
                if each.events:
                    self._selector.unregister(each.socket)
                each.socket.close()


LAUNCHER = b"launcher"
"""The purpose of channels to a Gate."""

_DIALS = 16  # connections to another host that are made at a time

Service = Callable[[Channel, Mapping[str, Any]], object]
"""Gets a link and its first message, on a thread of its own."""


@final
class Gate:
    """Listen for links, until it is closed.

    Args:
        listening: The socket, which the Gate owns.
        token: The token of the run.
        services: By the `kind` of a link's first message, who serves it.

    Attributes:
        port: The port.
    """

    def __init__(self, listening: socket.socket, token: bytes, services: Mapping[str, Service]) -> None:
        self._services = services
        self._listener = Listener(listening, lambda: _welcome(token), self._admit)
        self.port: int = self._listener.port

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    def _admit(self, connected: socket.socket, asked: dict[str, Any]) -> None:
        link, service = Channel(connected), self._services.get(str(asked.get("kind")))
        if service is None:
            link.close()
        else:
            threading.Thread(target=service, args=(link, asked), name="shoal-link", daemon=True).start()


def store_service(port: int, pump: Pump, is_open: Callable[[str], bool]) -> Service:
    """Return the service that connects links to the store on this machine.

    Args:
        port: The store's port.
        pump: Carries the bytes.
        is_open: Whether a session, which a link names, may use the store.
    """

    def serve(link: Channel, asked: Mapping[str, Any]) -> None:
        session = str(asked.get("session"))
        try:
            store = socket.create_connection((loopback(), port))
        except OSError:
            link.close()
            return
        store.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pump.add(link.socket, store, session)
        if not is_open(session):  # looked at last: a session that ends now ends all that was added before
            pump.end(session)

    return serve


@final
class StoreDoor:
    """A port on loopback behind which ranks find the store that another host has.

    Args:
        address: The gate of the host that has the store.
        token: The token of the run.
        session: What that host calls this one.

    Attributes:
        port: The port.
    """

    def __init__(self, address: tuple[str, int], token: bytes, session: str) -> None:
        self._address, self._token, self._session = address, token, session
        self._pump = Pump()
        self._free = threading.Semaphore(_DIALS)
        self._listener = Listener(listen(loopback(), 0), _first_bytes, self._admit)
        self.port: int = self._listener.port

    def close(self) -> None:
        """End all connections through it."""
        self._listener.close()
        self._pump.close()

    def _admit(self, connected: socket.socket, first: bytes) -> None:
        self._free.acquire()  # others wait in the system's queue
        dials = threading.Thread(target=self._connect, args=(connected, first), daemon=True)
        try:
            dials.start()
        except RuntimeError:  # no thread is left
            self._free.release()
            raise

    def _connect(self, connected: socket.socket, first: bytes) -> None:
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = dial(self._address, self._token, LAUNCHER)
            link.send({"kind": "store", "session": self._session})
            link.socket.sendall(first)
        except (OSError, CommunicationError):
            connected.close()
            return
        finally:
            self._free.release()
        self._pump.add(connected, link.socket)


def _welcome(token: bytes) -> Handshake[dict[str, Any]]:
    """Let who dials prove that it knows the token, and return its first message."""
    yield from challenge(token, LAUNCHER)
    return (yield from first_message())


def _first_bytes() -> Handshake[bytes]:
    """Wait until a client of the store asks something: nobody else keeps a connection to the other host."""
    return (yield _AT_ONCE)  # all that is there: torch's store refuses a first message that comes in parts


TOKEN_FILE = "SHOAL_TOKEN_FILE"
"""Environment variable: the file of the token."""

_LEAST = 16  # bytes


def find_token(environment: Mapping[str, str] = os.environ, *, makes: bool) -> Path:
    """Return the file of the token: that of SHOAL_TOKEN_FILE, or `~/.config/shoal/token`.

    Args:
        environment: The environment.
        makes: Whether to make the file if it is missing, as the host does that leads. Others may be started
            before it.

    Raises:
        ConfigError: The file is too short, or others may read it.
    """
    home = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = Path(environment.get(TOKEN_FILE) or home / "shoal" / "token")
    if makes and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    if path.exists():
        read_token(path)
    return path


def read_token(path: Path) -> bytes:
    """Return the token of a file.

    Raises:
        ConfigError: The file is missing, too short, or others may read it.
    """
    try:
        mode, token = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"the hosts of a run share a token, and {path} cannot be read: {error.strerror}",
            possible="the file that the host of the rendezvous address made when it began",
            change=f"copy it from there with mode 600, or name another file in {TOKEN_FILE}",
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"others than its owner may use {path}, which holds the token of the hosts",
            possible="mode 600",
            change=f"run: chmod 600 {path}",
        )
    if len(token) < _LEAST:
        raise ConfigError(
            f"the token in {path} has {len(token)} characters",
            possible=f"at least {_LEAST}, such as 64 random digits",
            change=f"delete {path} on all hosts; the host of the rendezvous address makes another one",
        )
    return token
