"""Files of checkpoints in a host's memory, sent to other hosts.

A launcher serves them, so that they can be had after the rank that wrote them has died. Over a link go:

    asks    {"kind": "files"}, then for each file {"file": "step-00000010/rank-00000.safetensors"}
    answers {"size": bytes} and the bytes; {"missing": why} if it is not there
    asks    {"list": true}
    answers {"held": {identity: [name, [file there, ...], [file missing, ...]]}}
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from shoal import limits
from shoal.channel import Channel, dial
from shoal.checkpoint import checkpoints, read_manifest
from shoal.errors import CheckpointError
from shoal.launch.hosts.gate import LAUNCHER, Service
from shoal.limits import open_regular, read_regular

MANIFEST = "manifest.json"
"""Name of a checkpoint's manifest."""

_FILE = re.compile(r"step-[0-9.]+(?:tmp)?/[a-z0-9-]+\.(?:safetensors|json)")
_AT_ONCE = 1 << 20  # bytes
_PATIENCE = 15.0  # seconds without a byte


def files_service(folder: Path) -> Service:
    """Return the service that sends files of checkpoints in a folder."""

    def serve(link: Channel, asked: Mapping[str, Any]) -> None:
        try:
            while True:
                asked_for = link.receive()
                if "list" in asked_for:
                    held = {
                        name: [each.name, each.files, each.missing] for name, each in held_in(folder).items()
                    }
                    link.send({"held": held})
                else:
                    _send(link, folder, str(asked_for.get("file")))
        except OSError:
            link.close()

    return serve


def _send(link: Channel, folder: Path, name: str) -> None:
    if not _FILE.fullmatch(name):
        link.send({"missing": f"{name!r} is no file of a checkpoint"})
        return
    try:
        file = open_regular(folder / name)
    except OSError as error:
        link.send({"missing": f"{name}: {error.strerror}"})
        return
    with file:
        link.send({"size": os.fstat(file.fileno()).st_size})
        link.socket.sendfile(file)


@dataclass(frozen=True, slots=True)
class Held:
    """What a host holds of a checkpoint.

    Attributes:
        name: The checkpoint's directory.
        files: The files that it has.
        missing: The files that it lacks.
    """

    name: str
    files: tuple[str, ...]
    missing: tuple[str, ...]


def held_in(folder: Path) -> dict[str, Held]:
    """Return what a folder holds of checkpoints, by their identity: the hash of the manifest."""
    found: dict[str, Held] = {}
    for path in checkpoints(folder):
        with contextlib.suppress(CheckpointError, OSError):
            manifest = read_manifest(path)
            identity = hashlib.sha256(read_regular(path / MANIFEST, limits.MANIFEST)).hexdigest()
            there = {name for name, record in manifest.files.items() if is_there(path / name, record.size)}
            missing = set(manifest.files) - there
            found.setdefault(identity, Held(path.name, tuple(sorted(there)), tuple(sorted(missing))))
    return found


def is_there(path: Path, size: int) -> bool:
    """Return whether a file is there in full."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False


@final
class Peer:
    """Another host, whose files can be had. A context manager.

    Args:
        address: Address and port of its launcher.
        token: The token of the run.

    Raises:
        OSError: It cannot be reached, or does not take the token.
        ChannelStrangerError: It has another token.
    """

    def __init__(self, address: tuple[str, int], token: bytes) -> None:
        self._link = dial(address, token, LAUNCHER)
        self._link.limit(_PATIENCE)
        self._link.send({"kind": "files"})

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def held(self) -> dict[str, Held]:
        """Return what the host holds of checkpoints, by their identity.

        Raises:
            OSError: The host is gone.
        """
        self._link.send({"list": True})
        told = self._link.receive().get("held", {})
        return {
            each: Held(str(name), tuple(there), tuple(lacks)) for each, (name, there, lacks) in told.items()
        }

    def fetch(self, name: str, target: Path) -> str:
        """Fetch a file, and return its SHA-256 in hexadecimal.

        Args:
            name: The checkpoint's directory and the file in it.
            target: The new file.

        Raises:
            OSError: The host is gone, or there is no room for the file.
            CheckpointError: The host has no such file.
        """
        self._link.send({"file": name})
        told = self._link.receive()
        if "size" not in told:
            raise CheckpointError(f"another host does not have {name}: {told.get('missing')}")
        rest, found = int(told["size"]), hashlib.sha256()
        buffer = memoryview(bytearray(min(_AT_ONCE, rest)))
        with target.open("wb") as file:
            while rest:
                received = self._link.socket.recv_into(buffer[: min(len(buffer), rest)])
                if not received:
                    raise ConnectionResetError("the other host closed the connection")
                found.update(buffer[:received])
                file.write(buffer[:received])
                rest -= received
        return found.hexdigest()
