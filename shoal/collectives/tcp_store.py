"""The store in which the processes of a training meet, reachable at one address alone.

torch's own server listens on every interface of rank 0's host unless it gets a socket. Here it gets one that
is bound to the address where the others look for it.

A store whose values only those can read or write who know a secret: for several hosts.

torch's store asks for no password. Whoever reaches its port can read what ranks tell each other there, among
it the secrets of their groups, and write values of its own. A sealed store encrypts each value, and binds it
to its key, so that a stranger's value, or one that was moved to another key, is refused.

    value in the store     nonce (12 random bytes) | ciphertext | tag (16 bytes)
    cipher                 ChaCha20-Poly1305 (RFC 8439) of the package `cryptography`
    encryption key         HMAC-SHA256(secret, "shoal store: values")
    associated data        the value's key in the store, UTF-8

Counters (`add`) stay plain, since the store itself adds: a stranger
can disturb them, delete values, or bring back an older value of the same key (a replay), and so stop a
training; it cannot read or choose a value. The secret must be new for each training, or values of an earlier
one could come back. Its key then also seals far fewer than 2^32 values, among which two random nonces are
equal with a chance below 2^-32.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, final

from torch._C._distributed_c10d import Store, TCPStore

from shoal.errors import CollectiveError, CommunicationError, ConfigError
from shoal.proc import process_state

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


_NONCE = 12  # bytes

_KEPT: list[SealedStore] = []
"""All of this process: native code that holds a store, as PrefixStore does, does not keep its Python half."""


@final
class SealedStore(Store):
    """A store that keeps sealed values in another one.

    Args:
        inner: The store that holds them.
        secret: The secret that all ranks know.

    Raises:
        ConfigError: The package `cryptography` is not installed.
    """

    def __init__(self, inner: Any, secret: bytes) -> None:
        super().__init__()
        _KEPT.append(self)
        self._secret = secret
        self._inner = inner  # torch's stubs know neither stores of bytes nor a store's timeout
        self.set_timeout(inner.timeout)
        self._cipher = _cipher_of(hmac.digest(secret, b"shoal store: values", "sha256"))

    @property
    def host(self) -> str:
        """The host of the store that holds the values."""
        return str(getattr(self._inner, "host", ""))

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._inner.set(key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        """Return a value; wait for it.

        Raises:
            CommunicationError: Somebody without the secret wrote it.
        """
        self.wait([key])
        return self._open(key, self._inner.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if the present one is expected, or absent and "" is expected; return the present one.

        What is sealed differs each time, so this reads, compares, and lets the store replace what was read.
        """
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        present = self._inner.get(key) if self._inner.check([key]) else b""
        if present and self._open(key, present) != wanted:
            return self._open(key, present)
        if not present and wanted:
            return wanted
        told = self._inner.compare_set(key, present, self._seal(key, desired))
        return self._open(key, told)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is not sealed; return it."""
        return int(self._inner.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether it was there."""
        return bool(self._inner.delete_key(key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        own: Any = self
        self._inner.wait(keys, own.timeout if timeout is None else timeout)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._inner.num_keys())

    # What native code, such as a PrefixStore, calls has these names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def clone(self) -> Store:
        """Return another store with the same values, and a connection of its own."""
        return SealedStore(self._inner.clone(), self._secret)

    def _seal(self, key: str, value: str | bytes | Any) -> bytes:
        content = value.encode() if isinstance(value, str) else bytes(value)
        nonce = secrets.token_bytes(_NONCE)
        return nonce + bytes(self._cipher.encrypt(nonce, content, key.encode()))

    def _open(self, key: str, sealed: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], key.encode()))
        except (InvalidTag, ValueError):  # the latter of a value that is too short for a nonce
            raise CommunicationError(
                f"the value {key!r} in the ranks' store was not written by who knows the secret of "
                f"{SECRET_FILE}: a rank has another secret or none, or a stranger writes to the store"
            ) from None


def _cipher_of(key: bytes) -> Any:
    """Return the cipher for a key of 32 bytes; its package is imported for those who have a secret."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    except ImportError as error:
        raise ConfigError(
            f"{SECRET_FILE} needs the package 'cryptography', which is not installed",
            possible="Shoal's own installation, which brings it",
            change="run: pip install cryptography",
        ) from error
    return ChaCha20Poly1305(key)


_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable of torch: "True" if the launcher serves the store, so that rank 0 does not."""


def open_store(
    master: tuple[str, int],
    rank: int,
    ranks: int,
    timeout: timedelta,
    environment: Mapping[str, str] = os.environ,
) -> Store:
    """Return the common store of these processes; rank 0 serves it, unless their launcher does.

    It listens at the master's address. It listens on every interface only if that is no address of this
    host, or a name that this host alone takes for loopback: then others may know the host by another address.

    With SHOAL_SECRET_FILE its values are sealed: see `SealedStore`.

    Args:
        master: Host and port where the processes meet.
        rank: This process's rank.
        ranks: Number of processes.
        timeout: Time limit for all to come, and for later calls.
        environment: Environment that says whether the launcher serves the store, and where the secret is.

    Raises:
        ConfigError: The file of the secret cannot be used.
        RuntimeError: The processes did not all meet.
    """
    secret = read_secret(environment)
    store = _connected(master, rank, ranks, timeout, environment)
    return store if secret is None else SealedStore(store, secret)


def _connected(
    master: tuple[str, int], rank: int, ranks: int, timeout: timedelta, environment: Mapping[str, str]
) -> Store:
    host, port = master
    if rank != 0 or environment.get(_AGENT) == "True":
        return TCPStore(host, port, ranks, False, timeout)
    listening = _listen(host, port)
    if listening is None:
        return TCPStore(host, port, ranks, True, timeout, multi_tenant=True)
    return TCPStore(host, port, ranks, True, timeout, multi_tenant=True, master_listen_fd=listening.detach())


def _listen(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at the host's address; None where only torch's own choice is possible."""
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
        if is_loopback and not _means_loopback(host):
            return None
        return socket.create_server((str(address[0]), port), family=family, backlog=2048)
    return None  # no address of this host, or this process serves a store there already


def _means_loopback(host: str) -> bool:
    """Return whether every host takes this text for itself; a name may be 127.0.1.1 on its own host alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


_SHORTEST_PAUSE = 2e-4
"""Seconds between the first two looks at the store; later pauses are longer."""

_PAUSE_PER_RANK = 1e-4
"""Seconds per rank by which the longest pause grows: the store serves 10,000 looks a second at most."""

_SECONDS_PER_LOOK_AT_PEERS = 0.5

_SAID = "said "
"""Prefix of a text that a rank tells; a text without it is the reason why the rank gave up."""


class Assembly:
    """The ranks of a new group, which tell each other one text for each subject.

    Each rank puts its text into the store and adds one to a count. The rank that makes the count full puts
    all texts together, and the others take them from there: a few requests a rank, however many ranks there
    are. No rank waits in the store, because the store warns of each wait that ends without a result.

    Args:
        store: The ranks' common store, for this group alone.
        rank: This process within the group.
        size: Ranks in the group.
        timeout: Time limit for all ranks to come.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._timeout = timeout
        self._processes: Mapping[int, int] = {}
        self._told: set[str] = set()
        # A group that ended may have left its keys in the store: each rank counts how often it came.
        self._round = store.add(f"rounds/{rank}", 1)

    def tell(self, subject: str, text: str) -> list[str]:
        """Tell all ranks a text, and return theirs.

        Args:
            subject: What the texts are about, equal on all ranks. Use each subject once.
            text: This rank's text.

        Returns:
            Each rank's text.

        Raises:
            CollectiveError: A rank gave up, ended, or did not come in time; or the store did not answer.
        """
        self._told.add(subject)
        try:
            told = self._gather(subject, _SAID + text)
        except CollectiveError:
            raise
        except RuntimeError as error:  # the stores raise this
            raise CollectiveError(f"the group did not form: {error}", fault="peer lost") from error
        for rank, each in enumerate(told):
            if not each.startswith(_SAID):
                raise CollectiveError(f"the group did not form: rank {rank}: {each}", rank=rank)
        return [each.removeprefix(_SAID) for each in told]

    def watch(self, processes: Mapping[int, int]) -> None:
        """Watch for the end of these ranks' processes, which are on this host."""
        self._processes = processes

    def give_up(self, reason: str, subjects: Sequence[str]) -> None:
        """Tell the others why this rank will not come, for each subject that it has not told yet."""
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            for subject in subjects:
                if subject not in self._told:
                    self._told.add(subject)
                    self._put(subject, reason)

    def _gather(self, subject: str, text: str) -> list[str]:
        if self._put(subject, text):
            return self._put_together(subject)
        everyone = self._key(subject, "everyone")
        pause, longest = _SHORTEST_PAUSE, max(2e-3, _PAUSE_PER_RANK * self._size)
        look = time.monotonic() + _SECONDS_PER_LOOK_AT_PEERS
        while not self._store.check([everyone]):
            now = time.monotonic()
            if now > min(look, self._deadline):
                look = now + _SECONDS_PER_LOOK_AT_PEERS
                if self._look_at_peers(subject):
                    return self._put_together(subject)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        told: list[str] = json.loads(self._store.get(everyone))
        return told

    def _put(self, subject: str, text: str) -> bool:
        """Put this rank's text into the store; return whether all ranks have put theirs."""
        self._store.set(self._key(subject, self._rank), text)
        return bool(self._store.add(self._key(subject, "count"), 1) == self._size)

    def _put_together(self, subject: str) -> list[str]:
        keys = [self._key(subject, rank) for rank in range(self._size)]
        told = [each.decode() for each in self._store.multi_get(keys)]
        self._store.set(self._key(subject, "everyone"), json.dumps(told))
        return told

    def _look_at_peers(self, subject: str) -> bool:
        """Return whether all ranks have told; the last one may have ended before it put the texts together.

        Raises:
            CollectiveError: A rank ended, or time ran out.
        """
        ended = [rank for rank, pid in self._processes.items() if not process_state(pid)]
        is_late = time.monotonic() > self._deadline
        if not ended and not is_late:
            return False
        missing = [rank for rank in range(self._size) if not self._store.check([self._key(subject, rank)])]
        for rank in ended:
            if rank in missing:
                raise CollectiveError(
                    f"the group did not form: rank {rank} (process {self._processes[rank]}) ended",
                    rank=rank,
                    fault="peer lost",
                )
        if missing and is_late:
            names = ("ranks " if len(missing) > 1 else "rank ") + ", ".join(map(str, missing))
            raise CollectiveError(
                f"the group did not form: {names} of {self._size} did not come within "
                f"{self._timeout.total_seconds():g} s",
                rank=missing[0],
                fault="timeout",
            )
        return not missing

    def _key(self, subject: str, name: object) -> str:
        return f"{self._round}/{subject}/{name}"
