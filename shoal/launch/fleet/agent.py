"""The program that a fleet starts on a host, and what it is talked to over."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from shoal.errors import ConfigError
from shoal.signals import withheld_from_children

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


_ENDS = 5.0  # seconds for a program to end that has closed its output


@final
@dataclass(frozen=True, slots=True)
class Agent:
    """`python -m shoal.launch.hosts` on a host: the launcher of this host's ranks.

    Attributes:
        stream: Its stdin and stdout.
        how_ended: Returns how it ended, once its output has.
        close: Ends the connection, whatever becomes of the agent.
    """

    stream: socket.socket
    how_ended: Callable[[], str]
    close: Callable[[], object]


Said = Callable[[bytes], object]
"""Told of each line that a host says on stderr, from any thread."""

StartAgent = Callable[[Host, Said], Agent]
"""Starts an agent on a host."""


def start_program(command: Sequence[str], said: Said) -> Agent:
    """Start an agent by a program of this host, such as ssh.

    The program is a session of its own: Ctrl-C on the terminal reaches the fleet alone, which decides.

    Args:
        command: The program and its arguments.
        said: Told of each line of its stderr.
    """
    here, there = socket.socketpair()
    with there, withheld_from_children():
        pipe = there.fileno()
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.PIPE, start_new_session=True
        )

    def read() -> None:
        assert process.stderr is not None
        with process.stderr as stream:
            for line in stream:
                said(line)

    def how_ended() -> str:
        try:
            code = process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            return f"{command[0]} has closed its output"
        reader.join(_ENDS)
        return f"{command[0]} ended with exit code {code}"

    def close() -> None:
        with contextlib.suppress(OSError):
            here.shutdown(socket.SHUT_RDWR)
        process.kill()
        process.wait()

    reader = threading.Thread(target=read, name="shoal-stderr", daemon=True)
    reader.start()
    return Agent(here, how_ended, close)


_OPTIONS = (
    "-T",  # no terminal: a signal is a message
    "-x",
    *("-o", "BatchMode=yes"),  # a question for a password would wait for ever
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),  # a silent host is lost after 15 s
)


def agent_command(folder: str, python: Sequence[str]) -> str:
    """Return the command line, for a shell on the host, that starts an agent.

    Args:
        folder: The working directory, from which `python -m` also imports.
        python: The Python there, with Shoal.
    """
    return f"cd {shlex.quote(folder)} && exec {shlex.join([*python, '-m', 'shoal.launch.hosts'])}"


def ssh_command(host: str, command: str, ssh: Sequence[str] = ("ssh",)) -> list[str]:
    """Return the command that runs another on a host.

    Args:
        host: The host's name, as ssh takes it.
        command: The command line for the host's shell.
        ssh: The program ssh, with options that come before Shoal's.
    """
    return [*ssh, *_OPTIONS, "--", host, command]
