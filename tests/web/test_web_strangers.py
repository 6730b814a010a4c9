"""Strangers who connect to `shoal web`: pages stay open to who has the token."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from shoal.spec.run import Run

LIMIT = 60  # seconds for an answer, on a machine that is busy


@pytest.fixture
def served(run: Run) -> Iterator[tuple[int, str]]:
    """A server of pages: its port and token."""
    command = [sys.executable, "-m", "shoal", "web", str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r":(\d+)/\?token=(\S+)", process.stdout.readline())
        assert found is not None
        yield int(found[1]), found[2]
        process.send_signal(signal.SIGTERM)


def status(served: tuple[int, str]) -> int:
    """The status of a page, for who has the token."""
    port, token = served
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/plans", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(asked, timeout=LIMIT) as answer:
        return int(answer.status)


def test_who_has_the_token_is_answered_beside_strangers_that_ask_nothing_or_half(
    served: tuple[int, str],
) -> None:
    with ExitStack() as stack:
        for number in range(300):
            connected = stack.enter_context(socket.create_connection(("127.0.0.1", served[0])))
            if number % 2:
                connected.sendall(b"GET /plans HTTP/1.1\r\nHost: 127.")
        assert status(served) == 200
        assert status(served) == 200


def test_who_has_no_token_is_answered_and_keeps_no_connection(served: tuple[int, str]) -> None:
    asked = f"GET /plans HTTP/1.1\r\nHost: 127.0.0.1:{served[0]}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", served[0]), timeout=LIMIT) as connected:
        connected.sendall(asked)
        with connected.makefile("rb") as told:
            assert told.readline() == b"HTTP/1.1 403 Forbidden\r\n"
            assert b"No token" in told.read(), "and then it ends"
