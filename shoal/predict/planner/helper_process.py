"""A second process that searches half of the degrees beside this one, where a core is free.

It is forked from a Search, so it has the same tree, and its branches are its own from then on. Each search
gives it the degrees with every second value of `tp`: with another `tp` blocks cost something else, so the two
processes have little work in common. It goes through its Frontier and sends what it takes, in order. This
process takes the least of both, as one process would that had all degrees: so it sees the same branches in
the same order, and finds, plays and shows the same Plans. Whoever is ahead goes on meanwhile.

The helper also does tasks. If it dies, what waits for it raises BrokenPipeError, and the search goes on
alone. It owns nothing: it ends when this process closes the pipe to it or ends.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from shoal.predict.planner.search_cache import Shared
from shoal.predict.planner.space import Degrees
from shoal.predict.planner.tree import NONE_LEFT, Frontier, Key, Look, Taken, Tree
from shoal.signals import withheld_from_children

_BATCH = 16  # branches of a message
_LEAST = 100  # degrees of a search that takes a second; in a small one both would do much that none needs

T = TypeVar("T")


class Searching(Protocol):
    """What a helper needs of a search."""

    @property
    def tree(self) -> Tree:
        """The tree of Plans."""

    @property
    def shared(self) -> Shared:
        """What the Plans share."""


class _Begin(NamedTuple):
    """Ask for the branches of a search."""

    number: int
    degrees: Sequence[tuple[int, Degrees]]
    room: float
    limit: int


class _GoOn(NamedTuple):
    """Ask for the branches up to this one."""

    key: Key


class _Tasks(NamedTuple):
    """Ask for the results of a function of the search, for each of some arguments."""

    task: Callable[..., Any]
    arguments: Sequence[Any]


class _Answer(NamedTuple):
    """A message of the helper.

    Attributes:
        number: Number of the search; 0 for tasks.
        found: Branches that were taken out, in order; or results of tasks.
        least: The least key of the branches that are left.
    """

    number: int
    found: Sequence[Any]
    least: Key


def can_help(degrees: int) -> bool:
    """Return whether a process may be forked, has a core to run on, and gains time with so many degrees."""
    if degrees < _LEAST or sys.platform != "linux":  # elsewhere system libraries may not survive a fork
        return False
    cores = len(os.sched_getaffinity(0))
    return cores > 1 and threading.active_count() == 1 and running() < cores


def running() -> int:
    """Return the number of this machine's threads that run or could, this one among them."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])


class Helper:
    """The second process of a search.

    Args:
        search: The search that it helps; it starts as a copy of it.

    Attributes:
        pid: Number of the process.
    """

    def __init__(self, search: Searching) -> None:
        self._tree = search.tree
        every = sorted({each.tp for each in search.tree.degrees})
        self._helped = frozenset(every[1::2])
        self._number = 0  # of the latest search
        self._messages = deque[_Answer]()  # that came while one was sent
        (read, answer), (ask, write) = os.pipe(), os.pipe()
        with withheld_from_children():  # the other process ends, and then this one
            pid = os.fork()
            if not pid:
                _serve(search, ask, answer, (read, write))
        os.close(answer)
        os.close(ask)
        self._read, self._write = read, write
        self.pid = pid
        weakref.finalize(self, _end, pid, read, write)

    def helps(self, degrees: Degrees) -> bool:
        """Return whether these degrees are among its half."""
        return degrees.tp in self._helped

    def halves(self, accepted: Sequence[Degrees], room: float, limit: int) -> tuple[Frontier, _Helped]:
        """Begin a search of these degrees; return the frontiers of both halves.

        Args:
            accepted: Degrees, in the order of the tree.
            room: Bytes that a Plan may fill.
            limit: Number of degrees whose best Plans are looked for.
        """
        numbered = list(enumerate(accepted))
        self._number += 1
        theirs = [each for each in numbered if self.helps(each[1])]
        self.send(_Begin(self._number, theirs, room, limit))
        others = [each for each in numbered if not self.helps(each[1])]
        mine = Frontier(self._tree, others, room, limit)
        return mine, _Helped(self, self._number, mine)

    def stop(self) -> None:
        """Stop the search that was begun."""
        self.send(None)

    def ask(self, task: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Begin tasks.

        Args:
            task: A function of a module. It gets the search and an argument.
            arguments: An argument of each task.
        """
        self.send(_Tasks(task, arguments))

    def answers(self) -> Iterator[Any]:
        """Return the results of the tasks that were asked for; see `Shared.noting`."""
        while True:
            number, found, _ = self.receive()
            if number == 0:
                return iter(found)

    def has_answered(self) -> bool:
        """Return whether a message of the helper is there."""
        return bool(self._messages) or _is_readable(self._read)

    def send(self, message: object) -> None:
        """Send a message to the helper, and take what it sends meanwhile: else both may wait for the other.

        Raises:
            BrokenPipeError: It died.
        """
        left = _packed(message)
        while left:
            readable, writable, _ = select.select([self._read], [self._write], [])
            if readable:
                self._messages.append(_receive(self._read))
            elif writable:
                left = left[os.write(self._write, left[: select.PIPE_BUF]) :]

    def receive(self) -> _Answer:
        """Wait for a message of the helper.

        Raises:
            BrokenPipeError: It died.
        """
        found: _Answer = self._messages.popleft() if self._messages else _receive(self._read)
        return found


class _Helped:
    """The frontier of the helper's half; while this process waits for it, it goes ahead with its own."""

    def __init__(self, helper: Helper, number: int, mine: Frontier) -> None:
        self._helper = helper
        self._number = number
        self._mine = mine
        self._taken = deque[Taken]()
        self._least: Key | None = None  # of the branches that the helper has not sent; None if not known

    @property
    def top(self) -> Key:
        """The least key."""
        while not self._taken:
            if self._least is not None:
                return self._least
            self._wait()
        return self._taken[0][0]

    def take(self) -> Look | None:
        """Take out the branch with the least key."""
        if not self._taken:
            self._helper.send(_GoOn(self.top))
        while not self._taken:
            self._wait()
        return self._taken.popleft()[1]

    def drop(self) -> None:
        """Take out the branch with the least key, without a look."""
        self.take()

    def _wait(self) -> None:
        """Get a message of the helper, or go ahead a step."""
        if self._mine.may_go_ahead and not self._helper.has_answered():
            self._mine.go_ahead()
            return
        number, taken, least = self._helper.receive()
        if number == self._number:  # not what is left of an earlier search
            self._taken += taken
            self._least = least


def _serve(search: Searching, requests: int, answers: int, others: Iterable[int]) -> None:
    """Be the helper: do what is asked, until the other process closes its end."""
    try:
        for each in others:
            os.close(each)
        request: object = None
        while True:
            if isinstance(request, _Begin):
                request = _search(search, request, requests, answers)
                continue
            if isinstance(request, _Tasks):
                _send(answers, _Answer(0, _do(search, request), NONE_LEFT))
            request = _receive(requests)
    finally:  # nothing of the process that was forked may run here
        os._exit(0)


def _search(search: Searching, asked: _Begin, requests: int, answers: int) -> object:
    """Send the branches of a frontier, until something else is asked; return that."""
    frontier = Frontier(search.tree, asked.degrees, asked.room, asked.limit)
    wanted: Key = (-math.inf, ())

    def goes_on() -> bool:
        return frontier.may_go_ahead or frontier.least <= wanted

    while True:
        taken: list[Taken] = []
        while len(taken) < _BATCH and goes_on():
            taken.append(frontier.next())
            if taken[-1][1] is not None:
                break
        _send(answers, _Answer(asked.number, taken, frontier.least))
        while not goes_on() or _is_readable(requests):
            request = _receive(requests)
            if not isinstance(request, _GoOn):
                return request
            wanted = request.key


def _do(search: Searching, asked: _Tasks) -> Sequence[Any]:
    """Return the results of tasks."""
    return [search.shared.noting(partial(asked.task, search, each)) for each in asked.arguments]


def _is_readable(end: int) -> bool:
    return bool(select.select([end], [], [], 0)[0])


def _end(pid: int, *ends: int) -> None:
    """End the helper."""
    for each in ends:
        os.close(each)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _send(end: int, message: object) -> None:
    left = _packed(message)
    while left:
        left = left[os.write(end, left) :]


def _packed(message: object) -> memoryview:
    """Return a message as it is sent: its size, and its bytes."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return memoryview(len(data).to_bytes(8, "little") + data)


def _receive(end: int) -> Any:
    return pickle.loads(_read(end, int.from_bytes(_read(end, 8), "little")))


def _read(end: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(end, size)
        if not part:
            raise BrokenPipeError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
