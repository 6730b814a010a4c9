"""The one port of a launcher: who knows the token gets what the first message of its channel asks for.

host    another host's launcher, which stays connected
store   a connection to the store of the ranks, which itself listens on loopback alone
files   files of checkpoints in this host's memory
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, final

from shoal.channel import Channel, challenge, dial, first_message
from shoal.errors import CommunicationError
from shoal.launch.pump import Pump
from shoal.listener import Handshake, Listener, listen, loopback

LAUNCHER = b"launcher"
"""The purpose of channels to a Gate."""

_AT_ONCE = 1 << 16  # bytes
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
