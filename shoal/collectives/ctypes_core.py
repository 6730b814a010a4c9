"""Loads the native core: its functions with their types, and its errors as exceptions."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from shoal.errors import CollectiveError, ConfigError

_FAULTS = {
    1: "invalid",
    2: "timeout",
    3: "peer lost",
    4: "peer stopped",
    5: "aborted",
    6: "mismatch",
    7: "system",
    8: "refused",
    10: "timeout",
    11: "system",
}
_INTERRUPTED, _UNFINISHED = 9, 10

GOING_ON = (-_INTERRUPTED, -_UNFINISHED)
"""Results of a wait for an operation that is still running."""


class Call(ctypes.Structure):
    """One collective: the struct `shoal_call` of csrc/c_interface.h."""

    _fields_ = [
        ("collective", ctypes.c_int32),
        ("algorithm", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("reduction", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("asynchronous", ctypes.c_int32),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("send_bytes", ctypes.c_void_p),
        ("receive_bytes", ctypes.c_void_p),
        ("timeout", ctypes.c_double),
        ("stripes", ctypes.c_void_p),
        ("stripe_count", ctypes.c_uint64),
    ]


class Core:
    """The functions of csrc/c_interface.h, without the prefix `shoal_`.

    A function that only begins an operation keeps the interpreter's lock, because to release and take it
    again would cost more than a small operation. A function that may wait, or copy much, releases it. `build`
    is the hash of the sources that the core was built from. A rank gives at most `one_shot_bytes` to a
    collective by one-shot. A message of `eager_bytes` or more may be copied when it is sent.
    """

    def __init__(self, path: Path) -> None:
        keeping, releasing = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
        size, real, ticket = ctypes.c_uint64, ctypes.c_double, ctypes.c_int64

        def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(library, f"shoal_{name}")
            found.restype, found.argtypes = result, arguments
            return found

        self._last_failure = function(
            keeping, "last_failure", number, ctypes.POINTER(number), text, ctypes.c_size_t
        )
        self.group_create = function(
            releasing, "group_create", pointer, number, number, pointer, text, number, real, text, text
        )
        self.group_allow_reads = function(
            releasing, "group_allow_reads", number, pointer, ctypes.POINTER(number), number
        )
        self.group_introduce = function(releasing, "group_introduce", number, pointer, text, ctypes.c_size_t)
        self.group_join = function(releasing, "group_join", number, pointer, pointer, text, real)
        self.group_start = function(releasing, "group_start", number, pointer, number)
        self.group_abort = function(releasing, "group_abort", number, pointer, text)
        self.group_check = function(keeping, "group_check", number, pointer)
        self.group_close = function(releasing, "group_close", None, pointer)
        self.group_free = function(releasing, "group_free", None, pointer)
        self.begin = function(keeping, "begin", ticket, pointer, ctypes.POINTER(Call))
        self.send_small = function(keeping, "send", ticket, pointer, number, number, pointer, size, real)
        self.send_large = function(releasing, "send", ticket, pointer, number, number, pointer, size, real)
        self.receive = function(keeping, "receive", ticket, pointer, number, number, pointer, size, real)
        self.wait = function(releasing, "wait", number, pointer, ticket, real, ctypes.POINTER(real))
        self.test = function(keeping, "test", number, pointer, ticket)
        self.forget = function(keeping, "forget", None, pointer, ticket)
        self._raise = function(keeping, "raise", None)
        self.aggregator_create = function(keeping, "aggregator_create", pointer, text, text)
        self.aggregator_address = function(
            keeping, "aggregator_address", number, pointer, text, ctypes.c_size_t
        )
        self.aggregator_serve = function(releasing, "aggregator_serve", number, pointer)
        self.aggregator_free = function(releasing, "aggregator_free", None, pointer)
        self.buffer_allocate = function(keeping, "buffer_allocate", pointer, size)
        self.buffer_release = function(keeping, "buffer_release", number, pointer)
        self.buffer_trim = function(releasing, "buffer_trim", ticket)
        self.build: str = function(keeping, "build", text)().decode()
        self.one_shot_bytes: int = function(keeping, "one_shot_bytes", size)()
        self.eager_bytes: int = function(keeping, "eager_bytes", size)()
        self.vector_unit = function(keeping, "vector_unit", text)
        self.force_vector_unit = function(keeping, "force_vector_unit", number, text)
        self.combine = function(
            releasing, "combine", number, number, number, pointer, pointer, number, size, number
        )
        self.encode = function(
            releasing, "encode", ticket, number, size, size, pointer, size, pointer, size, pointer
        )
        self.decode = function(releasing, "decode", number, number, size, size, pointer, size, pointer, size)
        self.decode_add = function(
            releasing, "decode_add", number, number, size, size, pointer, size, pointer, size, ctypes.c_float
        )
        self.flag_latency = function(releasing, "flag_latency", real, number, number)

    def failure(self, doing: str, code: int = 7) -> CollectiveError:
        """Return the error that the last failed call of this thread reported.

        Args:
            doing: What failed, as the subject of the message, such as "all_reduce".
            code: The call's error code, positive.
        """
        rank, text = ctypes.c_int(-1), ctypes.create_string_buffer(1024)
        self._last_failure(ctypes.byref(rank), text, len(text))
        return CollectiveError(
            f"{doing} failed: {text.value.decode(errors='replace')}", rank=rank.value, fault=_FAULTS[code]
        )

    def check(self, result: int, doing: str) -> int:
        """Return a result unless it is an error.

        Raises:
            CollectiveError: The result is negative.
            BaseException: A signal handler raised it during the call, such as KeyboardInterrupt.
        """
        if result == -_INTERRUPTED:
            self._raise()
        if result < 0:
            raise self.failure(doing, -result)
        return result


@functools.cache
def load_core() -> Core | None:
    """Return the native core; None if it was not built.

    Raises:
        ConfigError: It is there, and cannot be loaded, or is not that of these sources.
    """
    path = Path(__file__).with_name("_core.so")
    if not path.exists():
        return None
    try:
        return Core(path)
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"the native core does not load: {error}",
            possible="a core that was compiled on this system, from the sources of this Shoal",
            change=f"install Shoal from its sources again; without {path} ranks communicate through gloo",
        ) from error


def is_built() -> bool:
    """Return whether the native core was built, which the backend "shoal" needs."""
    return load_core() is not None
