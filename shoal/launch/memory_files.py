"""Files of checkpoints in a host's memory, sent to other hosts.

A launcher serves them, so that they can be had after the rank that wrote them has died. Over a link go:

    asks    {"kind": "files"}, then for each file {"file": "step-00000010/rank-00000.safetensors"}
    answers {"size": bytes} and the bytes; {"missing": why} if it is not there
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from shoal.errors import CheckpointError
from shoal.launch.gate import Service
from shoal.launch.link import Link, dial

__all__ = ["PEER", "Peer", "files_service"]

PEER = "SHOAL_PEER"
"""Environment variable: address and port at which this host's launcher serves its files."""

_FILE = re.compile(r"step-[0-9.]+(?:tmp)?/[a-z0-9-]+\.(?:safetensors|json)")
_AT_ONCE = 1 << 20  # bytes
_PATIENCE = 15.0  # seconds without a byte


def files_service(folder: Path) -> Service:
    """Return the service that sends files of checkpoints in a folder."""

    def serve(link: Link, asked: Mapping[str, Any]) -> None:
        try:
            while True:
                _send(link, folder, str(link.receive().get("file")))
        except OSError:
            link.close()

    return serve


def _send(link: Link, folder: Path, name: str) -> None:
    if not _FILE.fullmatch(name):
        link.send({"missing": f"{name!r} is no file of a checkpoint"})
        return
    try:
        file = (folder / name).open("rb")
    except OSError as error:
        link.send({"missing": f"{name}: {error.strerror}"})
        return
    with file:
        link.send({"size": os.fstat(file.fileno()).st_size})
        link.socket.sendfile(file)


@final
class Peer:
    """Another host, whose files can be had. A context manager.

    Args:
        address: Address and port of its launcher.
        token: The token of the run.

    Raises:
        OSError: It cannot be reached.
        LinkRefusedError: It has another token.
    """

    def __init__(self, address: tuple[str, int], token: bytes) -> None:
        self._link = dial(address, token)
        self._link.limit(_PATIENCE)
        self._link.send({"kind": "files"})

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

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
