"""The file in which a process claims a directory that it writes; see `shoal.run.writer`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

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
