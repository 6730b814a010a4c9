"""Links: authenticated connections between the launchers of several hosts.

Both ends prove that they know the token of the run, and do not send it (`shoal.listener.challenge`). Then
both send messages. A message is a JSON object after its length in bytes, 4 bytes, little-endian. What follows
the handshake is neither signed nor encrypted: on a network that strangers share, use a tunnel
(docs/guides/encrypt.md).
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Mapping
from typing import Any, final

from shoal.errors import CommunicationError
from shoal.limits import json_of
from shoal.listener import Handshake, again_if_reset, answer, challenge, converse, take

__all__ = ["Link", "LinkBusyError", "LinkRefusedError", "dial", "welcome"]

_ENDS = b"dials", b"listens"
_LARGEST = 1 << 26  # bytes of a message
_LARGEST_FIRST = 1 << 16  # bytes of a link's first message
_HANDSHAKE = 5.0  # seconds


class LinkBusyError(OSError):
    """The system of the other end answers, and its program does not yet."""


class LinkRefusedError(CommunicationError):
    """The other end of a link has another token."""


@final
class Link:
    """One end of a connection; one thread receives, and any thread sends.

    Args:
        connected: A connected socket, which the Link owns.

    Attributes:
        socket: The socket, for plain bytes after a message.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._sending = threading.Lock()
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: The other end is gone.
        """
        text = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            self.socket.sendall(len(text).to_bytes(4, "little") + text)

    def receive(self) -> dict[str, Any]:
        """Receive a message.

        Raises:
            OSError: The other end is gone, was silent for longer than the limit, or sends something else.
        """
        return _message_of(self._take(_length_of(self._take(4), _LARGEST)))

    def _take(self, size: int) -> bytearray:
        taken = bytearray(size)
        rest = memoryview(taken)
        while rest:
            received = self.socket.recv_into(rest)
            if not received:
                raise ConnectionResetError("the other end closed the connection")
            rest = rest[received:]
        return taken

    def limit(self, seconds: float | None) -> None:
        """Fail with TimeoutError if the other end is silent for so long; None waits for ever."""
        self.socket.settimeout(seconds)

    def close(self) -> None:
        """End the connection; a thread that waits for it fails with OSError."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def dial(address: tuple[str, int], token: bytes) -> Link:
    """Return a link to who listens at an address.

    Raises:
        LinkBusyError: Who listens there does not accept links yet.
        OSError: It cannot be reached.
        LinkRefusedError: It has another token.
    """
    return again_if_reset(lambda: _dial(address, token))


def _dial(address: tuple[str, int], token: bytes) -> Link:
    link = Link(socket.create_connection(address, timeout=_HANDSHAKE))
    try:
        is_known = converse(link.socket, answer(token, _ENDS), _HANDSHAKE)
    except TimeoutError as error:
        link.close()
        raise LinkBusyError(f"{address[0]}:{address[1]} accepts no links yet") from error
    except ConnectionResetError as error:
        link.close()
        if error.errno is not None:
            raise
        is_known = False
    except BaseException:
        link.close()
        raise
    if not is_known:
        link.close()
        raise LinkRefusedError(f"{address[0]}:{address[1]} has another token than this host")
    return link


def welcome(token: bytes) -> Handshake[dict[str, Any]]:
    """Let who connects prove that it knows the token, and return its first message."""
    yield from challenge(token, _ENDS)
    length = _length_of((yield from take(4)), _LARGEST_FIRST)
    return _message_of((yield from take(length)))


def _length_of(length: bytes | bytearray, largest: int) -> int:
    number = int.from_bytes(length, "little")
    if number > largest:
        raise ConnectionAbortedError("a link carries something else than its messages")
    return number


def _message_of(text: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json_of(text)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise ConnectionAbortedError("a link carries something else than its messages")
    return message
