"""The ledger of a rank: its last calls, in a file that others can read while it hangs, and after it died.

The rank maps the file and writes 40 bytes when a call begins and 8 when it ends: no system call, no lock. The
kernel keeps what a killed process wrote. The file lies in a folder of the host (`ledger_folder`), not in the
run, because a write to a file system that hangs would stop the rank.

    offset      content
    0           magic, version, pid, rank, main thread, pulse, flags, start of the process
    256         the groups, one JSON array of global ranks per line
    65536       a ring of `SLOTS` calls
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self, final

from shoal.analyze.hang.process import start_of
from shoal.analyze.hang.verdict import Call, GroupCalls

LEDGERS = "SHOAL_LEDGERS"
"""Environment variable: the folder of ledgers, if the launcher of the ranks made one."""

NAMES = (
    *("barrier", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter"),
    *("all_to_all", "send", "receive"),
)
DTYPES = (
    *("", "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool"),
    *("complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "other"),
)
SLOTS = 512

_MAGIC, _VERSION = b"SHOALLDG", 1
_HEAD = struct.Struct("<8sIIiQdIQ")
_GROUPS, _RING = 256, 1 << 16
_ENTRY = struct.Struct("<QHBBiqdd")
_TIME, _WORD = struct.Struct("<d"), struct.Struct("<I")
_STRIDE, _ENDED = 40, 32
_PULSE, _FLAGS = 28, 36
_SIZE = _RING + SLOTS * _STRIDE
_ANSWERS, _EXITED = 1, 2
_FILE = re.compile(r"(?:calls|stacks)-(\d+)")
_OLD = 3600.0  # seconds after which the ledger of an ended process is removed


def ledger_folder() -> Path:
    """Return the folder of ledgers on this host, which only this user can read; make it if absent.

    Raises:
        PermissionError: Something else has its name, such as a link that another user made.
    """
    given = os.environ.get(LEDGERS)
    if given:
        return Path(given)
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    folder = Path(tempfile.gettempdir()) / f"shoal-{os.getuid()}-{namespace}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is a link, or others may write to it: remove it, or set TMPDIR to another folder"
        )
    return folder


@final
class Ledger:
    """The ledger that this process writes.

    Args:
        folder: The folder of ledgers.
        rank: The global rank.
        main_thread: Identifier of the main thread, as faulthandler prints it.

    Attributes:
        stacks: The file that this process writes its Python stacks to on a signal.
    """

    def __init__(self, folder: Path, rank: int, main_thread: int) -> None:
        self.stacks = folder / f"stacks-{os.getpid()}"
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _remove_old(opened)
            self._map = _new_map(opened, _path(folder, os.getpid()).name)
        finally:
            os.close(opened)
        self._count = 0
        self._groups: list[tuple[int, ...]] = []
        process, now = os.getpid(), time.monotonic()
        started = start_of(process)
        _HEAD.pack_into(self._map, 0, _MAGIC, _VERSION, process, rank, main_thread, now, 0, started)

    def open_stacks(self) -> IO[str]:
        """Open the file of this process's stacks, empty, and locked as the ledger is."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        file = os.fdopen(os.open(self.stacks, flags, 0o600), "w", encoding="utf-8")
        _lock(file.fileno())
        return file

    def add_group(self, ranks: Sequence[int]) -> int:
        """Add a group of these global ranks; return its number in this ledger, or -1 if there is no room."""
        text = "".join(json.dumps(list(each)) + "\n" for each in [*self._groups, tuple(ranks)]).encode()
        if len(text) >= _RING - _GROUPS:
            return -1
        self._groups.append(tuple(ranks))
        self._map[_GROUPS : _GROUPS + len(text)] = text
        return len(self._groups) - 1

    def begin(self, group: int, number: int, name: int, dtype: int, nbytes: int, root: int) -> int:
        """Note a call; return its token for `end`.

        Args:
            group: The group, as `add_group` numbered it.
            number: Number of the call in its group.
            name: Index in `NAMES`.
            dtype: Index in `DTYPES`.
            nbytes: Bytes of the tensor or of one part.
            root: Rank in the group of the root or of the other end; -1 if there is none.
        """
        token = self._count
        self._count = token + 1
        place = _RING + token % SLOTS * _STRIDE
        _ENTRY.pack_into(self._map, place, number, group, name, dtype, root, nbytes, time.monotonic(), 0.0)
        return token

    def end(self, token: int) -> None:
        """Note that a call has completed."""
        if self._count - token <= SLOTS:
            _TIME.pack_into(self._map, _RING + token % SLOTS * _STRIDE + _ENDED, time.monotonic())

    def pulse(self) -> None:
        """Note that a Python thread of this process runs."""
        _TIME.pack_into(self._map, _PULSE, time.monotonic())

    def answer(self) -> None:
        """Note that this process writes its stacks on the signal, which would end it before."""
        _WORD.pack_into(self._map, _FLAGS, _ANSWERS)

    def exit(self) -> None:
        """Note that this process ends by itself."""
        _WORD.pack_into(self._map, _FLAGS, _EXITED)


@final
@dataclass(frozen=True, slots=True)
class Pages:
    """A ledger as another process reads it.

    Attributes:
        rank: The global rank.
        main_thread: Identifier of the main thread.
        pulse: Moment, on the monotonic clock of the host, at which a Python thread last ran.
        answers: Whether the process writes its stacks on the signal.
        exited: Whether the process ended by itself.
        started: When the process started, as `Process.started`.
        groups: The last calls by the key of the group.
        stacks: The file of its Python stacks.
    """

    rank: int
    main_thread: int
    pulse: float
    answers: bool
    exited: bool
    started: int
    groups: dict[str, GroupCalls]
    stacks: Path

    @classmethod
    def of(cls, pid: int, folder: Path) -> Self | None:
        """Return the ledger of a process; None if it has none that can be read."""
        try:
            data = _path(folder, pid).read_bytes()
        except OSError:
            return None
        if len(data) != _SIZE:
            return None
        magic, version, written_by, rank, main_thread, pulse, flags, started = _HEAD.unpack_from(data)
        if (magic, version, written_by) != (_MAGIC, _VERSION, pid):
            return None
        groups = _groups(data)
        calls: list[list[tuple[float, Call]]] = [[] for _ in groups]
        for slot in range(SLOTS):
            number, group, name, dtype, root, nbytes, begun, ended = _ENTRY.unpack_from(
                data, _RING + slot * _STRIDE
            )
            if number and group < len(groups) and name < len(NAMES) and dtype < len(DTYPES):
                call = Call(
                    number=number,
                    name=NAMES[name],
                    dtype=DTYPES[dtype],
                    bytes=nbytes,
                    root=root,
                    finished=ended > 0,
                )
                calls[group].append((begun, call))
        keyed: dict[str, GroupCalls] = {}
        for ranks, made in zip(groups, calls, strict=True):
            # Groups of equal ranks are told apart by the order in which they were made.
            text = ",".join(map(str, ranks))
            ordinal = sum(key.startswith(f"{text}/") for key in keyed)
            ordered = [call for _, call in sorted(made, key=lambda pair: pair[0])]
            keyed[f"{text}/{ordinal}"] = GroupCalls(ranks=ranks, calls=ordered)
        return cls(
            rank=rank,
            main_thread=main_thread,
            pulse=pulse,
            answers=bool(flags & _ANSWERS),
            exited=bool(flags & _EXITED),
            started=started,
            groups=keyed,
            stacks=folder / f"stacks-{pid}",
        )


def _groups(data: bytes) -> list[list[int]]:
    groups = []
    for line in data[_GROUPS:_RING].split(b"\0", 1)[0].splitlines():
        try:
            groups.append([int(rank) for rank in json.loads(line)])
        except (ValueError, TypeError):
            break
    return groups


def _path(folder: Path, pid: int) -> Path:
    return folder / f"calls-{pid}"


def _new_map(folder: int, name: str) -> mmap.mmap:
    """Return a new file's memory. It is locked while it is mapped: so others know that its process lives."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)  # an earlier group of this process may still map it
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        _lock(descriptor)
        os.ftruncate(descriptor, _SIZE)
        return mmap.mmap(descriptor, _SIZE)  # it keeps a copy of the descriptor, and so the lock
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # no locks here: nobody gets one, and removes the file
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def _remove_old(folder: int) -> None:
    """Remove the files of processes that ended long ago; of other files none."""
    for name in os.listdir(folder):
        found = _FILE.fullmatch(name)
        with contextlib.suppress(OSError):
            if found and not Path("/proc", found[1]).exists() and _is_old(folder, name):
                os.unlink(name, dir_fd=folder)


def _is_old(folder: int, name: str) -> bool:
    """Return whether a file is this user's, was not changed for long, and is locked by nobody."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - about.st_mtime > _OLD
    finally:
        os.close(descriptor)
