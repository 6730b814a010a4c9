"""Reads secrets from files: the one of a training on several hosts, and the one of an aggregator."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from shoal.errors import ConfigError

SECRET_FILE = "SHOAL_SECRET_FILE"
"""Environment variable: a file with the secret of a training on several hosts, equal on all of them."""

AGGREGATOR_SECRET_FILE = "SHOAL_AGGREGATOR_SECRET_FILE"
"""Environment variable: a file with the secret of an aggregator, for it and for the ranks that use it."""

_LEAST, _MOST = 32, 4096  # bytes of a secret


def read_secret(environment: Mapping[str, str] = os.environ, variable: str = SECRET_FILE) -> bytes | None:
    """Return the secret in the file that a variable names; None if the variable is not set.

    Raises:
        ConfigError: The file cannot be read, others may read it, or it is too short or too long.
    """
    name = environment.get(variable)
    if not name:
        return None
    possible = f"a file of {_LEAST} to {_MOST} bytes that its owner alone can read"
    try:
        with Path(name).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read(_MOST + 1)
    except OSError as error:
        raise ConfigError(
            f"{variable}={name} cannot be read: {error.strerror}",
            possible=possible,
            change="make one with: (umask 077; head -c 32 /dev/urandom > FILE), and copy it to each host",
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"{variable}={name} has the mode {mode:04o}, so that others can read it",
            possible=possible,
            change=f"make a new secret with: (umask 077; head -c 32 /dev/urandom > {name})",
        )
    if not _LEAST <= len(secret) <= _MOST:
        raise ConfigError(
            f"{variable}={name} has {len(secret) if len(secret) <= _MOST else f'more than {_MOST}'} bytes",
            possible=possible,
            change=f"make a new secret with: (umask 077; head -c 32 /dev/urandom > {name})",
        )
    return secret


def aggregator_secret(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the 32 bytes that an aggregator and its ranks prove to know; None if it asks for none.

    Raises:
        ConfigError: See `read_secret`.
    """
    secret = read_secret(environment, AGGREGATOR_SECRET_FILE)
    return None if secret is None else hmac.digest(secret, b"aggregator", hashlib.sha256)
