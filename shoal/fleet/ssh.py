"""The command that starts an agent on a host by ssh."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

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
    return f"cd {shlex.quote(folder)} && exec {shlex.join([*python, '-m', 'shoal.launch'])}"


def ssh_command(host: str, command: str, ssh: Sequence[str] = ("ssh",)) -> list[str]:
    """Return the command that runs another on a host.

    Args:
        host: The host's name, as ssh takes it.
        command: The command line for the host's shell.
        ssh: The program ssh, with options that come before Shoal's.
    """
    return [*ssh, *_OPTIONS, "--", host, command]
