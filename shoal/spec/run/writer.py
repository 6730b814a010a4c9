"""Which process writes a directory: one at a time, also where several hosts see it.

Two processes that write one directory destroy each other's files: a job that was requeued while the old one
still runs, or a host that was paused and wakes. So a process claims a directory before it writes there:

- A claim is a file `.writer-N` in the directory. The highest N counts. Only one process can make the file
  with the next number, also on a network file system.
- The file names its process, which has it locked, and writes a counter into it every few seconds.
- Another process may claim the directory once the one that has it gave it up, or has ended. On one machine
  the system knows. From another one, where locks cannot be trusted, the counter must stand still for `_LEASE`
  seconds. A group of ranks takes over at once from an earlier one of the same training.
- Whoever claims a directory removes what others had begun there. A process that was paused meanwhile finds
  its claim gone, and the rename that would end its save fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, final

from shoal.errors import RunError
from shoal.limits import json_of, open_regular
from shoal.proc import boot_id, process_began

_NAME = re.compile(r"\.writer-([0-9]+)")
_SIZE = 1024  # bytes of a file, written over in place, so that a reader never finds it empty
_LOOKS, _SOON = 20, 0.05  # looks at a file that is not whole yet, and seconds between them
_TRIES, _MOMENT = 20, 0.005  # a reader that asks has the lock for a moment


@dataclass(frozen=True, slots=True)
class Claim:
    """What the file of a claim says.

    Attributes:
        number: Its number.
        host: Name of the machine of the process.
        kernel: The running system, which is another one after each boot; "" where it has no name.
        namespace: What process numbers count in, since each container has its own.
        process, began: Number of the process, and when it began, by the clock of the kernel.
        inode: Number of the file; a copy has another.
        training, group: The training of the process, and which of its groups of ranks, one after another.
        beats: The counter.
        is_released: Whether the process has given the directory up.
    """

    number: int
    host: str
    kernel: str
    namespace: str
    process: int
    began: str
    inode: int
    training: str = ""
    group: int = 0
    beats: int = 0
    is_released: bool = False

    @classmethod
    def of_this_process(cls, number: int, inode: int, training: str, group: int) -> Self:
        """Return the claim of this process."""
        process = os.getpid()
        return cls(
            number,
            platform.node(),
            boot_id(),
            _namespace(),
            process,
            process_began(process),
            inode,
            training,
            group,
        )

    def to_bytes(self) -> bytes:
        """Return what is written, in a fixed size."""
        return json.dumps(asdict(self)).encode().ljust(_SIZE - 1) + b"\n"

    @property
    def who(self) -> str:
        """The process, as a person finds it."""
        return f"process {self.process} on {self.host}"


def newest_claim(directory: Path) -> Claim | None:
    """Return the claim that counts; None if there is none.

    Raises:
        OSError: The directory cannot be read.
    """
    numbers = claims_in(directory)
    return _read(directory, max(numbers)) if numbers else None


def claims_in(directory: Path) -> list[int]:
    """Return the numbers of the claims in a directory."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def _read(directory: Path, number: int) -> Claim:
    """Return a claim; that of an unknown process if its file is not whole, or of another version."""
    path = claim_path(directory, number)
    for _ in range(_LOOKS):
        try:
            with open_regular(path) as file:
                values: Any = json_of(file.read(_SIZE))
                claim = Claim(**{**values, "number": number})
                is_copy = claim.inode != os.fstat(file.fileno()).st_ino
            return replace(claim, inode=0) if is_copy else claim
        except (ValueError, TypeError):
            time.sleep(_SOON)
        except OSError:
            break
    beats = 0
    with contextlib.suppress(OSError):
        beats = path.stat().st_mtime_ns
    return Claim(number, "an unknown machine", "", "", 0, "", 0, beats=beats)


def is_alive(directory: Path, claim: Claim) -> bool | None:
    """Return whether the process of a claim lives, as far as this machine knows."""
    if claim.is_released:
        return False
    if not claim.kernel or claim.kernel != boot_id():
        return None
    path = claim_path(directory, claim.number)
    if claim.inode and claim.began and claim.namespace == _namespace():
        # Where /proc hides processes of other users (hidepid), one that is not seen may live.
        return process_began(claim.process) == claim.began or (_is_of_another_user(path) and _is_locked(path))
    return _is_locked(path)


def _is_of_another_user(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_uid != os.geteuid()
    return False


def lock(descriptor: int) -> None:
    """Lock a file, where the file system has locks."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_MOMENT)
            continue
        except OSError:
            pass
        return


def _is_locked(path: Path) -> bool | None:
    """Return whether a process has a file locked; None where that cannot be known."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(opened)
    return False


def claim_path(directory: Path, number: int) -> Path:
    """Return the file of a claim."""
    return directory / f".writer-{number:08d}"


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


_BEAT = 2.0  # seconds between two changes of the counter
_LEASE = 20.0  # seconds without a change after which a process of another machine counts as ended
_PAUSE = 0.2  # seconds between two looks at it


@final
class Writer:
    """The claim of this process on a directory; `Claiming` makes one.

    Attributes:
        directory: The directory.
        begun: Names in the directory that this process is writing now: no leftovers of an earlier one.
        read: Names in the directory that this process reads now, which stay until it has.
    """

    def __init__(self, directory: Path, descriptor: int, claim: Claim) -> None:
        self.directory = directory
        self.begun: set[str] = set()
        self.read: set[str] = set()
        self._descriptor = descriptor
        self._claim = claim
        self._is_closed = threading.Event()
        self._mutex = threading.Lock()
        threading.Thread(target=self._beat, name="shoal writer", daemon=True).start()

    @property
    def number(self) -> int:
        """The number of the claim: what this process has begun to write in the directory carries it."""
        return self._claim.number

    @property
    def name(self) -> str:
        """The name of the file of the claim, in the directory."""
        return claim_path(self.directory, self.number).name

    @property
    def is_in_place(self) -> bool:
        """Whether the file of this claim is there."""
        try:
            return os.stat(claim_path(self.directory, self.number)).st_ino == self._claim.inode
        except OSError:
            return False

    def require(self) -> None:
        """Check that no other process has claimed the directory since; this takes microseconds.

        Raises:
            RunError: Another one has.
        """
        if not self.is_in_place:
            self.require_newest()

    def require_newest(self) -> None:
        """Check as `require` does, with a look at the whole directory."""
        newest, mine = newest_claim(self.directory), self._claim
        if newest is None or (newest.number, newest.who) == (mine.number, mine.who):
            return
        raise RunError(
            f"{newest.who} writes {self.directory} now: this process, {mine.process} on {mine.host}, had "
            "given no sign of life",
            possible="one process at a time; the other one has gone on from the last checkpoint",
            change="let the other one train, or stop it and resume this one",
        )

    def close(self) -> None:
        """Give the directory up. A second call does nothing."""
        with _mutex:
            if _claims.get(key := _key(self.directory)) is self:
                del _claims[key]
        self._is_closed.set()
        with self._mutex:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.pwrite(descriptor, replace(self._claim, is_released=True).to_bytes(), 0)
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def forget(self) -> None:
        """Let this process, which was forked from the one with the claim, have no part in it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _beat(self) -> None:
        while not self._is_closed.wait(_BEAT):
            with self._mutex, contextlib.suppress(OSError):
                if self._descriptor >= 0:
                    self._claim = replace(self._claim, beats=self._claim.beats + 1)
                    os.pwrite(self._descriptor, self._claim.to_bytes(), 0)


@final
class Claiming:
    """Claims a directory, which may take until it is known that the process that had it has ended.

    Args:
        directory: The directory; made if it is absent.
        say: Called with one line that says what this waits for.
        name: What a person calls what is in it; by default its path.

    Attributes:
        made: The claim, once this process has it.
    """

    def __init__(
        self, directory: Path, say: Callable[[str], object] = lambda text: None, name: str = ""
    ) -> None:
        self._directory = directory
        self._name = name or str(directory)
        self._say = say
        self.made: Writer | None = None
        self._is_own = False  # whether this object has made it
        self._awaited: Claim | None = None
        self._until = 0.0

    def poll(self) -> Writer | None:
        """Return the claim; None, after a moment, if it is not known yet whether this process may have it.

        Raises:
            RunError: Another process writes the directory, or has taken it over from this one.
            OSError: The directory cannot be written.
        """
        with _mutex:
            self.made = _claims.get(key := _key(self._directory))
            if self.made is not None and self.made.is_in_place:
                return self.made
            self._directory.mkdir(parents=True, exist_ok=True)
            found = newest_claim(self._directory)
            if self.made is not None:
                if found is not None and found.number > self.made.number and not _is_of_earlier_group(found):
                    # Also once the other one has ended: what this process would write is older.
                    self.made.require_newest()
                self.made.close()
            if found is not None and not self._is_over(found):
                return None
            self.made = _make(self._directory, 1 if found is None else found.number + 1)
            if self.made is not None:
                self._is_own, _claims[key] = True, self.made
            return self.made

    def wait(self) -> Writer:
        """Return the claim once this process has it; errors as in `poll`."""
        while (writer := self.poll()) is None:
            pass
        return writer

    def close(self) -> None:
        """Give the directory up, unless this process had claimed it before."""
        if self._is_own and self.made is not None:
            self.made.close()

    def _is_over(self, found: Claim) -> bool:
        """Return whether a claim counts no more; if that is not known, look again after a moment."""
        if _is_of_earlier_group(found):
            return True
        alive = is_alive(self._directory, found)
        if alive is False:
            return True
        before = self._awaited if self._awaited is not None and self._awaited.number == found.number else None
        if alive or (before is not None and before.beats != found.beats):
            raise _refusal(found, self._name)
        if before is None:
            self._awaited, self._until = found, time.monotonic() + _LEASE
            self._say(
                f"{found.who} has not given up {self._name}: waits up to {_LEASE:g} s for a sign of life"
            )
        time.sleep(_PAUSE)
        return time.monotonic() >= self._until


@contextlib.contextmanager
def claimed(directory: Path) -> Iterator[Writer]:
    """Have the claim on a directory within this context, and after it if this process had it before.

    Raises:
        RunError: Another process writes the directory.
        OSError: The directory cannot be written.
    """
    claiming = Claiming(directory)
    try:
        yield claiming.wait()
    finally:
        claiming.close()


def require_free(directory: Path, name: str) -> None:
    """Check that no other process is known to write a directory, without claiming it.

    Args:
        directory: The directory.
        name: What a person calls what is in it.

    Raises:
        RunError: One does.
    """
    found = newest_claim(directory)
    if found is not None and is_alive(directory, found):
        raise _refusal(found, name)


def is_written(directory: Path) -> bool | None:
    """Return whether a process writes a directory now; None if nobody ever claimed it, or it is unknown."""
    found = newest_claim(directory)
    if found is None:
        return None
    alive = is_alive(directory, found)
    if alive is None:
        with contextlib.suppress(OSError):
            return time.time() - claim_path(directory, found.number).stat().st_mtime < _LEASE
    return alive


def name_group(training: str, group: int) -> None:
    """Name the training of this process, and which of its groups of ranks this is, one after another.

    A later group takes directories over from an earlier one, whose processes may be stopped or out of reach.
    """
    global _group
    _group = training, group


_mutex = threading.RLock()
_claims: dict[str, Writer] = {}  # those of this process
_group = ("", 0)


def _is_of_earlier_group(found: Claim) -> bool:
    training, number = _group
    return bool(training) and found.training == training and found.group < number


def _refusal(found: Claim, name: str) -> RunError:
    return RunError(
        f"{found.who} writes {name}",
        possible="one process at a time; `shoal watch` shows how far a run is",
        change="wait for its end or stop it, or give another directory",
    )


def close_all() -> None:
    """Give up all directories of this process, as at its end."""
    for writer in list(_claims.values()):
        writer.close()


def _forget_all() -> None:
    global _mutex
    _mutex = threading.RLock()
    for writer in _claims.values():
        writer.forget()
    _claims.clear()


# Finalizers run at the end of the process in reverse order: those that wait for saves run before this one,
# and callbacks of `atexit` that are registered now would not.
_at_the_end = weakref.finalize(close_all, close_all)
os.register_at_fork(after_in_child=_forget_all)


def _make(directory: Path, number: int) -> Writer | None:
    """Make a claim and remove older ones; return None if another process was quicker."""
    try:
        descriptor = os.open(
            path := claim_path(directory, number), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
        )
    except FileExistsError:
        return None
    try:
        claim = Claim.of_this_process(number, os.fstat(descriptor).st_ino, *_group)
        os.write(descriptor, claim.to_bytes())
        os.fsync(descriptor)
        lock(descriptor)
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    numbers = claims_in(directory)
    if max(numbers, default=number) > number:  # made by another process since this one looked
        os.close(descriptor)
        path.unlink(missing_ok=True)
        return None
    for older in numbers:
        if older < number:
            with contextlib.suppress(OSError):  # it stays, and counts no more
                claim_path(directory, older).unlink()
    return Writer(directory, descriptor, claim)


def _key(directory: Path) -> str:
    return os.path.realpath(directory)
