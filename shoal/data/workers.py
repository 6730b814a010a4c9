"""Worker processes that make something of payloads, with results in the order of the payloads.

A worker is a process of its own, without the main module, the threads and the sockets of the process that
started it. It reads frames from its standard input and answers each with a frame: a length, then a pickled
object. It ends when its input ends, so no worker outlives the process that started it; signals that ask a run
to end do not reach it, since the last step needs data. If a worker is lost, another one takes its place. One
thread for each worker sends and receives, so that neither side waits for the other with full pipes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from shoal.errors import LostProcessError
from shoal.signals import withheld_from_children

Payload = TypeVar("Payload")
Result = TypeVar("Result")

_LENGTH = struct.Struct("<Q")
_AHEAD = 2  # payloads for each worker that are sent or wait to be taken
_START = """
import sys, types
sys.path[:] = {path!r}
package = sys.modules["shoal.data"] = types.ModuleType("shoal.data")
package.__path__ = [{folder!r}]
from shoal.data.workers import serve
serve()
"""
"""The program of a worker. It leaves out the package's `__init__`, which imports torch: the files that make
ids need none, so that a worker starts in a fraction of the time and takes a fraction of the memory.
"""


class Workers(Generic[Payload, Result]):
    """Processes that apply a function to payloads. Threads may share it. Close it, or use it in `with`.

    Args:
        count: Number of processes, 1 or more. They start when they are first needed.
        make: Function that makes the function in each process; it is pickled.
    """

    def __init__(self, count: int, make: Callable[[], Callable[[Payload], Result]]) -> None:
        self._count = count
        self._make = make
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="shoal-data")
        self._mutex = threading.Lock()
        self._is_closed = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()

    def submit(self, payload: Payload) -> Future[Result]:
        """Return the future result of a payload.

        Its errors are those of the function, and LostProcessError if two workers ended, one after the other.
        """
        with self._mutex:
            if not self._processes:
                self._processes = [_start() for _ in range(self._count)]
                for process in self._processes:
                    self._idle.put(process)
        return self._threads.submit(self._ask, payload)

    def map(self, payloads: Iterable[Payload]) -> Iterator[Result]:
        """Yield the result of each payload in order, a few payloads ahead.

        Raises:
            LostProcessError: A worker ended, and the one in its place too.
        """
        waiting: deque[Future[Result]] = deque()
        try:
            for payload in payloads:
                waiting.append(self.submit(payload))
                if len(waiting) >= _AHEAD * self._count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """End the processes. A second call does nothing."""
        with self._mutex:
            self._is_closed = True
            for process in self._processes:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.wait()
            _close_pipes(process)
        self._processes = []

    def __enter__(self) -> Workers[Payload, Result]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, payload: Payload) -> Result:
        process = self._idle.get()
        try:
            try:
                result, error = self._answer(process, payload)
            except (OSError, EOFError):
                process = self._replace(process)
                result, error = self._answer(process, payload)
        except (OSError, EOFError) as broken:
            raise LostProcessError(
                f"a worker process for data (data.workers={self._count}) {_end_of(process)}, as the one "
                "before it: the system ends processes with SIGKILL when memory is short; set a smaller "
                "data.workers, or give the machine more memory"
            ) from broken
        finally:
            self._idle.put(process)
        if error is not None:
            raise error
        return result

    def _answer(
        self, process: subprocess.Popen[bytes], payload: Payload
    ) -> tuple[Result, BaseException | None]:
        assert process.stdin is not None
        assert process.stdout is not None
        _send(process.stdin, (self._make, payload))
        answer: tuple[Result, BaseException | None] = pickle.loads(_receive(process.stdout))
        return answer

    def _replace(self, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """Start a process in the place of one that has ended; once closed, return that one."""
        how = _end_of(process)
        with self._mutex:
            if self._is_closed:
                return process
            warnings.warn(
                f"a worker process for data ({process.pid}) {how}; another one takes its place", stacklevel=2
            )
            new = self._processes[self._processes.index(process)] = _start()
        _close_pipes(process)
        return new


def serve() -> None:
    """Answer frames of the standard input until it ends; this is the main function of a worker."""
    source, output = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    made: tuple[bytes, Callable[[Any], Any]] | None = None
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            frame = _receive(source)
            answer: tuple[Any, BaseException | None]
            try:
                make, payload = pickle.loads(frame)
                if made is None or made[0] != pickle.dumps(make):
                    made = pickle.dumps(make), make()
                answer = made[1](payload), None
            except Exception as error:
                answer = None, error
            _send(output, answer)


def _start() -> subprocess.Popen[bytes]:
    with withheld_from_children():
        return subprocess.Popen(
            [sys.executable, "-c", _START.format(path=sys.path, folder=os.path.dirname(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
        )


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """Return how a process has ended."""
    code = process.wait()
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with the exit code {code}"


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()


def _send(file: Any, content: Any) -> None:
    data = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    file.write(_LENGTH.pack(len(data)))
    file.write(data)
    file.flush()


def _receive(file: Any) -> bytes:
    (length,) = _LENGTH.unpack(_read(file, _LENGTH.size))
    return _read(file, length)


def _read(file: Any, length: int) -> bytes:
    data: bytes = file.read(length)
    if len(data) < length:
        raise EOFError
    return data
