"""`shoal aggregate`, as a process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from shoal.cli.main import main
from shoal.collectives import is_built

pytestmark = pytest.mark.skipif(not is_built(), reason="the native core was not built")

AGGREGATE = [sys.executable, "-m", "shoal.cli.main", "aggregate", "--listen"]


def signals_as_in_a_terminal():
    """Undo what a shell does for commands in its background: they, and what they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_prints_its_address_listens_there_and_ends_with_a_signal(number, code):
    with subprocess.Popen(
        [*AGGREGATE, "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=signals_as_in_a_terminal,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=120).close()
        assert process.stderr.readline() == f"shoal: set SHOAL_AGGREGATOR={address} for the ranks\n"
        process.send_signal(number)
        try:
            assert process.wait(120) == code
        finally:
            process.kill()
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1", "HOST:PORT"),
        ("192.0.2.1:4100", "cannot listen on 192.0.2.1 port 4100"),
        ("127.0.0.1:70000", "no address with a port"),
    ],
)
def test_an_address_where_it_cannot_listen_is_named(address, said, capsys):
    assert main(["aggregate", "--listen", address]) == 2
    assert said in capsys.readouterr().err
