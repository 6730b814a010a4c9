"""Connections to parameter servers: both ends prove that they know the token, and never send it."""

from __future__ import annotations

import socket
import threading

import pytest

from shoal.listener import Listener, listen
from shoal.server.channel import Channel, ServerError, connect, welcome


def meet(token: str, other: str) -> tuple[bool, str]:
    """Connect to a listener; return whether it took the connection, and how it ended for who connects."""
    taken: list[None] = []
    opened = listen("127.0.0.1", 0)
    with Listener(opened, lambda: welcome(token), lambda _, none: taken.append(none)) as listener:
        try:
            connect(("127.0.0.1", listener.port), other, timeout=120).close()
            told = ""
        except (OSError, ServerError) as error:
            told = type(error).__name__
    return bool(taken), told


def test_only_who_knows_the_token_is_let_in() -> None:
    assert meet("token", "token") == (True, "")
    assert meet("token", "other") == (False, "ConnectionResetError")


def test_a_listener_that_does_not_know_the_token_learns_nothing_and_is_refused() -> None:
    heard: list[bytes] = []

    def pretend(listening: socket.socket) -> None:
        connected, _ = listening.accept()
        connected.sendall(bytes(32))
        heard.append(connected.recv(64, socket.MSG_WAITALL))
        connected.sendall(heard[0][32:])  # the worker's own proof is not the server's
        connected.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        stranger = threading.Thread(target=pretend, args=(listening,))
        stranger.start()
        with pytest.raises(ServerError, match="none of this training"):
            connect(listening.getsockname()[:2], "a token of the training", timeout=120)
        stranger.join()
    assert b"token" not in heard[0]


def test_a_message_that_is_too_large_is_refused_before_memory_is_made_for_it() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall((2).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little") + b"{}")
        channel = Channel.__new__(Channel)
        channel._socket = here
        with pytest.raises(ServerError, match="something else"):
            channel.receive()
