"""A store whose values only those can read or write who know a secret: for several hosts.

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

import hmac
import secrets
from datetime import timedelta
from typing import Any, final

from torch._C._distributed_c10d import Store

from shoal.collectives.secret_file import SECRET_FILE
from shoal.errors import CommunicationError, ConfigError

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
