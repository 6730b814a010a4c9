"""How the ranks of a new group find each other: what they tell one another through the store."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.collectives.core import Core
from shoal.collectives.interface import address_towards, find_interface_address
from shoal.collectives.options import Options
from shoal.errors import CollectiveError, ConfigError

__all__ = ["form_group", "host_identity"]

_LOOK = timedelta(seconds=0.5)
"""How often who waits looks whether those that are missing still exist."""

_SAID = "said "
"""Before what a rank tells; without it, a key holds the reason for which the rank gave up."""


def host_identity(environment: Mapping[str, str] = os.environ) -> str:
    """What two processes have in common if and only if they can share memory and see each other's process.

    That is the running kernel, and the process and network namespaces within it. SHOAL_HOST_ID stands for it
    where it is set, to keep processes of one machine apart.
    """
    if environment.get("SHOAL_HOST_ID"):
        return environment["SHOAL_HOST_ID"]
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
    return " ".join([boot, *namespaces, str(os.getuid())])


def form_group(
    core: Core,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    options: Options,
) -> tuple[int, list[int]]:
    """Forms the native group of these ranks.

    Args:
        core: The native core.
        store: The ranks' common store, for this group alone.
        rank: This process within the group.
        size: Ranks in the group.
        timeout: For all ranks to come.
        options: How the group communicates.

    Returns:
        The native group, and for each rank the number of its host.

    Raises:
        CollectiveError: The ranks did not all come, cannot reach each other, or have different options.
    """
    exchange = _Exchange(store, rank, size, timeout)
    group = None
    try:
        told = exchange("host", f"{options.fingerprint()} {os.getpid()} {host_identity()}")
        fingerprints, pids, identities = zip(*(each.split(" ", 2) for each in told), strict=True)
        for other, fingerprint in enumerate(fingerprints):
            if fingerprint != fingerprints[rank]:
                raise CollectiveError(
                    f"the group did not form: rank {other} has other options than rank {rank} "
                    "(SHOAL_ALGORITHMS, SHOAL_TABLE, SHOAL_STREAMS, SHOAL_DEBUG, or Options)",
                    rank=other,
                    fault="mismatch",
                )
        hosts = [identities.index(identity) for identity in identities]
        exchange.watch({peer: int(pids[peer]) for peer in range(size) if hosts[peer] == hosts[rank]})
        address = _own_address(store) if len(set(hosts)) > 1 else ""
        group = core.group_create(
            rank, size, (ctypes.c_int * size)(*hosts), address.encode(), options.streams, options.heartbeat
        )
        if not group:
            raise core.failure("forming a group")
        if options.direct_reads:  # before anyone tries whether it can read
            peers = [int(pids[peer]) for peer in range(size) if hosts[peer] == hosts[rank] and peer != rank]
            allowed = core.group_allow_reads(group, (ctypes.c_int * len(peers))(*peers), len(peers))
            core.check(allowed, "forming a group")
        text = ctypes.create_string_buffer(512)
        core.check(core.group_introduce(group, text, len(text)), "forming a group")
        told = exchange("introduction", f"{secrets.token_hex(32)} {text.value.decode()}")
        secret, _, _ = told[0].partition(" ")
        introductions = [each.partition(" ")[2].encode() for each in told]
        everyone = (ctypes.c_char_p * size)(*introductions)
        joined = core.group_join(group, everyone, bytes.fromhex(secret), timeout.total_seconds())
        can_read = core.check(joined, "joining the group") == 1 and options.direct_reads
        outcomes = exchange("joined", "reads" if can_read else "copies")
        all_can_read = all(outcome == "reads" for outcome in outcomes)
        core.check(core.group_start(group, all_can_read), "forming a group")
    except BaseException as failure:
        exchange.give_up(str(failure) or type(failure).__name__)
        if group:
            core.group_free(group)
        raise
    return group, hosts


class _Exchange:
    """Everyone tells everyone something, through the store."""

    SUBJECTS = ("host", "introduction", "joined")

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._timeout = timeout
        self._processes: Mapping[int, int] = {}
        self._untold = list(self.SUBJECTS)
        # A group that was ended may have left its keys in the store: each rank counts how often it came.
        self._round = store.add(f"rounds/{rank}", 1)

    def __call__(self, subject: str, text: str) -> list[str]:
        keys = [f"{self._round}/{subject}/{rank}" for rank in range(self._size)]
        self._untold.remove(subject)
        self._store.set(keys[self._rank], _SAID + text)
        while not self._wait(keys):
            missing = self._missing(keys)
            for rank in missing:
                if rank in self._processes and not _is_running(self._processes[rank]):
                    raise CollectiveError(
                        f"the group did not form: rank {rank} (process {self._processes[rank]}) ended",
                        rank=rank,
                        fault="peer lost",
                    )
            if missing and time.monotonic() > self._deadline:
                names = ("ranks " if len(missing) > 1 else "rank ") + ", ".join(map(str, missing))
                raise CollectiveError(
                    f"the group did not form: {names} of {self._size} did not come within "
                    f"{self._timeout.total_seconds():g} s",
                    rank=missing[0],
                    fault="timeout",
                )
        told = [self._store.get(key).decode() for key in keys]
        for rank, each in enumerate(told):
            if not each.startswith(_SAID):
                raise CollectiveError(f"the group did not form: rank {rank}: {each}", rank=rank)
        return [each.removeprefix(_SAID) for each in told]

    def watch(self, processes: Mapping[int, int]) -> None:
        """Has the end of these ranks' processes, which are on this host, noticed."""
        self._processes = processes

    def give_up(self, reason: str) -> None:
        """Tells the others why this rank will not come."""
        with contextlib.suppress(RuntimeError):  # the store is what went wrong
            for subject in self._untold:
                self._store.set(f"{self._round}/{subject}/{self._rank}", reason)

    def _missing(self, keys: list[str]) -> list[int]:
        try:
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError as error:
            raise CollectiveError(f"the group did not form: {error}", fault="peer lost") from error

    def _wait(self, keys: list[str]) -> bool:
        began = time.monotonic()
        try:
            self._store.wait(keys, _LOOK)
        except RuntimeError as error:
            # The stores have several errors for the end of that time.
            if time.monotonic() - began >= _LOOK.total_seconds() / 2:
                return False
            raise CollectiveError(f"the group did not form: {error}", fault="peer lost") from error
        return True


def _is_running(pid: int) -> bool:
    try:
        state = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()[0]
        )
    except OSError:
        return False
    return state not in "ZX"


def _own_address(store: Store, environment: Mapping[str, str] = os.environ) -> str:
    """Where this rank listens: on the interface of SHOAL_INTERFACE, or the one towards where all met."""
    name = environment.get("SHOAL_INTERFACE")
    if name:
        return find_interface_address(name)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    meeting_point = getattr(store, "host", None) or environment.get("MASTER_ADDR")
    if meeting_point:
        return address_towards(str(meeting_point))
    raise ConfigError(
        "there are several hosts, and nothing says over which interface they reach each other",
        possible="a store on a host (TCPStore), MASTER_ADDR, or SHOAL_INTERFACE",
        change="set SHOAL_INTERFACE, such as eth0, on every host",
    )
