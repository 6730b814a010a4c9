"""The one port of a launcher: who knows the token gets what its first message asks for.

host    another host's launcher, which stays connected
store   a connection to the store of the ranks, which itself listens on loopback alone
files   files of checkpoints in this host's memory
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, final

from shoal.errors import CommunicationError
from shoal.launch.link import Link, dial, welcome
from shoal.launch.pump import Pump

__all__ = ["Gate", "Service", "StoreDoor", "store_service"]

_AT_A_TIME = 64  # connections whose other end has proved nothing yet
_PATIENCE = 5.0  # seconds for the first message

Service = Callable[[Link, Mapping[str, Any]], object]
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
        self._listening = listening
        self._token = token
        self._services = services
        self._free = threading.Semaphore(_AT_A_TIME)
        self.port: int = listening.getsockname()[1]
        threading.Thread(target=self._listen, name="shoal-gate", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _listen(self) -> None:
        while True:
            self._free.acquire()
            try:
                connected, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[connected], name="shoal-link", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        try:
            link = welcome(connected, self._token)
            link.limit(_PATIENCE)
            asked = link.receive()
            link.limit(None)
        except (OSError, CommunicationError):
            connected.close()
            return
        finally:
            self._free.release()
        service = self._services.get(str(asked.get("kind")))
        if service is None:
            link.close()
        else:
            service(link, asked)


def store_service(port: int, pump: Pump, is_open: Callable[[str], bool]) -> Service:
    """Return the service that connects links to the store on this machine.

    Args:
        port: The store's port.
        pump: Carries the bytes.
        is_open: Whether a session, which a link names, may use the store.
    """

    def serve(link: Link, asked: Mapping[str, Any]) -> None:
        session = str(asked.get("session"))
        try:
            store = socket.create_connection(("127.0.0.1", port))
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
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._listen, name="shoal-store-door", daemon=True).start()

    def close(self) -> None:
        """End all connections through it."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._pump.close()

    def _listen(self) -> None:
        while True:
            try:
                connected, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=[connected], daemon=True).start()

    def _connect(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            link = dial(self._address, self._token)
            link.send({"kind": "store", "session": self._session})
        except (OSError, CommunicationError):
            connected.close()
            return
        self._pump.add(connected, link.socket)
