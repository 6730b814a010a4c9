"""Checkpoints in the memory of several hosts, none of which holds all of one.

A host keeps the files of its own ranks, and copies of those of the next host: if one host is lost, each file
is still somewhere. Who goes on from such a checkpoint gets the files that it wants, and lacks, from others.

    host 0      files of its ranks, copies of host 1's
    host 1      files of its ranks, copies of host 2's
    host 2      files of its ranks, copies of host 0's
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import final

from shoal.checkpoint import (
    REAL_FILES,
    Coordinator,
    Manifest,
    attempt_together,
    free_path,
    read_manifest,
    staging_path,
    step_of,
)
from shoal.collectives.options import split_address
from shoal.errors import CheckpointError, CommunicationError, CorruptCheckpointError
from shoal.launch.elastic import PEER
from shoal.launch.hosts import MANIFEST, TOKEN_FILE, Held, Peer, held_in, is_there, read_token
from shoal.scratch import scratch_folder
from shoal.spec.run.writer import Claiming

FOLDER = "SHOAL_MEMORY_FOLDER"
"""Environment variable: the folder of these checkpoints."""

_MEMORY = Path("/dev/shm")
_PREFIX = "shoal-members-"


@contextlib.contextmanager
def memory_folder() -> Iterator[Path | None]:
    """Make a folder in this host's memory, and remove it after the context; None if there is no such memory.

    Folders whose process was killed are removed too; see `shoal.scratch`.
    """
    if not _MEMORY.is_dir():
        yield None
        return
    with scratch_folder(_PREFIX, _MEMORY) as folder:
        yield folder


@final
class HostMemory:
    """The memory of the hosts of a group of ranks; all ranks make one, and call `find` and `take` together.

    Args:
        directory: The folder in this host's memory.
        coordinator: All ranks.
        others: Where launchers serve files whose ranks stand by: they may hold copies. Rank 0's count.
        environment: The environment, which names this host's launcher and the file of the token.

    Attributes:
        directory: The folder in this host's memory.
        has_neighbours: Whether there are several hosts.
        first: The first rank of this host, which acts for it.
        is_first: Whether that is this rank.
    """

    def __init__(
        self,
        directory: Path,
        coordinator: Coordinator,
        others: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.directory, self._others = directory, others
        self._coordinator = coordinator
        own = environment[PEER]
        self._of_ranks: list[str] = coordinator.all_gather_object(own)
        self._hosts = list(dict.fromkeys(self._of_ranks))
        self._own = self._hosts.index(own)
        self._token = Path(environment[TOKEN_FILE])
        self._holdings: dict[str, dict[str, Held]] = {}  # by host and identity
        self._taken = ""
        self.has_neighbours = len(self._hosts) > 1
        self.first = self._of_ranks.index(own)
        self.is_first = self.first == coordinator.rank

    def copy(self, staging: Path, manifest: Manifest) -> None:
        """Copy the files that the next host has just written; see `shoal.checkpoint.Spread`.

        Raises:
            OSError: That host is gone, or there is no room.
            CheckpointError: It does not have them, or others than the manifest says.
        """
        neighbour = self._hosts[(self._own + 1) % len(self._hosts)]
        names = [name for name in manifest.files if self._of_ranks[_writer(name)] == neighbour]
        self._fetch(neighbour, staging.name, names, staging, manifest)

    def find(self) -> dict[Path, str]:
        """Return the checkpoints that the hosts hold in full, together: a name for each, and its identity."""
        own = {self._hosts[self._own]: held_in(self.directory)} if self.is_first else {}
        if self._coordinator.rank == 0:
            own |= self._held_by_others()
        told = self._coordinator.all_gather_object(own)
        self._holdings = {host: held for each in told for host, held in each.items()}
        missing: dict[str, set[str]] = {}
        names: dict[str, str] = {}
        for holding in self._holdings.values():
            for identity, held in holding.items():
                lacking = set(held.missing)
                missing[identity] = missing.get(identity, lacking) & lacking
                names.setdefault(identity, held.name)
        return {Path(identity, names[identity]): identity for identity, lacks in missing.items() if not lacks}

    def take(self, identity: str) -> Path:
        """Return the directory of a checkpoint that `find` found, with its manifest, on this host.

        Raises:
            CorruptCheckpointError: The host that has it is gone.
        """
        try:
            told = attempt_together(
                self._coordinator,
                "the manifest of another host is missing",
                lambda: self._take(identity) if self.is_first else None,
            )
        except CheckpointError as error:
            raise CorruptCheckpointError(str(error)) from error
        self._taken = identity
        return Path(str(told[self.first]))

    def require(self, path: Path, manifest: Manifest, names: Iterable[str]) -> None:
        """Get files of the checkpoint that was taken from other hosts, if this one lacks them.

        Raises:
            CorruptCheckpointError: Another host is gone, or has other files than the manifest says.
        """
        for name in sorted(names):
            try:
                with (path / f"{name}.lock").open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)  # other ranks of this host may want it too
                    if not is_there(path / name, manifest.files[name].size):
                        host = self._holders(self._taken, name)[0]
                        held = self._holdings[host][self._taken].name
                        self._fetch(host, held, [name], path, manifest)
            except (OSError, CheckpointError) as error:
                raise CorruptCheckpointError(f"{name} cannot be had from another host: {error}") from error

    def _held_by_others(self) -> dict[str, dict[str, Held]]:
        found = {}
        for host in self._others:
            if host not in self._hosts:
                with contextlib.suppress(OSError, CommunicationError), self._peer(host) as peer:
                    found[host] = peer.held()
        return found

    def _peer(self, host: str) -> Peer:
        return Peer(split_address(host, PEER), read_token(self._token))

    def _take(self, identity: str) -> Path:
        held = self._holdings[self._hosts[self._own]].get(identity)
        if held is not None:
            return self.directory / held.name
        other = self._holders(identity)[0]
        name = self._holdings[other][identity].name
        writer = Claiming(self.directory).wait()
        staging = staging_path(self.directory, step_of(Path(name)), writer.number)
        staging.mkdir(parents=True, exist_ok=True)
        with self._peer(other) as peer:
            if peer.fetch(f"{name}/{MANIFEST}", staging / MANIFEST) != identity:
                raise CheckpointError(f"{name} has changed on another host")
        path = free_path(self.directory, read_manifest(staging).step)
        REAL_FILES.rename(staging, path)
        return path

    def _holders(self, identity: str, file: str = "") -> list[str]:
        """Return the hosts that have a file of a checkpoint, those after this one first."""
        others = [host for host in self._holdings if host not in self._hosts]
        after = self._hosts[self._own + 1 :] + self._hosts[: self._own] + others
        found = [(host, self._holdings.get(host, {}).get(identity)) for host in after]
        return [host for host, held in found if held is not None and (not file or file in held.files)]

    def _fetch(self, host: str, name: str, files: list[str], folder: Path, manifest: Manifest) -> None:
        if not files:
            return
        try:
            with self._peer(host) as peer:
                for file in files:
                    part = folder / f"{file}.part"
                    if peer.fetch(f"{name}/{file}", part) != manifest.files[file].sha256:
                        raise CheckpointError(f"{name}/{file} of host {host} is not what was written")
                    part.rename(folder / file)
        except CommunicationError as error:
            raise CheckpointError(str(error)) from error


def _writer(name: str) -> int:
    """Return the rank that wrote a file, from its name."""
    return int(name.removeprefix("rank-")[:5])
