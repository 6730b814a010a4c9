"""Ranks that a nursery forks."""

from __future__ import annotations

import json
import os
import signal

import pytest

from shoal.errors import CommunicationError
from shoal.launch.nursery import Nursery, connected


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
