"""A process from which ranks are forked, so that imports happen once for all ranks.

For each rank that starts as a program, importing torch and Shoal takes some seconds of a core and some
hundred MB. The launcher forks the nursery when it has imported everything and done nothing else: no thread
runs, and no device was used. Then the nursery forks a rank whenever the launcher asks, and reports how each
rank ended.

    launcher                     nursery                      rank
      fork ----------------------> waits
      program and environment in
      a file in memory, its ends
      of two pipes --------------> fork ----------------------> runs MODULE as `python -m` does
           <---------------------- process number
           <---------------------- exit code <-------------------- ends

The nursery ends with the launcher, and the ranks end with the nursery, through `run_rank`. Signals that ask a
run to end do not reach the nursery, and reach a rank once `run_rank` takes them. Where there are
accelerators, ranks are not forked, because the libraries of accelerators do not work after a fork.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, final

from shoal.errors import CommunicationError
from shoal.launch.local.prctl import name_process
from shoal.signals import withheld_from_children

_MOST = 1 << 10  # bytes of a message
_DEVICES = ("nvidiactl", "nvidia0", "kfd", "accel")  # files in /dev where there are accelerators


def has_accelerators() -> bool:
    """Return whether this machine has accelerators, whose libraries do not work after a fork.

    A module that merely asks for them when it is imported, as many do, may have begun to use them.
    """
    return any(Path("/dev", name).exists() for name in _DEVICES)


@contextlib.contextmanager
def open_nursery(module: str) -> Iterator[Nursery | None]:
    """Fork a nursery from this process, which must have done nothing yet, and close it after the context.

    Yield None where ranks must be started as programs: with accelerators, with threads, not on Linux.

    Args:
        module: Module that is imported before the fork, for the ranks.
    """
    importlib.import_module(module)
    is_quiet = threading.active_count() == 1
    if sys.platform != "linux" or not is_quiet or has_accelerators():
        yield None
        return
    here, there = connected()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # so that garbage collections do not write to shared pages
    with withheld_from_children():
        pid = os.fork()
        if pid == 0:
            here.close()
            serve(there)
    gc.unfreeze()
    there.close()
    nursery = Nursery(here, pid)
    try:
        yield nursery
    finally:
        nursery.close()


def connected() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of what a launcher and its nursery talk over."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@final
class Nursery:
    """The launcher's end of a nursery; `open_nursery` makes one.

    Attributes:
        pid: The process that ranks are children of.
        loss: How it ended before its time, and with it its ranks; "" if it has not.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._codes: dict[int, int] = {}
        self.pid = pid
        self.loss = ""

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        outputs: tuple[int, int],
        folder: str = "",
    ) -> ForkedRank:
        """Fork a process that runs a module as `python -m` does, in a session of its own.

        Args:
            module: Name of the module.
            arguments: Arguments of its command line.
            environment: Its whole environment.
            outputs: Descriptors that become its stdout and stderr.
            folder: Its working directory; by default that of the nursery.

        Raises:
            CommunicationError: The nursery has ended.
        """
        request = json.dumps([module, list(arguments), dict(environment), folder])
        with os.fdopen(os.memfd_create("shoal-request"), "wb") as file:  # larger than a message may be
            file.write(request.encode(errors="surrogateescape"))
            file.flush()
            descriptors = array.array("i", [*outputs, file.fileno()]).tobytes()
            with contextlib.suppress(OSError):  # it has ended
                self._connection.sendmsg([b"start"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
                while told := self._connection.recv(_MOST):
                    kind, number, code = json.loads(told)
                    if kind == "started":
                        self._codes.pop(number, None)  # of an earlier process, whose number it has
                        return ForkedRank(self, number)
                    self._codes[number] = code
        self._note_loss()
        raise CommunicationError(self.loss)

    def exit_code(self, pid: int) -> int | None:
        """Return a rank's exit code, negative for the signal that ended it; None if it has not ended."""
        while pid not in self._codes:
            try:
                told = self._connection.recv(_MOST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                told = b""
            if not told:  # the nursery was killed, and its ranks with it
                self._note_loss()
                return -signal.SIGKILL
            _, number, code = json.loads(told)
            self._codes[number] = code
        return self._codes[pid]

    def wait(self, pid: int) -> int:
        """Wait until a rank has ended, and return its exit code."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while (code := self.exit_code(pid)) is None:
                selector.select()
        return code

    def close(self) -> None:
        """End the nursery, and the ranks that are left."""
        self._connection.close()
        if not self.loss:
            os.waitpid(self.pid, 0)

    def _note_loss(self) -> None:
        if self.loss:
            return
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.loss = f"the process that ranks are forked from ({self.pid}) {how}"


@final
class ForkedRank:
    """A process that a nursery forked, with a part of the interface of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self._code: int | None = None  # kept here, since a later process may have the same number
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit code; None if it has not ended."""
        if self._code is None:
            self._code = self._nursery.exit_code(self.pid)
        return self._code

    def wait(self) -> int:
        """Wait until it has ended, and return its exit code."""
        if self._code is None:
            self._code = self._nursery.wait(self.pid)
        return self._code


def serve(connection: socket.socket) -> NoReturn:
    """Serve as a nursery until the other end of the connection is closed."""
    os.setsid()  # so that only the launcher gets the signals of a terminal
    running: dict[int, int] = {}  # process by descriptor
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    pid = _fork(connection, selector)
                    descriptor = os.pidfd_open(pid)
                    running[descriptor] = pid
                    selector.register(descriptor, selectors.EVENT_READ)
                    _tell(connection, "started", pid)
                else:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(pid := running.pop(key.fd), 0)
                    _tell(connection, "ended", pid, os.waitstatus_to_exitcode(status))


def _tell(connection: socket.socket, kind: str, pid: int, code: int = 0) -> None:
    try:
        connection.send(json.dumps([kind, pid, code]).encode())
    except OSError:  # the launcher ended
        os._exit(0)


def _fork(connection: socket.socket, selector: selectors.BaseSelector) -> int:
    """Fork the rank of a request, and return its process id."""
    message, ancillary, _, _ = connection.recvmsg(_MOST, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    if not message:
        os._exit(0)
    descriptors = array.array("i")
    descriptors.frombytes(ancillary[0][2])
    *outputs, request = descriptors
    pid = os.fork()
    if pid == 0:
        os.setsid()
        selector.close()
        connection.close()
        for number, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, number)
        for descriptor in outputs:
            os.close(descriptor)
        with os.fdopen(request, "rb") as file:
            file.seek(0)
            text = file.read().decode(errors="surrogateescape")
        _run(*json.loads(text))
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _run(module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: str) -> NoReturn:
    """Run a module as the program of this process, and end the process."""
    code = 1
    try:
        name_process(f"shoal-rank-{environment['RANK']}" if "RANK" in environment else "shoal")
        os.environ.clear()
        os.environ.update(environment)
        _use_threads(environment)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()  # otherwise all ranks would draw equal numbers; `random` reseeds itself
        if folder:
            os.chdir(folder)
        sys.argv = [module, *arguments]
        sys.path[0] = os.getcwd()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _use_threads(environment: Mapping[str, str]) -> None:
    """Use OMP_NUM_THREADS threads: torch read the variable before the fork."""
    import torch  # not at the top: a launcher that forks nothing does not need it

    wanted = environment.get("OMP_NUM_THREADS", "").partition(",")[0]
    if wanted.isdecimal() and int(wanted) > 0:
        torch.set_num_threads(int(wanted))
