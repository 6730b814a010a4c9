"""Carries bytes between pairs of connections, all in one thread."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import final

_AT_ONCE = 1 << 16  # bytes
_MOST = 1 << 22  # bytes that wait to be written, until no more is read
_MOST_SILENT = 128  # pairs whose other end has not answered yet: beyond them, the oldest ends
_PATIENCE = 0.25  # seconds that such a pair has in any case


@dataclass(eq=False, slots=True)
class _End:
    """One connection of a pair; `waiting` is what is to be written to it."""

    socket: socket.socket
    owner: str
    other: _End | None = None
    waiting: bytearray = field(default_factory=bytearray)
    events: int = 0
    since: float = field(default_factory=time.monotonic)


@final
class Pump:
    """Carry what comes from each connection of a pair to the other; when one ends, end both.

    The Pump owns the connections that it is given. Any thread may call `add`, `end` and `close`; its own
    thread alone uses the connections.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ends: set[_End] = set()
        self._silent: dict[_End, None] = {}  # the other ends that have not answered, the oldest first
        self._todo: list[tuple[_End, _End] | str] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._waking, self._wake = os.pipe()
        self._selector.register(self._waking, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="shoal-pump", daemon=True)
        self._thread.start()

    def add(self, one: socket.socket, another: socket.socket, owner: str = "") -> None:
        """Carry bytes between two connections, until one ends or their owner does.

        The second one has a moment to answer where many pairs wait for an answer. A closed Pump closes both.
        """
        left, right = _End(one, owner), _End(another, owner)
        left.other, right.other = right, left
        for end in (one, another):
            end.setblocking(False)
        if not self._tell((left, right)):
            for end in (one, another):
                end.close()

    def end(self, owner: str) -> None:
        """End all pairs of an owner."""
        self._tell(owner)

    def close(self) -> None:
        """End all pairs, and the thread."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.write(self._wake, b"x")
        self._thread.join()

    def _tell(self, what: tuple[_End, _End] | str) -> bool:
        """Leave a task for the thread, unless the Pump is closed: its pipe may be another file by then."""
        with self._lock:
            if self._is_closed:
                return False
            if not self._todo:
                os.write(self._wake, b"x")
            self._todo.append(what)
        return True

    def _run(self) -> None:
        while not self._is_closed:
            for key, mask in self._selector.select():
                if key.data is None:
                    os.read(self._waking, _AT_ONCE)
                    self._obey()
                elif key.data in self._ends:  # an earlier event may have ended it
                    self._move(key.data, mask)
        self._obey()
        for end in list(self._ends):
            self._drop(end)
        self._selector.close()
        os.close(self._waking)
        os.close(self._wake)

    def _obey(self) -> None:
        with self._lock:
            todo, self._todo = self._todo, []
        for what in todo:
            if isinstance(what, str):
                for end in [end for end in self._ends if end.owner == what]:
                    self._drop(end)
                continue
            self._ends.update(what)
            self._silent[what[1]] = None
            for end in what:
                self._listen(end)
        while len(self._silent) > _MOST_SILENT:
            oldest = next(iter(self._silent))
            if oldest.since + _PATIENCE > time.monotonic():
                break
            self._drop(oldest)

    def _move(self, end: _End, mask: int) -> None:
        other = end.other
        assert other is not None
        try:
            if mask & selectors.EVENT_READ:
                data = end.socket.recv(_AT_ONCE)
                if not data:
                    self._drop(end)
                    return
                self._silent.pop(end, None)
                other.waiting += data
                self._write(other)
            if mask & selectors.EVENT_WRITE:
                self._write(end)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(end)
            return
        self._listen(end)
        self._listen(other)

    def _write(self, end: _End) -> None:
        if end.waiting:
            with contextlib.suppress(BlockingIOError):
                del end.waiting[: end.socket.send(end.waiting)]

    def _listen(self, end: _End) -> None:
        """Wait for what can be done with a connection now."""
        assert end.other is not None
        reads = selectors.EVENT_READ if len(end.other.waiting) < _MOST else 0
        events = reads | (selectors.EVENT_WRITE if end.waiting else 0)
        if events == end.events:
            return
        if end.events:
            self._selector.unregister(end.socket)
        if events:
            self._selector.register(end.socket, events, end)
        end.events = events

    def _drop(self, end: _End) -> None:
        for each in (end, end.other):
            assert each is not None
            self._silent.pop(each, None)
            if each in self._ends:
                self._ends.discard(each)
                if each.events:
                    self._selector.unregister(each.socket)
                each.socket.close()
