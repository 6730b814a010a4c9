"""Ranks that a nursery forks."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest

from shoal.errors import CommunicationError, ConfigError
from shoal.launch.local.fork_server import Nursery, connected
from shoal.launch.local.local_ranks import LocalRanks

TELL = """
import hashlib, os
values = sorted(value for name, value in os.environ.items() if name.startswith("BIG"))
print(sum(map(len, values)), hashlib.sha256(os.fsencode("".join(values))).hexdigest())
"""

FORK = """
import os, sys
from shoal.launch.local.fork_server import open_nursery
with open_nursery("json") as nursery:
    big = {f"BIG_{number}": os.fsdecode(b"\\xff\\n") + "x" * int(sys.argv[1]) for number in range(4)}
    rank = nursery.start("tell", [], {**os.environ, **big}, (1, 2), sys.argv[2])
    sys.exit(rank.wait())
"""


def test_a_process_with_the_number_of_an_earlier_one_is_not_taken_for_it():
    here, there = connected()
    nursery = Nursery(here, 0)
    told = ["started", 7, 0], ["ended", 7, -signal.SIGKILL], ["started", 7, 0], ["ended", 7, 3]
    there.send(json.dumps(told[0]).encode())
    earlier = nursery.start("module", [], {}, (0, 1))
    assert earlier.poll() is None
    there.send(json.dumps(told[1]).encode())
    assert earlier.poll() == -signal.SIGKILL
    there.send(json.dumps(told[2]).encode())
    later = nursery.start("module", [], {}, (0, 1))
    assert later.poll() is None
    there.send(json.dumps(told[3]).encode())
    assert (later.wait(), earlier.wait()) == (3, -signal.SIGKILL)


def test_a_nursery_that_is_killed_is_named_and_no_broken_pipe():
    here, there = connected()
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    nursery = Nursery(here, pid)
    there.send(json.dumps(["started", 7, 0]).encode())
    rank = nursery.start("module", [], {}, (0, 1))
    there.close()
    assert rank.wait() == -signal.SIGKILL
    with pytest.raises(CommunicationError, match=rf"forked from \({pid}\) was ended by SIGKILL"):
        nursery.start("module", [], {}, (0, 1))
    nursery.close()


@pytest.mark.parametrize("size", [10, 500_000, 10_000_000])
def test_an_environment_of_any_size_reaches_a_forked_rank(tmp_path, size):
    (tmp_path / "tell.py").write_text(TELL)
    ended = subprocess.run(
        [sys.executable, "-c", FORK, str(size), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    values = (b"\xff\n" + b"x" * size) * 4
    assert ended.stdout.split() == [str(len(values)), hashlib.sha256(values).hexdigest()]


def test_an_environment_that_no_program_can_have_is_refused_by_name():
    environment = {"BIG": "x" * 2_000_000}
    with pytest.raises(ConfigError, match=r"200000[0-9] bytes, and the system starts no program with it"):
        LocalRanks([sys.executable, "-c", ""], {0: environment}, None)
