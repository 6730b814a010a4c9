"""The token that the hosts of a run share: a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import ConfigError

TOKEN_FILE = "SHOAL_TOKEN_FILE"
"""Environment variable: the file of the token."""

_LEAST = 16  # bytes


def find_token(environment: Mapping[str, str] = os.environ, *, makes: bool) -> Path:
    """Return the file of the token: that of SHOAL_TOKEN_FILE, or `~/.config/shoal/token`.

    Args:
        environment: The environment.
        makes: Whether to make the file if it is missing, as the host does that leads. Others may be started
            before it.

    Raises:
        ConfigError: The file is too short, or others may read it.
    """
    home = Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = Path(environment.get(TOKEN_FILE) or home / "shoal" / "token")
    if makes and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
    if path.exists():
        read_token(path)
    return path


def read_token(path: Path) -> bytes:
    """Return the token of a file.

    Raises:
        ConfigError: The file is missing, too short, or others may read it.
    """
    try:
        mode, token = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"the hosts of a run share a token, and {path} cannot be read: {error.strerror}",
            possible="the file that the host of the rendezvous address made when it began",
            change=f"copy it from there with mode 600, or name another file in {TOKEN_FILE}",
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"others than its owner may use {path}, which holds the token of the hosts",
            possible="mode 600",
            change=f"run: chmod 600 {path}",
        )
    if len(token) < _LEAST:
        raise ConfigError(
            f"the token in {path} has {len(token)} characters",
            possible=f"at least {_LEAST}, such as 64 random digits",
            change=f"delete {path} on all hosts; the host of the rendezvous address makes another one",
        )
    return token
