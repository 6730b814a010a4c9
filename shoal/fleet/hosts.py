"""The machines that a training may use, as a list or a file names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ConfigError

_NAME = re.compile(r"[\w.@:%\[\]-]+")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that a training may use.

    Attributes:
        name: Its name, as ssh takes it: HOST, USER@HOST, or a Host of the configuration of ssh.
        ranks: Number of its ranks; None for the number of all hosts.
        address: Its address, as the other hosts reach it; empty to ask its agent.
    """

    name: str
    ranks: int | None = None
    address: str = ""


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of a list with commas, such as `a,b,user@c`.

    Raises:
        ConfigError: A name is missing, given twice, or none that ssh takes.
    """
    return _checked([Host(name.strip()) for name in text.split(",")], f"--hosts {text}")


def read_hosts(path: Path) -> list[Host]:
    """Return the hosts of a file: one a line, `NAME` or `NAME slots=RANKS`; `#` begins a comment.

    Raises:
        ConfigError: The file cannot be read, or a line is no host.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--hosts-file {path} cannot be read: {error}",
            possible="a file with one host a line, such as `node1 slots=8`",
            change="correct the path",
        ) from error
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = [word.removeprefix("slots=") for word in words[1:]]
        if len(slots) > 1 or not all(slot.isdecimal() and int(slot) > 0 for slot in slots):
            raise ConfigError(
                f"line {number} of {path} is no host: {line.strip()}",
                possible="NAME, or NAME slots=RANKS",
                change="correct the line",
            )
        hosts.append(Host(words[0], int(slots[0]) if slots else None))
    return _checked(hosts, f"--hosts-file {path}")


def _checked(hosts: Sequence[Host], given: str) -> list[Host]:
    names = [host.name for host in hosts]
    wrong = [name for name in names if not _NAME.fullmatch(name) or name.startswith("-")]
    twice = sorted({name for name in names if names.count(name) > 1})
    if wrong or twice or not hosts:
        reason = f"names {twice[0]} twice" if twice else f"holds {wrong[0]!r}" if wrong else "names no host"
        raise ConfigError(
            f"{given} {reason}",
            possible="names of hosts, each once, such as a,b,user@c",
            change="correct the list; several ranks on a host are --nproc, or slots= in a file",
        )
    return list(hosts)
