"""Measures the offsets of the hosts' clocks beside the training.

Ranks of one host share its monotonic clock, so nothing is measured there. If a run has several hosts, rank 0
answers questions for the time, and one rank of every other host asks: some packets every few seconds, of
which the one with the shortest way there and back counts, as in NTP (RFC 5905):

    offset = ((received there - sent here) + (sent there - received here)) / 2

It is wrong by at most half of the way there and back. The system notes when a packet arrives, so that it does
not matter if the thread waits for the interpreter's lock. Answers go only to packets with the run's token.

Nothing here may stop or slow the training: threads of their own wait for packets, and after a failure the
timeline is as exact as the wall clocks of the hosts.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2s
from pathlib import Path
from typing import Any, Protocol, final

from shoal.collectives.options import address_towards, find_interface_address
from shoal.errors import ConfigError
from shoal.proc import boot_id
from shoal.record.metrics import AppendFile
from shoal.spec.timeline.timeline import Tie, tie_line

_EVERY_SECONDS = 5.0
_PACKETS = 8
_PATIENCE_SECONDS = 0.25
_TOKEN_BYTES = 16
_QUESTION = struct.Struct(f"<{_TOKEN_BYTES}sQ")
_ANSWER = struct.Struct(f"<{_TOKEN_BYTES}sQqq")
_SO_TIMESTAMPNS = 35  # Linux: with each packet, the time at which it arrived
_TIME = struct.Struct("@qq")


class Gathers(Protocol):
    """All ranks, which tell each other a value."""

    @property
    def rank(self) -> int:
        """Return the rank of this process."""

    def all_gather_object(self, value: Any) -> Sequence[Any]:
        """Return the value of every rank, in rank order."""


def clock_name() -> str:
    """Return the name of this host's monotonic clock: processes with one name share the clock.

    It tells neither the host's name nor its address. SHOAL_HOST_ID replaces it where it is set, as for the
    backend.
    """
    if os.environ.get("SHOAL_HOST_ID"):
        return os.environ["SHOAL_HOST_ID"]
    return blake2s(f"{socket.gethostname()} {boot_id()}".encode(), digest_size=6).hexdigest()


def exchange_clocks(
    ranks: Gathers,
    folder: str | os.PathLike[str],
    number: int,
    say: Callable[[str], object],
    *,
    towards: str = "",
    every: float = _EVERY_SECONDS,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> ClockExchange:
    """Begin to measure, if the ranks are on several hosts; all ranks call this together.

    Args:
        ranks: The ranks.
        folder: The folder of the timeline files.
        number: The global rank, for the name of the file.
        say: Called with a report of a failure, one line.
        towards: The name or address of a host, such as the one where ranks meet: rank 0 listens at its own
            address on the way there. By default MASTER_ADDR, or the host's own name. SHOAL_INTERFACE, where
            it is set, names the interface to listen on.
        every: Seconds between two measurements.
        clock: The clock to compare, in nanoseconds.
    """
    name = clock_name()
    names = [str(each) for each in ranks.all_gather_object(name)]
    exchange = ClockExchange(clock)
    if len(set(names)) == 1:
        return exchange
    told = ranks.all_gather_object(exchange.answer(towards) if ranks.rank == 0 else None)[0]
    asks = name != names[0] and names.index(name) == ranks.rank
    if asks and isinstance(told, tuple):
        file = AppendFile(Path(folder) / f"clock-{number:05d}.jsonl", "the comparison of clocks", say)
        exchange.ask(told[0], int(told[1]), told[2], file, host=name, reference=names[0], every=every)
    return exchange


@final
class ClockExchange:
    """The part of one rank: it answers, asks, or does nothing.

    Args:
        clock: The clock to compare, in nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._ended = threading.Event()
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def answer(self, towards: str = "") -> tuple[str, int, bytes] | None:
        """Answer questions; return the address, the port and the token. None if that is not possible."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            interface = os.environ.get("SHOAL_INTERFACE")
            meeting_point = towards or os.environ.get("MASTER_ADDR") or socket.gethostname()
            address = find_interface_address(interface) if interface else address_towards(meeting_point)
            opened = _open(address)
            opened.bind((address, 0))
        except (OSError, ConfigError):
            return None
        port: int = opened.getsockname()[1]
        self._begin(opened, lambda: self._answer_all(opened, token))
        return address, port, token

    def ask(
        self,
        address: str,
        port: int,
        token: bytes,
        file: AppendFile,
        *,
        host: str,
        reference: str,
        every: float,
    ) -> None:
        """Measure now and then every so many seconds, and append what was measured to a file."""
        try:
            opened = _open(address)
            opened.connect((address, port))
        except OSError:
            file.close()
            return

        def measure() -> None:
            while not self._ended.is_set():
                best = self._best_of(opened, token)
                if best is not None:
                    there, here, error = best
                    file.write(tie_line(Tie(host, reference, here, there, error)))
                self._ended.wait(every)
            file.close()

        self._begin(opened, measure)

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * _PATIENCE_SECONDS * _PACKETS)
            self._thread = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _begin(self, opened: socket.socket, work: Callable[[], None]) -> None:
        opened.settimeout(_PATIENCE_SECONDS)
        self._socket = opened
        self._thread = threading.Thread(target=work, name="shoal-clock", daemon=True)
        self._thread.start()

    def _answer_all(self, opened: socket.socket, token: bytes) -> None:
        while not self._ended.is_set():
            try:
                packet, arrived, sender = _receive(opened, self._clock)
                if len(packet) == _QUESTION.size:
                    given, number = _QUESTION.unpack(packet)
                    if secrets.compare_digest(given, token):
                        opened.sendto(_ANSWER.pack(token, number, arrived, self._clock()), sender)
            except TimeoutError:
                continue
            except OSError:
                if self._ended.wait(_PATIENCE_SECONDS):
                    return

    def _best_of(self, opened: socket.socket, token: bytes) -> tuple[int, int, int] | None:
        """Return the time there, the time here and the error, all in nanoseconds, of the quickest answer."""
        best = None
        for _ in range(_PACKETS):
            number = secrets.randbits(64)
            sent = self._clock()
            try:
                opened.send(_QUESTION.pack(token, number))
                arrived, left, received = self._answer_to(opened, token, number)
            except OSError:
                if self._ended.is_set():
                    break
                continue
            error = (received - sent - (left - arrived)) // 2
            here, there = (sent + received) // 2, (arrived + left) // 2
            if error >= 0 and (best is None or error < best[2]):
                best = there, here, error
        return best

    def _answer_to(self, opened: socket.socket, token: bytes, number: int) -> tuple[int, int, int]:
        """Return when a question arrived, when its answer left, and when that arrived here.

        Raises:
            TimeoutError: No answer came in time; late answers to other questions are passed over.
        """
        until = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < until:
            packet, received, _ = _receive(opened, self._clock)
            if len(packet) == _ANSWER.size:
                given, answered, arrived, left = _ANSWER.unpack(packet)
                if answered == number and secrets.compare_digest(given, token):
                    return arrived, left, received
        raise TimeoutError


def _open(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_DGRAM)
    opened.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    return opened


def _receive(opened: socket.socket, clock: Callable[[], int]) -> tuple[bytes, int, tuple[object, ...]]:
    """Return a packet, the time of its arrival, and its sender.

    The system notes arrivals on the wall clock; what has passed since then is the same on every clock.
    """
    packet, noted, _, sender = opened.recvmsg(_ANSWER.size + 1, socket.CMSG_SPACE(_TIME.size))
    now, wall = clock(), time.time_ns()
    for level, kind, data in noted:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) == _TIME.size:
            seconds, nanoseconds = _TIME.unpack(data)
            passed = wall - (seconds * 1_000_000_000 + nanoseconds)
            if 0 <= passed < 1_000_000_000:
                return packet, now - passed, sender
    return packet, now, sender
