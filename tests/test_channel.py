"""Channels: both ends prove that they know the secret, and never send it; what is sent arrives as it was."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch

from shoal.channel import (
    Channel,
    ChannelBusyError,
    ChannelRefusedError,
    ChannelStrangerError,
    answer,
    carried,
    challenge,
    dial,
    first_message,
)
from shoal.collectives.ctypes_core import load_core
from shoal.listener import Listener, converse, listen

SECRET, OTHER = b"a secret of some length", b"another secret of some length"
ENDS = b"ends"


def admitting(secret: bytes, purpose: bytes) -> tuple[Listener[None], queue.Queue[socket.socket]]:
    """A Listener on loopback, and the connections that it admits."""
    admitted: queue.Queue[socket.socket] = queue.Queue()
    listener = Listener(
        listen("127.0.0.1", 0), lambda: challenge(secret, purpose), lambda each, _: admitted.put(each)
    )
    return listener, admitted


@contextlib.contextmanager
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel."""
    listener, admitted = admitting(SECRET, ENDS)
    with listener:
        one = dial(("127.0.0.1", listener.port), SECRET, ENDS, 120)
        other = Channel(admitted.get(timeout=120))
        one.limit(120)
        other.limit(120)
        with one.socket, other.socket:
            yield one, other


@pytest.mark.parametrize(
    ("secret", "purpose"), [(OTHER, ENDS), (SECRET, b"something else"), (b"", ENDS), (SECRET, b"")]
)
def test_who_has_another_secret_or_another_purpose_is_not_let_in(secret: bytes, purpose: bytes) -> None:
    listener, admitted = admitting(SECRET, ENDS)
    with listener:
        with pytest.raises(ChannelRefusedError):
            dial(("127.0.0.1", listener.port), secret, purpose, 120)
        dial(("127.0.0.1", listener.port), SECRET, ENDS, 120).close()
        admitted.get(timeout=120).close()
        assert admitted.empty()


def test_a_listener_that_does_not_know_the_secret_learns_nothing_and_is_found_out() -> None:
    heard: list[bytes] = []

    def pretend(listening: socket.socket) -> None:
        connected, _ = listening.accept()
        with connected:
            connected.sendall(bytes(32))
            heard.append(connected.recv(96, socket.MSG_WAITALL))
            connected.sendall(heard[0][64:])  # who dials proves something else than who listens

    with socket.create_server(("127.0.0.1", 0)) as listening:
        stranger = threading.Thread(target=pretend, args=(listening,))
        stranger.start()
        with pytest.raises(ChannelStrangerError, match="does not know the secret"):
            dial(listening.getsockname()[:2], SECRET, ENDS, 120)
        stranger.join()
    assert SECRET not in heard[0]


def test_who_listens_and_does_not_answer_is_busy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(ChannelBusyError):
        dial(listening.getsockname()[:2], SECRET, ENDS, 0.05)


def test_messages_arrive_in_order_whatever_their_size() -> None:
    sent = [
        ({}, []),
        ({"text": "x" * 1_000_000}, []),
        ({"number": 3}, [torch.arange(1_000_000.0), torch.empty(0), torch.ones(3, 5, dtype=torch.bfloat16)]),
        ({"parts": 200}, list(torch.arange(200.0).split(1))),
    ]
    with pair() as (one, other):
        thread = threading.Thread(target=lambda: [one.send(head, body) for head, body in sent])
        thread.start()
        for head, body in sent:
            got, received = other.receive_with_body()
            assert got == head
            whole = b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in body)
            assert received.numpy().tobytes() == whole
        thread.join()
        into = torch.zeros(7)
        one.send({}, [torch.ones(7)])
        _, received = other.receive_with_body(into)
        assert torch.equal(into, torch.ones(7))
        assert received.data_ptr() == into.data_ptr()


@pytest.mark.parametrize(
    ("head", "body", "text"),
    [(1 << 31, 0, b""), (2, 1 << 60, b"{}"), (2, 1, b"{}x"), (2, 0, b"[]"), (2, 0, b"{]"), (0, 0, b"")],
)
def test_what_is_no_message_is_refused_before_memory_is_made_for_it(
    head: int, body: int, text: bytes
) -> None:
    receives = [Channel.receive, Channel.receive_with_body]
    for receive in receives[:1] if body == 1 else receives:  # that is a message with a body
        with pair() as (one, other):
            one.socket.sendall(struct.pack("<IQ", head, body) + text)
            with pytest.raises(ConnectionAbortedError, match="something else"):
                receive(other)  # type: ignore[operator]


def test_a_first_message_is_small() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(struct.pack("<IQ", (1 << 16) + 1, 0))
        with pytest.raises(ConnectionAbortedError):
            converse(here, first_message(), 120)


core = load_core()


@pytest.mark.skipif(core is None, reason="the native core was not built")
@pytest.mark.parametrize("process", ["0", "zzz"])
def test_groups_of_the_core_speak_the_same_handshake(process: str) -> None:
    """Rank 0 of two; this test is rank 1, which dials if the name of its process is greater."""
    assert core is not None
    secret = bytes(range(32))
    number = hmac.digest(secret, b"number", "sha256")[:8]
    group = core.group_create(0, 2, (ctypes.c_int * 2)(0, 1), b"127.0.0.1", 1, 60.0, b"", None)
    text = ctypes.create_string_buffer(512)
    core.check(core.group_introduce(group, text, len(text)), "introducing")
    board, _, at = text.value.decode().rsplit(" ", 2)
    address = at.rpartition(":")[0], int(at.rpartition(":")[2])
    listener, admitted = admitting(secret, number + struct.pack("<4i", 0, 1, -1, 0))
    with listener:
        own = f"{board} {process} 127.0.0.1:{listener.port}".encode()
        joining = threading.Thread(
            target=core.group_join,
            args=(group, (ctypes.c_char_p * 2)(text.value, own), secret, 1.0),
        )
        joining.start()
        if process == "zzz":
            with socket.create_connection(address, timeout=60) as connected:
                assert converse(connected, answer(secret, number + struct.pack("<4i", 1, 0, -1, 0)), 60)
        else:
            admitted.get(timeout=60).close()
        joining.join()
        core.group_abort(group, b"the test is over")
        core.group_free(group)


def test_a_channel_goes_over_pipes_and_its_last_message_is_sent_before_it_ends() -> None:
    (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()
    with carried(lambda: os.read(read_there, 100), lambda data: os.write(write_there, data)) as there:
        with carried(lambda: os.read(read_here, 100), lambda data: os.write(write_here, data)) as here:
            one, other = Channel(here), Channel(there)
            other.limit(120)
            text = "x" * 10_000
            one.send({"text": text})
            assert other.receive() == {"text": text}
            other.send({"answer": text})
            assert one.receive() == {"answer": text}
            one.send({"last": text})
        assert other.receive() == {"last": text}
        os.close(write_here)
        with pytest.raises(ConnectionResetError):
            other.receive()
    for each in (write_there, read_here, read_there):
        os.close(each)
