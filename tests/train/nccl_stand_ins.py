"""A backend that fails as NCCL does, over Shoal's backend on CPUs: no collective raises.

A collective of floating-point numbers is one of a device. If another rank is lost, it never ends, as a kernel
that waits; with STAND_IN=garbage it leaves garbage, as a kernel whose communicator was aborted. If it waits
too long, a watchdog notes that, and ends the process STAND_IN_ABORT seconds later, 60 by default; also if a
rank was lost. Other collectives, which carry Python objects, raise errors: beside NCCL they go over gloo.

STAND_IN_LOSES names a member that is killed when it is started again for the first time, before it is ready.
Run as a module, this is the program `shoal`, whose ranks communicate in this way.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from enum import Enum
from pathlib import Path

import torch.distributed as dist

from shoal.cli.main import main
from shoal.collectives import Done, ProcessGroup, registration
from shoal.errors import CommunicationError
from shoal.launch.elastic import Membership
from shoal.launch.local import world

NAME = "nccl_stand_in"

_PATIENCE = 600.0  # seconds: of the backend below, whose own limit must not be met


class Error(Enum):
    """As `torch.distributed` names what has become of a group of NCCL's."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2


class StandIn(ProcessGroup):
    def __init__(self, native, timeout):
        super().__init__(native)
        self._limit = timeout.total_seconds()
        self._waits_since = None
        self._is_closed = threading.Event()
        self._error = Error.SUCCESS
        threading.Thread(target=self._watch, daemon=True).start()

    def name(self):
        return NAME

    getBackendName = name  # noqa: N815

    def get_error(self):
        return self._error

    def shutdown(self):
        self._is_closed.set()
        super().shutdown()

    def _run(self, operation, opts):
        if operation.reduces is None or not operation.reduces.is_floating_point:
            return super()._run(operation, opts)
        self._waits_since = time.monotonic()
        try:
            super()._run(operation, opts).wait()
        except CommunicationError:
            self._error = Error.COMM_ERROR
            if os.environ.get("STAND_IN") != "garbage":
                time.sleep(3600)
            operation.output.fill_(1e3)
        self._waits_since = None
        return Done(operation.result)

    def _watch(self):
        while not self._is_closed.wait(0.01):
            since = self._waits_since
            if since is not None and time.monotonic() - since > self._limit:
                self._error = Error.TIMEOUT
            if self._error is not Error.SUCCESS:
                time.sleep(float(os.environ.get("STAND_IN_ABORT", "60")))
                print("Process group watchdog thread terminated with exception", file=sys.stderr, flush=True)
                os.abort()


def _create(asked, options):
    timeout = asked.timeout
    native = registration._create(asked, options)._native
    native.timeout = _PATIENCE
    return StandIn(native, timeout)


def _killed_once(ready):
    def lose(membership):
        mark = Path(f"lost-{membership.member}")
        is_due = os.environ.get("STAND_IN_LOSES") == str(membership.member) and not mark.exists()
        if is_due and os.environ["SHOAL_AFTER"] != "-1":
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        ready(membership)

    return lose


def install():
    Membership.ready = _killed_once(Membership.ready)
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    world._backend = lambda *ranks: NAME


if __name__ == "__main__":
    install()
    os.environ["LAUNCHED_BY"] = str(os.getpid())  # for ranks that send it a signal
    sys.exit(main())
