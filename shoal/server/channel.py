"""Messages over TCP: a head, which is a small JSON object, and a body of bytes.

    4 bytes   length of the head
    8 bytes   length of the body
    head      JSON, UTF-8
    body      the bytes of tensors, one after another

All numbers are little-endian, as are the elements.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from shoal.errors import CommunicationError
from shoal.limits import json_of
from shoal.listener import Handshake, again_if_reset, answer, challenge, converse

__all__ = ["Channel", "Head", "ServerError", "connect", "welcome"]

Head = Mapping[str, Any]

_LENGTHS = struct.Struct("<IQ")
_LARGEST_HEAD = 1 << 24  # bytes
_LARGEST_BODY = 1 << 38
_ENDS = b"worker", b"server"
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class ServerError(CommunicationError):
    """A parameter server cannot be reached, or refuses what it was asked."""


@final
class Channel:
    """One end of a connection; one thread uses it at a time.

    Args:
        connected: A connected socket, which the Channel owns.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:  # a host that is gone ends the connection after half a minute
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, head: Head, body: Sequence[torch.Tensor] = ()) -> None:
        """Send a message.

        Args:
            head: A JSON object.
            body: Contiguous tensors on the CPU.

        Raises:
            OSError: The other end is gone.
        """
        text = json.dumps(head, separators=(",", ":")).encode()
        parts = [_memory_of(each) for each in body]
        lengths = _LENGTHS.pack(len(text), sum(len(part) for part in parts))
        self._send_all([memoryview(lengths + text), *(part for part in parts if len(part))])

    def receive(self, into: torch.Tensor | None = None) -> tuple[dict[str, Any], torch.Tensor]:
        """Receive a message.

        Args:
            into: Contiguous tensor on the CPU for the body, if that has exactly its bytes.

        Returns:
            The head and the body, `[bytes]`, uint8; the body is in `into` if it fits there.

        Raises:
            OSError: The other end is gone.
            ServerError: What comes is no message.
        """
        length, bytes = _LENGTHS.unpack(self._take(_LENGTHS.size))
        if length > _LARGEST_HEAD or bytes > _LARGEST_BODY:
            raise ServerError("a connection to a parameter server carries something else than its messages")
        head: dict[str, Any] = json_of(bytearray(self._take(length)))
        body = None if into is None else into.detach().view(-1).view(torch.uint8)
        if body is None or len(body) != bytes:
            try:
                body = torch.empty(bytes, dtype=torch.uint8)
            except RuntimeError as error:
                raise ServerError(f"there is no memory for a message of {bytes} bytes") from error
        self._fill(_memory_of(body))
        return head, body

    def ask(
        self, head: Head, body: Sequence[torch.Tensor] = (), into: torch.Tensor | None = None
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """Send a message, and receive the reply.

        Raises:
            OSError: The other end is gone.
            ServerError: The server refuses.
        """
        self.send(head, body)
        reply, received = self.receive(into)
        if "refused" in reply:
            raise ServerError(reply["refused"])
        return reply, received

    def limit(self, seconds: float) -> None:
        """Fail with OSError if the other end is silent for so long."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """End the connection; a thread that waits for it fails with OSError."""
        with contextlib.suppress(OSError):  # it was not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_all(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._socket.sendmsg(parts[:64])
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]

    def _take(self, number: int) -> memoryview:
        taken = memoryview(bytearray(number))
        self._fill(taken)
        return taken

    def _fill(self, memory: memoryview) -> None:
        while memory:
            received = self._socket.recv_into(memory)
            if not received:
                raise ConnectionResetError("the other end closed the connection")
            memory = memory[received:]


def _memory_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def connect(address: tuple[str, int], token: str, timeout: float) -> Channel:
    """Return a connection to a server.

    Args:
        address: Its host and port.
        token: The word that all processes of a training know.
        timeout: Seconds to wait for the connection, and then for its proof.

    Raises:
        OSError: It cannot be reached, or has another token.
        ServerError: It does not know the token.
    """
    return again_if_reset(lambda: _connect(address, token, timeout))


def _connect(address: tuple[str, int], token: str, timeout: float) -> Channel:
    connected = socket.create_connection(address, timeout=timeout)
    try:
        channel = Channel(connected)
        if not converse(connected, answer(token.encode(), _ENDS), timeout):
            raise ServerError("what listens at the address of a parameter server is none of this training")
    except BaseException:
        connected.close()
        raise
    return channel


def welcome(token: str) -> Handshake[None]:
    """Let a worker prove that it knows the token."""
    return challenge(token.encode(), _ENDS)
