"""How the ranks of a new group find each other: what they tell one another through the store."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.collectives.core import Core
from shoal.collectives.interface import address_towards, find_interface_address
from shoal.collectives.options import Options
from shoal.errors import CollectiveError, ConfigError

__all__ = ["form_group", "host_identity"]


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
    told = exchange("host", f"{options.fingerprint()} {host_identity()}")
    fingerprints = [each.partition(" ")[0] for each in told]
    for other, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[rank]:
            raise CollectiveError(
                f"the group did not form: rank {other} has other options than rank {rank} (SHOAL_ALGORITHMS, "
                "SHOAL_TABLE, SHOAL_STREAMS, SHOAL_DEBUG, or Options)",
                rank=other,
                fault="mismatch",
            )
    identities = [each.partition(" ")[2] for each in told]
    hosts = [identities.index(identity) for identity in identities]
    address = ""
    if len(set(hosts)) > 1:
        address = _own_address(store)
    group = core.group_create(
        rank, size, (ctypes.c_int * size)(*hosts), address.encode(), options.streams, options.heartbeat
    )
    if not group:
        raise core.failure("forming a group")
    try:
        text = ctypes.create_string_buffer(512)
        core.check(core.group_introduce(group, text, len(text)), "forming a group")
        told = exchange("introduction", f"{secrets.token_hex(32)} {text.value.decode()}")
        secret, _, _ = told[0].partition(" ")
        introductions = [each.partition(" ")[2].encode() for each in told]
        joined = core.group_join(
            group, (ctypes.c_char_p * size)(*introductions), bytes.fromhex(secret), timeout.total_seconds()
        )
        problem = str(core.failure("joining the group")) if joined < 0 else ""
        outcomes = exchange("joined", problem or ("reads" if joined and options.direct_reads else "copies"))
        for other, outcome in enumerate(outcomes):
            if outcome not in ("reads", "copies"):
                raise CollectiveError(f"the group did not form: rank {other}: {outcome}", rank=other)
        can_read = all(outcome == "reads" for outcome in outcomes)
        core.check(core.group_start(group, can_read), "forming a group")
    except BaseException:
        core.group_close(group)
        raise
    return group, hosts


class _Exchange:
    """Everyone tells everyone something, through the store."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout

    def __call__(self, subject: str, text: str) -> list[str]:
        keys = [f"{subject}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], text)
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise CollectiveError(
                f"the group did not form: rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of "
                f"{self._size} did not come within {self._timeout.total_seconds():g} s",
                rank=missing[0] if missing else -1,
                fault="timeout",
            ) from error
        return [self._store.get(key).decode() for key in keys]


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
