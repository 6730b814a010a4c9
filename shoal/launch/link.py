"""Links: authenticated connections between the launchers of several hosts.

Both ends prove that they know the token of the run, and do not send it:

    who dials                             who listens
          <------------------------------ nonce
      nonce, HMAC("dials", nonces) ------>
          <------------------------------ HMAC("listens", nonces)
      messages <------------------------> messages

A message is a JSON object after its length in bytes, 4 bytes, little-endian. What follows the handshake is
neither signed nor encrypted: on a network that strangers share, use a tunnel (docs/guides/encrypt.md).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Mapping
from typing import Any, final

from shoal.errors import CommunicationError

__all__ = ["Link", "LinkBusyError", "LinkRefusedError", "dial", "welcome"]

_NONCE = 32  # bytes
_LARGEST = 1 << 26  # bytes of a message
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
        length = int.from_bytes(self.take(4), "little")
        if length > _LARGEST:
            raise ConnectionAbortedError("a link carries something else than its messages")
        try:
            message = json.loads(self.take(length))
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ConnectionAbortedError("a link carries something else than its messages")
        return message

    def take(self, size: int) -> bytearray:
        """Receive so many bytes; errors as in `receive`."""
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
    link = Link(socket.create_connection(address, timeout=_HANDSHAKE))
    try:
        try:
            theirs = link.take(_NONCE)
        except TimeoutError as error:
            raise LinkBusyError(f"{address[0]}:{address[1]} accepts no links yet") from error
        own = secrets.token_bytes(_NONCE)
        link.socket.sendall(own + _proof(token, b"dials", theirs, own))
        try:
            is_known = hmac.compare_digest(link.take(_NONCE), _proof(token, b"listens", theirs, own))
        except ConnectionResetError:
            is_known = False
        if not is_known:
            raise LinkRefusedError(f"{address[0]}:{address[1]} has another token than this host")
    except BaseException:
        link.close()
        raise
    link.limit(None)
    return link


def welcome(connected: socket.socket, token: bytes) -> Link:
    """Return the link of a connection that came in.

    Raises:
        OSError: The other end is gone, or silent.
        LinkRefusedError: It has another token.
    """
    link = Link(connected)
    try:
        link.limit(_HANDSHAKE)
        own = secrets.token_bytes(_NONCE)
        connected.sendall(own)
        theirs = link.take(_NONCE)
        if not hmac.compare_digest(link.take(_NONCE), _proof(token, b"dials", own, theirs)):
            raise LinkRefusedError("who connects has another token")
        connected.sendall(_proof(token, b"listens", own, theirs))
    except BaseException:
        link.close()
        raise
    link.limit(None)
    return link


def _proof(token: bytes, who: bytes, of_listener: bytes | bytearray, of_dialer: bytes | bytearray) -> bytes:
    return hmac.digest(token, who + bytes(of_listener) + bytes(of_dialer), "sha256")
