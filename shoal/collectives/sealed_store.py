"""A store whose values only those can read or write who know a secret: for several hosts.

torch's store asks for no password. Whoever reaches its port can read what ranks tell each other there, among
it the secrets of their groups, and write values of its own. A sealed store encrypts each value and signs it
together with its key, so that a stranger's value, or one that was moved to another key, is refused.

    value in the store     nonce (16 bytes) | content XOR keystream | HMAC-SHA256 (32 bytes)
    keystream              HMAC-SHA256(encryption key, nonce | number of the block), block after block
    signature              HMAC-SHA256(signing key, length of the key, key, nonce, encrypted content)

Both keys are derived from the secret. Counters (`add`) stay plain, since the store itself adds: a stranger
can disturb them, delete values, or bring back an older value of the same key, and so stop a training; it
cannot read or choose a value. The secret must be new for each training, or values of an earlier one could
come back.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import timedelta
from typing import Any, final

from torch._C._distributed_c10d import Store

from shoal.collectives.secret_file import SECRET_FILE
from shoal.errors import CommunicationError

__all__ = ["SealedStore"]

_NONCE = 16  # bytes
_SIGNATURE = 32

_KEPT: list[SealedStore] = []
"""All of this process: native code that holds a store, as PrefixStore does, does not keep its Python half."""


@final
class SealedStore(Store):
    """A store that keeps sealed values in another one.

    Args:
        inner: The store that holds them.
        secret: The secret that all ranks know.
    """

    def __init__(self, inner: Any, secret: bytes) -> None:
        super().__init__()
        _KEPT.append(self)
        self._secret = secret
        self._inner = inner  # torch's stubs know neither stores of bytes nor a store's timeout
        self.set_timeout(inner.timeout)
        self._encryption = hmac.digest(secret, b"shoal store: encryption", "sha256")
        self._signing = hmac.digest(secret, b"shoal store: signature", "sha256")

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
        hidden = self._mixed(nonce, content)
        return nonce + hidden + self._signature(key, nonce + hidden)

    def _open(self, key: str, sealed: bytes) -> bytes:
        body, signature = sealed[:-_SIGNATURE], sealed[-_SIGNATURE:]
        if len(body) < _NONCE or not hmac.compare_digest(signature, self._signature(key, body)):
            raise CommunicationError(
                f"the value {key!r} in the ranks' store was not written by who knows the secret of "
                f"{SECRET_FILE}: a rank has another secret or none, or a stranger writes to the store"
            )
        return self._mixed(body[:_NONCE], body[_NONCE:])

    def _signature(self, key: str, body: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._signing, len(name).to_bytes(8, "little") + name + body, "sha256")

    def _mixed(self, nonce: bytes, content: bytes) -> bytes:
        """Return the content with the keystream: encrypted if it was plain, plain if it was encrypted."""
        blocks = -(-len(content) // hashlib.sha256().digest_size)
        stream = b"".join(
            hmac.digest(self._encryption, nonce + number.to_bytes(8, "little"), "sha256")
            for number in range(blocks)
        )[: len(content)]
        mixed = int.from_bytes(content, "little") ^ int.from_bytes(stream, "little")
        return mixed.to_bytes(len(content), "little")
