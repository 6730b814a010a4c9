"""Watches the groups of this process for hangs: notes each call, and explains one that fails.

`watch_hangs` turns this on, or the variable SHOAL_HANG, for groups that are formed afterwards. Each call is
noted in the process's ledger (`shoal.analyze.hang`). When a call fails because a rank did not come, stopped
or died, one rank of each host holds an inquest over the ranks of its host; the others wait for its verdict,
which goes into the error of each. A thread writes a pulse twice a second, by which others see whether native
code holds the interpreter's lock.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import os
import socket
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, final

import torch

from shoal.analyze.hang import (
    DTYPES,
    NAMES,
    STACKS_SIGNAL,
    HangVerdict,
    Ledger,
    Peer,
    hold_inquest,
    ledger_folder,
)
from shoal.errors import CollectiveError

_PULSE = 0.5  # seconds
_WAIT = 9.0  # seconds for another rank of this host to hold the inquest
_SAME = 30.0  # seconds during which failures have the same cause

_NUMBERS = {name: number for number, name in enumerate(NAMES)}
_ROOTED = ("broadcast", "reduce", "gather", "scatter", "send", "receive")
_DTYPE_NUMBERS: dict[torch.dtype | None, int] = {None: 0} | {
    getattr(torch, name): number for number, name in enumerate(DTYPES) if hasattr(torch, name)
}
_OTHER_DTYPE = len(DTYPES) - 1


def watch_hangs(folder: Path | None = None) -> HangWatch:
    """Watch the groups that this process forms from now on.

    Args:
        folder: Folder for the reports; it is made when there is a hang. None: a folder of the host, until
            `HangWatch.folder` is set.

    Returns:
        The watch of this process.
    """
    watch = watch_of_process()
    watch.is_on = True
    if folder is not None:
        watch.folder = folder.absolute()
    return watch


@functools.cache
def watch_of_process() -> HangWatch:
    """Return the one watch of this process."""
    watch = HangWatch()
    if folder := os.environ.get("SHOAL_HANG"):
        watch.is_on, watch.folder = True, Path(folder)
    return watch


@final
class HangWatch:
    """The watch of a process, over all its groups.

    Attributes:
        is_on: Whether groups that are formed are watched.
        folder: Folder for the reports; None: a folder of the host.
        faults: Faults of failures that are explained.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.folder: Path | None = None
        self.faults: tuple[str, ...] = ("timeout", "peer stopped", "peer lost")
        self._ledger: Ledger | None = None
        self._stacks: IO[str] | None = None
        self._ledgers = Path()
        self._peers: list[Peer] = []
        self._host = self._group = ""
        self._ranks = 0
        self._check: Callable[[], CollectiveError | None] = lambda: None
        self._told: tuple[float, HangVerdict] | None = None
        self._telling = threading.Lock()

    def start(
        self,
        rank: int,
        pids: Sequence[int | None],
        check: Callable[[], CollectiveError | None],
        group: str,
    ) -> None:
        """Begin to watch as a rank of a default group.

        Args:
            rank: The global rank.
            pids: The process of each rank of the group on this host; None for ranks on other hosts.
            check: Function that returns why the group has failed; None while it has not.
            group: The group's name, which no other group has.
        """
        try:
            self._ledgers = ledger_folder()
            main = threading.main_thread().ident or 0
            self._ledger = Ledger(self._ledgers, rank, main)
            self._stacks = self._ledger.open_stacks()  # faulthandler writes to it
        except OSError as error:  # a host without room for a ledger trains without a watch
            self._ledger = None
            if isinstance(error, PermissionError):
                warnings.warn(f"hangs are not explained: {error}", stacklevel=2)
            return
        self._peers = [Peer(each, pid) for each, pid in enumerate(pids) if pid is not None]
        # Other processes, such as after a rank was replaced, have files of their own.
        processes = zlib.crc32(repr(sorted(each.pid for each in self._peers)).encode())
        self._host = f"{socket.gethostname()}-{processes:08x}"
        self._ranks, self._group = len(pids), group
        self._check, self._told = check, None
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True, chain=False)
        self._ledger.answer()
        atexit.register(_leave, self._ledger, os.getpid())
        threading.Thread(target=self._watch, args=(self._ledger,), name="shoal hang", daemon=True).start()

    def group(self, ranks: Sequence[int]) -> GroupWatch | None:
        """Return the watch of a group of these global ranks; None if this process is not watched."""
        if self._ledger is None or (number := self._ledger.add_group(ranks)) < 0:
            return None
        return GroupWatch(self, self._ledger, number)

    def explain(self, failure: CollectiveError) -> CollectiveError:
        """Return a failure with its cause, if it is one that a rank caused."""
        if failure.fault not in self.faults or self._ledger is None:
            return failure
        try:
            verdict = self._verdict(str(failure))
        except Exception as error:  # an inquest must not hide the failure
            return CollectiveError(
                f"{failure}; no inquest: {error!r}", rank=failure.rank, fault=failure.fault
            )
        if verdict is None:
            return failure
        first, *lines = str(verdict).splitlines()
        if self.folder is not None:
            lines.append(f"  stacks of the ranks: {self.folder}/rank-*.txt")
        text = "\n".join([f"{first}; {failure}", *lines])
        return CollectiveError(text, rank=failure.rank, fault=failure.fault)

    def _verdict(self, reason: str) -> HangVerdict | None:
        """Hold the inquest of this host, or wait until another rank has; None if that takes too long."""
        with self._telling:
            if self._told is not None and time.monotonic() - self._told[0] < _SAME:
                return self._told[1]
            folder = self.folder if self.folder is not None else self._ledgers / "hang"
            done = self._ledgers / f"verdict-{self._host}-{self._group}"
            with (self._ledgers / f"inquest-{self._host}-{self._group}").open("w", encoding="utf-8") as lock:
                if not _take(lock):
                    verdict = _wait_for(done)
                elif _is_fresh(done):
                    verdict = HangVerdict.read(done)
                else:
                    verdict = hold_inquest(
                        self._peers,
                        ledgers=self._ledgers,
                        folder=folder,
                        host=self._host,
                        group=self._group,
                        ranks=self._ranks,
                        reason=reason,
                    )
                    verdict.write(done)
            if verdict is not None:
                self._told = time.monotonic(), verdict
            return verdict

    def _watch(self, ledger: Ledger) -> None:
        """Write pulses; hold the inquest if all ranks of this host hang while another host fails."""
        is_checked = len(self._peers) < self._ranks
        while ledger is self._ledger:
            ledger.pulse()
            time.sleep(_PULSE)
            failure = self._check() if is_checked else None
            if failure is not None:
                is_checked = False
                if failure.fault in self.faults:
                    with contextlib.suppress(Exception):
                        self._verdict(str(failure))


@final
class GroupWatch:
    """The watch of one group.

    Args:
        watch: The watch of the process.
        ledger: The ledger of the process.
        group: Number of the group in the ledger.
    """

    def __init__(self, watch: HangWatch, ledger: Ledger, group: int) -> None:
        self.explain = watch.explain
        self.end = ledger.end
        self._begin = ledger.begin
        self._group = group
        self._collectives = self._messages = 0

    def begin(self, name: str, dtype: torch.dtype | None, nbytes: int, root: int) -> int:
        """Note a collective; return its token for `end`."""
        self._collectives += 1
        number = _DTYPE_NUMBERS.get(dtype, _OTHER_DTYPE)
        root = root if name in _ROOTED else -1
        return self._begin(self._group, self._collectives, _NUMBERS[name], number, nbytes, root)

    def begin_message(self, name: str, dtype: torch.dtype, nbytes: int, peer: int) -> int:
        """Note a message; return its token for `end`."""
        self._messages += 1
        number = _DTYPE_NUMBERS.get(dtype, _OTHER_DTYPE)
        return self._begin(self._group, self._messages, _NUMBERS[name], number, nbytes, peer)

    def ended_after(self, token: int, finish: Callable[[], None] | None) -> Callable[[], None]:
        """Return a function that ends a call after another function."""

        def end() -> None:
            if finish is not None:
                finish()
            self.end(token)

        return end


def _leave(ledger: Ledger, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        ledger.exit()


def _is_fresh(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < _SAME
    except OSError:
        return False


def _take(lock: IO[str]) -> bool:
    """Return whether this rank is the one of its host that holds the inquest, until the file is closed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _wait_for(done: Path) -> HangVerdict | None:
    until = time.monotonic() + _WAIT
    while time.monotonic() < until:
        if _is_fresh(done) and (verdict := HangVerdict.read(done)) is not None:
            return verdict
        time.sleep(0.05)
    return None
