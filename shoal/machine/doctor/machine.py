"""What can be read of a machine: files, folders, links, file systems and the output of commands.

All checks read through a `Machine`, so that they also run on a machine that was recorded.
Nothing here raises because something is absent: a machine without GPUs, or a user without rights, is normal.

Counters at two moments: what moved, waited or was used between them.

A counter has a name such as `("port", "mlx5_0/1", "port_xmit_data")`: kind, owner, counter.

A machine as a folder: what was read of it, so that another machine can examine it.

A recorded tree has the files under their own paths (`sys/class/net/eth0/mtu`), and beside them

    commands/NAME.txt     what commands printed, such as commands/nvidia-smi-q.txt
    environment.txt       the variables that matter to communication, NAME=VALUE
    links.txt             links that were followed: PATH -> TARGET
    spaces.txt            file systems: PATH TOTAL FREE, in bytes
    seconds.txt           seconds between the two moments
    after/                what was different at the second moment
"""

from __future__ import annotations

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

_COMMAND_SECONDS = 20.0
_MOST = 4 << 20  # characters of a file or an output that are read

_PREFIXES = ("NCCL_", "UCX_", "FI_", "OMPI_MCA_btl", "SHOAL_", "TORCH_NCCL_", "GLOO_", "OMP_", "CUDA_VISIBLE")


class Space(NamedTuple):
    """Bytes of a file system."""

    total: int
    free: int


class Machine(ABC):
    """A machine, at one moment."""

    @property
    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """The environment variables that matter to communication."""

    @abstractmethod
    def read(self, path: str) -> str | None:
        """Return the text of a file; None if it is absent or may not be read."""

    @abstractmethod
    def names(self, path: str) -> Sequence[str]:
        """Return the sorted names in a folder; empty if it is absent."""

    @abstractmethod
    def resolve(self, path: str) -> str:
        """Return the absolute path that a path with links leads to; empty if it is absent."""

    @abstractmethod
    def run(self, *command: str) -> str | None:
        """Return what a command prints; None if it is not installed or fails."""

    @abstractmethod
    def space(self, path: str) -> Space | None:
        """Return the space of the file system that holds a path; None if it is absent."""

    def exists(self, path: str) -> bool:
        """Return whether a file or folder is there."""
        return bool(self.resolve(path))


@final
class LiveMachine(Machine):
    """The machine that this process runs on."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of this process."""
        return relevant(os.environ)

    def read(self, path: str) -> str | None:
        """Read a file."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(_MOST)
        except OSError:
            return None

    def names(self, path: str) -> Sequence[str]:
        """List a folder."""
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def resolve(self, path: str) -> str:
        """Follow links."""
        return os.path.realpath(path) if os.path.exists(path) else ""

    def run(self, *command: str) -> str | None:
        """Run a command, at most some seconds."""
        if shutil.which(command[0]) is None:
            return None
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_COMMAND_SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout[:_MOST] if done.returncode == 0 else None

    def space(self, path: str) -> Space | None:
        """Ask the file system."""
        try:
            found = os.statvfs(Path(path))
        except OSError:
            return None
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that matter to communication."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_PREFIXES)}


def number(text: str | None) -> int | None:
    """Return a text as a whole number; None if it is none.

    >>> number(" 42\\n"), number("max"), number(None)
    (42, None, None)
    """
    try:
        return int((text or "").strip())
    except ValueError:
        return None


class Verdict(StrEnum):
    """A verdict about one thing, from good to bad. `UNKNOWN`: it could not be read."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARN = "warn"
    BAD = "bad"


_ORDER = list(Verdict)


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict with its evidence.

    Attributes:
        row: What was examined, such as "GPU clocks".
        verdict: The verdict.
        found: The evidence, in one sentence with figures.
        change: What to do about it; empty if there is nothing to do.
    """

    row: str
    verdict: Verdict
    found: str
    change: str = ""


def worst(findings: Iterable[Finding]) -> Verdict:
    """Return the worst verdict; `OK` if there are no findings."""
    return max((finding.verdict for finding in findings), key=_ORDER.index, default=Verdict.OK)


Counter = tuple[str, str, str]

_NET = "/sys/class/net"
_RDMA = "/sys/class/infiniband"


@dataclass(frozen=True)
class Window:
    """Counters of a machine before and after some seconds.

    Attributes:
        before: Counters at the first moment.
        after: Counters at the second moment.
        seconds: Seconds between them; 0 if there was no second moment.
    """

    before: Mapping[Counter, int]
    after: Mapping[Counter, int]
    seconds: float

    def growth(self, kind: str, owner: str, counter: str) -> int:
        """Return by how much a counter grew; 0 if it was not there twice, or was reset."""
        key = kind, owner, counter
        return max(0, self.after.get(key, 0) - self.before.get(key, 0)) if key in self.before else 0

    def rate(self, kind: str, owner: str, counter: str) -> float:
        """Return the growth of a counter per second; 0 if there was no second moment."""
        return self.growth(kind, owner, counter) / self.seconds if self.seconds else 0.0

    def growths(self, kind: str, owner: str) -> dict[str, int]:
        """Return the growth of all counters of an owner, without those that stood still."""
        names = (name for found, whose, name in self.before if (found, whose) == (kind, owner))
        return {name: grown for name in names if (grown := self.growth(kind, owner, name))}

    def owners(self, kind: str) -> list[str]:
        """Return the owners of counters of a kind, sorted."""
        return sorted({owner for found, owner, _ in self.after if found == kind})


def count(machine: Machine) -> dict[Counter, int]:
    """Return all counters of a machine."""
    return dict(
        [*_ports(machine), *_interfaces(machine), *_ethtool(machine), *_cores(machine), *_processes(machine)]
    )


def ports(machine: Machine) -> list[tuple[str, str]]:
    """Return the RDMA ports: device and port, such as ("mlx5_0", "1")."""
    return [
        (device, port) for device in machine.names(_RDMA) for port in machine.names(f"{_RDMA}/{device}/ports")
    ]


def interfaces(machine: Machine) -> list[str]:
    """Return the network interfaces of hardware: not loopback, bridges or virtual pairs."""
    return [each for each in machine.names(_NET) if machine.exists(f"{_NET}/{each}/device")]


def devices(machine: Machine, vendor: str, classes: tuple[str, ...]) -> list[str]:
    """Return the addresses of PCI devices of a vendor and some classes, such as "0000:19:00.0"."""
    root = "/sys/bus/pci/devices"
    return [
        address
        for address in machine.names(root)
        if (machine.read(f"{root}/{address}/vendor") or "").strip() == vendor
        and (machine.read(f"{root}/{address}/class") or "").startswith(classes)
    ]


def _ports(machine: Machine) -> Iterable[tuple[Counter, int]]:
    for device, port in ports(machine):
        for folder in ("counters", "hw_counters"):
            path = f"{_RDMA}/{device}/ports/{port}/{folder}"
            for name in machine.names(path):
                if (value := number(machine.read(f"{path}/{name}"))) is not None:
                    yield ("port", f"{device}/{port}", name), value


def _interfaces(machine: Machine) -> Iterable[tuple[Counter, int]]:
    for each in interfaces(machine):
        path = f"{_NET}/{each}/statistics"
        for name in machine.names(path):
            if (value := number(machine.read(f"{path}/{name}"))) is not None:
                yield ("interface", each, name), value


def _ethtool(machine: Machine) -> Iterable[tuple[Counter, int]]:
    for each in interfaces(machine):
        for line in (machine.run("ethtool", "-S", each) or "").splitlines():
            name, _, text = line.strip().rpartition(":")
            if name and (value := number(text)) is not None:
                yield ("ethtool", each, name.strip()), value


def _cores(machine: Machine) -> Iterable[tuple[Counter, int]]:
    """Ticks of each core: busy, idle and stolen by a hypervisor."""
    for line in (machine.read("/proc/stat") or "").splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and len(words) >= 8:
            user, nice, system, idle, waiting, interrupts, soft, stolen = map(int, words[:8])
            yield ("core", name[3:], "busy"), user + nice + system + interrupts + soft
            yield ("core", name[3:], "idle"), idle + waiting
            yield ("core", name[3:], "stolen"), stolen


def _processes(machine: Machine) -> Iterable[tuple[Counter, int]]:
    """Ticks that each process used, in user and system mode; the owner is "PID NAME"."""
    for pid in machine.names("/proc"):
        if not pid.isdecimal() or (stat := machine.read(f"/proc/{pid}/stat")) is None:
            continue
        opening, closing = stat.find("("), stat.rfind(")")
        fields = stat[closing + 1 :].split()
        if opening >= 0 and len(fields) > 12:
            yield (
                ("process", f"{pid} {stat[opening + 1 : closing]}", "busy"),
                int(fields[11]) + int(fields[12]),
            )


Answer = TypeVar("Answer")


def command_file(command: Sequence[str]) -> str:
    """Return the name of the file that holds what a command prints.

    >>> command_file(["nvidia-smi", "topo", "-m"]), command_file(["ethtool", "-S", "eth0"])
    ('nvidia-smi-topo-m.txt', 'ethtool-S-eth0.txt')
    """
    words = (word.strip("-").replace("/", "_") for word in command)
    return "-".join(word for word in words if word) + ".txt"


@final
class RecordedMachine(Machine):
    """A machine in a recorded tree.

    Args:
        root: The tree.
        over: The tree of an earlier moment, which has what is not in `root`; None if `root` has everything.
    """

    def __init__(self, root: Path, over: Path | None = None) -> None:
        self._trees = [root] if over is None else [root, over]

    @cached_property
    def environment(self) -> Mapping[str, str]:  # type: ignore[override]
        """The recorded environment."""
        return dict(_pairs(self._text("environment.txt"), "="))

    def read(self, path: str) -> str | None:
        """Read a recorded file."""
        return self._text(path.lstrip("/"))

    def names(self, path: str) -> Sequence[str]:
        """List a recorded folder."""
        found: set[str] = set()
        for tree in self._trees:
            folder = _inside(tree, path)
            if folder is not None and folder.is_dir():
                found.update(each.name for each in folder.iterdir())
        return sorted(found)

    def resolve(self, path: str) -> str:
        """Follow a recorded link; a path that is there and no link is itself."""
        if path in self._links:
            return self._links[path]
        there = any((each := _inside(tree, path)) is not None and each.exists() for tree in self._trees)
        return path if there else ""

    def run(self, *command: str) -> str | None:
        """Return what the command printed when it was recorded."""
        return self._text(f"commands/{command_file(command)}")

    def space(self, path: str) -> Space | None:
        """Return the recorded space."""
        words = dict(_pairs(self._text("spaces.txt"), " ")).get(path, "").split()
        return Space(*map(int, words)) if len(words) == 2 and all(map(str.isdecimal, words)) else None

    @cached_property
    def _links(self) -> dict[str, str]:
        return dict(_pairs(self._text("links.txt"), " -> "))

    def _text(self, path: str) -> str | None:
        for tree in self._trees:
            file = _inside(tree, path)
            try:
                if file is not None:
                    with file.open(encoding="utf-8", errors="replace") as opened:
                        return opened.read(_MOST)
            except OSError:
                continue
        return None


@final
class Recorder(Machine):
    """A machine that passes on what another one tells, and writes it into a tree.

    Each question is asked once, and later ones get its answer. Else a recorded machine, which has one answer
    for each, would be judged otherwise than the live one.

    Args:
        machine: The machine to read.
        root: The tree.
    """

    def __init__(self, machine: Machine, root: Path) -> None:
        self._machine = machine
        self._root = root
        self._answers: dict[tuple[str, ...], Any] = {}
        self._write(
            "environment.txt", "".join(f"{key}={text}\n" for key, text in machine.environment.items())
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of the machine."""
        return self._machine.environment

    def read(self, path: str) -> str | None:
        """Read and record a file."""
        return self._once(("read", path), lambda: self._machine.read(path), partial(self._write, path))

    def names(self, path: str) -> Sequence[str]:
        """List and record a folder; files that nobody reads are recorded empty."""

        def record(names: Sequence[str]) -> None:
            for name in names:
                place = _inside(self._root, f"{path}/{name}")
                if place is not None and not place.exists():
                    place.mkdir(parents=True)

        return self._once(("names", path), lambda: self._machine.names(path), record)

    def resolve(self, path: str) -> str:
        """Follow and record a link."""

        def record(target: str) -> None:
            if target:
                self._append("links.txt", f"{path} -> {target}\n")

        return self._once(("resolve", path), lambda: self._machine.resolve(path), record)

    def run(self, *command: str) -> str | None:
        """Run a command and record what it prints."""
        place = f"commands/{command_file(command)}"
        return self._once(("run", *command), lambda: self._machine.run(*command), partial(self._write, place))

    def space(self, path: str) -> Space | None:
        """Ask for and record the space of a file system."""

        def record(found: Space) -> None:
            self._append("spaces.txt", f"{path} {found.total} {found.free}\n")

        return self._once(("space", path), lambda: self._machine.space(path), record)

    def _once(
        self, question: tuple[str, ...], ask: Callable[[], Answer], record: Callable[[Any], None]
    ) -> Answer:
        """Ask the machine and record its answer, unless it has answered already."""
        if question not in self._answers:
            answer = self._answers[question] = ask()
            if answer is not None:
                record(answer)
        known: Answer = self._answers[question]
        return known

    def _write(self, path: str, text: str) -> None:
        place = _inside(self._root, path)
        if place is None:
            return
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")

    def _append(self, path: str, text: str) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        with (self._root / path).open("a", encoding="utf-8") as file:
            file.write(text)


def _inside(root: Path, path: str) -> Path | None:
    """Return the place of a path in a tree; None if a link or `..` leads out of the tree."""
    place = root / path.lstrip("/")
    return place if place.resolve().is_relative_to(root.resolve()) else None


def _pairs(text: str | None, separator: str) -> list[tuple[str, str]]:
    parts = (line.partition(separator) for line in (text or "").splitlines())
    return [(key, rest) for key, found, rest in parts if found]
