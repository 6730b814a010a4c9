"""A machine as a folder: what was read of it, so that another machine can examine it.

A recorded tree has the files under their own paths (`sys/class/net/eth0/mtu`), and beside them

    commands/NAME.txt     what commands printed, such as commands/nvidia-smi-q.txt
    environment.txt       the variables that matter to communication, NAME=VALUE
    links.txt             links that were followed: PATH -> TARGET
    spaces.txt            file systems: PATH TOTAL FREE, in bytes
    seconds.txt           seconds between the two moments
    after/                what was different at the second moment
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, final

from shoal.doctor.machine import Machine, Space

Answer = TypeVar("Answer")

_MOST = 4 << 20


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
