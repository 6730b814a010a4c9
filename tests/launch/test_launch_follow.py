"""The launcher of a host that follows, over a link of this process."""

from __future__ import annotations

import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.channel import Channel
from shoal.launch.hosts.follower import Following
from shoal.launch.local.local_ranks import LocalRanks

RANK = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("a word", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("alone", "saves"), [(120.0, True), (0.0, False)])
def test_ranks_whose_launcher_has_lost_its_link_save_if_they_may_and_end(tmp_path, monkeypatch, alone, saves):
    monkeypatch.chdir(tmp_path)
    here, there = socket.socketpair()
    leads = Channel(there)

    def begin(told, folder, relay, stack):
        return LocalRanks([sys.executable, "-S", "-c", RANK], {3: dict(os.environ)}, None, None, [relay])

    with ThreadPoolExecutor(1) as pool:
        following = Following(Channel(here), {"ranks": 1}, begin, None, alone)
        ended = pool.submit(following.run, [])
        leads.send({"do": "begin"})
        assert _next(leads, "kind") == {"kind": "host", "ranks": 1}
        assert _next(leads, "lines") == {"lines": [[3, 1, "a word"]]}
        leads.close()
        assert isinstance(ended.result(120), OSError)
    assert (tmp_path / "saved").exists() == saves


def _next(link, key):
    """The next message with a key."""
    link.limit(120)
    until = time.monotonic() + 120
    while key not in (told := link.receive()):
        assert time.monotonic() < until
    return told
