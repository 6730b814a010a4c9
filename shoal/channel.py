"""Channels of messages: between launchers of several hosts, and to parameter servers.

Over TCP both ends prove that they know a secret, and do not send it. Groups of the native core use the same
handshake (`csrc/transport/handshake.h`), with 24 bytes of their own for the purpose:

    who listens -> who dials    challenge   32 random bytes
    who dials -> who listens    hello       "shoal/2\\n", 24 bytes of purpose, 32 random bytes; then its proof
    who listens -> who dials    welcome     its proof

A proof is HMAC-SHA256, under the secret, of the end ("dialer" or "acceptor"), the challenge and the hello. So
it is not valid on another connection, for another purpose, or for the other end. The whole handshake has one
deadline, and who listens reads at most 96 bytes of a stranger.

Then both ends send messages: a head, which is a JSON object, and a body, which is bytes of tensors.

    4 bytes     length of the head
    8 bytes     length of the body
    head        JSON, UTF-8
    body        one tensor after another

All numbers are little-endian, as are the elements. Messages are neither signed nor encrypted: on a network
that strangers share, use a tunnel (docs/guides/encrypt.md).

Over the stdin and stdout of a program there is no handshake: who started it, such as ssh, knows both ends.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

from shoal.errors import CommunicationError
from shoal.limits import json_of
from shoal.listener import Handshake, again_if_reset, converse, take

__all__ = [
    "Channel",
    "ChannelBusyError",
    "ChannelRefusedError",
    "ChannelStrangerError",
    "answer",
    "carried",
    "challenge",
    "dial",
    "first_message",
]

_PROTOCOL = b"shoal/2\n"
_PURPOSE = 24  # bytes
_RANDOM = 32  # bytes of a random number, and of a proof
_HELLO = len(_PROTOCOL) + _PURPOSE + _RANDOM
_LENGTHS = struct.Struct("<IQ")
_LARGEST_HEAD = 1 << 26  # bytes
_LARGEST_BODY = 1 << 38
_LARGEST_FIRST = 1 << 16  # bytes of the head that who listens reads before a connection gets a thread
_AT_ONCE = 64  # parts of a message that one call sends
_CARRIED = 1 << 16  # bytes that are carried at once
_LAST = 2.0  # seconds for the last bytes to be carried
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


class ChannelBusyError(TimeoutError):
    """The system of who listens answers, and its program does not yet."""


class ChannelRefusedError(ConnectionResetError):
    """Who listens does not take the secret of who dials, or has ended."""


class ChannelStrangerError(CommunicationError):
    """Who listens does not know the secret of who dials."""


@final
class Channel:
    """One end of a connection; one thread receives, and any thread sends.

    Args:
        connected: A connected socket, which the Channel owns.

    Attributes:
        socket: The socket, for plain bytes after a message.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._sending = threading.Lock()
        if connected.family == socket.AF_UNIX:  # a program of this host
            return
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:  # a host that is gone ends the connection after half a minute
            connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, head: Mapping[str, Any], body: Sequence[torch.Tensor] = ()) -> None:
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
        parts = [memoryview(lengths + text), *(part for part in parts if len(part))]
        with self._sending:
            while parts:
                sent = self.socket.sendmsg(parts[:_AT_ONCE])
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]

    def receive(self) -> dict[str, Any]:
        """Receive a message without a body.

        Raises:
            OSError: The other end is gone, was silent for longer than the limit, or sends something else.
        """
        return self._receive_head(0)[0]

    def receive_with_body(self, into: torch.Tensor | None = None) -> tuple[dict[str, Any], torch.Tensor]:
        """Receive a message.

        Args:
            into: Contiguous tensor on the CPU for the body, if that has exactly its bytes.

        Returns:
            The head and the body, `[bytes]`, uint8; the body is in `into` if it fits there.

        Raises:
            OSError: As from `receive`.
            CommunicationError: There is no memory for the body.
        """
        head, size = self._receive_head(_LARGEST_BODY)
        body = None if into is None else into.detach().view(-1).view(torch.uint8)
        if body is None or len(body) != size:
            try:
                body = torch.empty(size, dtype=torch.uint8)
            except RuntimeError as error:
                raise CommunicationError(f"there is no memory for a message of {size} bytes") from error
        self._fill(_memory_of(body))
        return head, body

    def limit(self, seconds: float | None) -> None:
        """Fail with TimeoutError if the other end is silent for so long; None waits for ever."""
        self.socket.settimeout(seconds)

    def close(self) -> None:
        """End the connection; a thread that waits for it fails with OSError."""
        with contextlib.suppress(OSError):  # it was not connected any more
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _receive_head(self, largest_body: int) -> tuple[dict[str, Any], int]:
        length, size = _lengths_of(self._take(_LENGTHS.size), _LARGEST_HEAD, largest_body)
        return _head_of(self._take(length)), size

    def _take(self, size: int) -> bytearray:
        taken = bytearray(size)
        self._fill(memoryview(taken))
        return taken

    def _fill(self, memory: memoryview) -> None:
        while memory:
            received = self.socket.recv_into(memory)
            if not received:
                raise ConnectionResetError("the other end closed the connection")
            memory = memory[received:]


@contextlib.contextmanager
def carried(read: Callable[[], bytes], write: Callable[[bytes], object]) -> Iterator[socket.socket]:
    """Yield a socket to what is no socket, such as two pipes; threads carry the bytes within this context.

    Args:
        read: Returns the next bytes that come, b"" at the end.
        write: Sends bytes. What the socket took before the end of the context is sent.
    """
    here, there = socket.socketpair()

    def receive() -> None:
        with contextlib.suppress(OSError):
            while data := read():
                there.sendall(data)
            there.shutdown(socket.SHUT_WR)

    def send() -> None:
        with contextlib.suppress(OSError):
            while data := there.recv(_CARRIED):
                write(data)

    sending = threading.Thread(target=send, name="shoal-carry", daemon=True)
    sending.start()
    threading.Thread(target=receive, name="shoal-carry", daemon=True).start()
    try:
        yield here
    finally:
        with contextlib.suppress(OSError):
            here.shutdown(socket.SHUT_RDWR)  # not only closed: a thread may receive from it
        sending.join(_LAST)


def dial(address: tuple[str, int], secret: bytes, purpose: bytes, seconds: float = 5.0) -> Channel:
    """Return a channel to who listens at an address.

    Args:
        address: Its host and port.
        secret: What both ends know.
        purpose: What the channel is for, in at most 24 bytes: proofs for one purpose are none for another.
        seconds: Time limit for the connection, and then for the whole handshake.

    Raises:
        OSError: It cannot be reached; ChannelBusyError and ChannelRefusedError say more.
        ChannelStrangerError: It does not know the secret.
    """
    return again_if_reset(lambda: _dial(address, secret, purpose, seconds))


def _dial(address: tuple[str, int], secret: bytes, purpose: bytes, seconds: float) -> Channel:
    connected = socket.create_connection(address, timeout=seconds)
    try:
        if converse(connected, answer(secret, purpose), seconds):
            return Channel(connected)
        raise ChannelStrangerError(f"what listens at {address[0]}:{address[1]} does not know the secret")
    except BaseException as error:
        connected.close()
        if isinstance(error, TimeoutError):
            raise ChannelBusyError(str(error)) from error
        if isinstance(error, ConnectionResetError) and error.errno is None:
            raise ChannelRefusedError(str(error)) from error
        raise


def challenge(secret: bytes, purpose: bytes) -> Handshake[None]:
    """Let who dials prove that it knows a secret, and then prove the same.

    Raises:
        ConnectionRefusedError: Who dials does not know the secret, or has another purpose.
    """
    random = secrets.token_bytes(_RANDOM)
    yield random
    hello, proof = (yield from take(_HELLO)), (yield from take(_RANDOM))
    is_right = hmac.compare_digest(proof, _proof(secret, b"dialer", random + hello))
    if not is_right or not hello.startswith(_PROTOCOL + purpose.ljust(_PURPOSE, b"\0")):
        raise ConnectionRefusedError("who dials has another secret or another purpose")
    yield _proof(secret, b"acceptor", random + hello)


def answer(secret: bytes, purpose: bytes) -> Handshake[bool]:
    """Do the other end's part of `challenge`; return whether who listens knows the secret."""
    random = yield from take(_RANDOM)
    hello = _PROTOCOL + purpose.ljust(_PURPOSE, b"\0") + secrets.token_bytes(_RANDOM)
    yield hello + _proof(secret, b"dialer", random + hello)
    return hmac.compare_digest((yield from take(_RANDOM)), _proof(secret, b"acceptor", random + hello))


def first_message() -> Handshake[dict[str, Any]]:
    """Receive a message without a body, and with a small head, as a part of a handshake."""
    length, _ = _lengths_of((yield from take(_LENGTHS.size)), _LARGEST_FIRST, 0)
    return _head_of((yield from take(length)))


def _proof(secret: bytes, end: bytes, random_and_hello: bytes) -> bytes:
    return hmac.digest(secret, end + random_and_hello, "sha256")


def _lengths_of(text: bytes | bytearray, largest_head: int, largest_body: int) -> tuple[int, int]:
    head, body = _LENGTHS.unpack(text)
    if head > largest_head or body > largest_body:
        raise ConnectionAbortedError("a channel carries something else than its messages")
    return head, body


def _head_of(text: bytes | bytearray) -> dict[str, Any]:
    try:
        head = json_of(text)
    except ValueError:
        head = None
    if not isinstance(head, dict):
        raise ConnectionAbortedError("a channel carries something else than its messages")
    return head


def _memory_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
