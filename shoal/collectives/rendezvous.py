"""Rendezvous: the ranks of a new group find each other, and form a group of the native core.

Ranks that know nothing about each other need three rounds. First each tells its host, then its shared memory
and the address where it listens, then whether it could reach all others. The ranks of a subgroup know the
first and the last from the larger group, and need one round.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store

from shoal.collectives.ctypes_core import Core
from shoal.collectives.options import (
    Options,
    address_towards,
    find_interface_address,
    numeric_address,
    require_same,
)
from shoal.collectives.tcp_store import Assembly, aggregator_secret
from shoal.errors import ConfigError
from shoal.proc import boot_id

_COPIES, _READS, _APART = 0, 1, 2
"""Ways in which a rank reaches the memory of others on its host (`shoal_group_join`, csrc/c_interface.h)."""


class Member(NamedTuple):
    """Facts that the ranks of a group know about one rank.

    Attributes:
        identity: Short form of `host_identity`.
        pid: Id of its process.
        host: Number of its host: ranks with the same number share memory.
    """

    identity: str
    pid: int
    host: int


@dataclass(frozen=True)
class Formed:
    """A group that formed.

    Attributes:
        handle: The native group.
        members: The facts about each rank.
        all_read: Whether the ranks of each host read each other's private memory.
        turns: Number of ranks of this host that share a core: 1 if each has a core of its own.
        name: A text that all its ranks know, and that no other group has.
    """

    handle: int
    members: tuple[Member, ...]
    all_read: bool
    turns: int
    name: str

    def among(self, ranks: Sequence[int]) -> Formed:
        """Return what is known about some of the ranks, in this order."""
        return replace(self, members=tuple(self.members[rank] for rank in ranks))


def host_identity(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text that is equal in two processes if and only if they can share memory.

    They can if they have the running kernel, and the process and network namespaces in it, in common. Then
    each also sees the other's process. SHOAL_HOST_ID replaces the text where it is set, to separate processes
    of one machine.
    """
    if environment.get("SHOAL_HOST_ID"):
        return environment["SHOAL_HOST_ID"]
    try:
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    except OSError:
        namespaces = []
    if not namespaces or not boot_id():
        return f"{socket.gethostname()} {os.getpid()}"
    return " ".join([boot_id(), *namespaces, str(os.getuid())])


def form_group(
    core: Core,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    options: Options,
    known: Formed | None = None,
) -> Formed:
    """Form the native group of these ranks.

    Args:
        core: The native core.
        store: The ranks' common store, for this group alone.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        timeout: Time limit for all ranks to come.
        options: How the group communicates.
        known: Facts that the ranks know about each other from another group, equal on all of them.

    Raises:
        CollectiveError: The ranks did not all come, cannot reach each other, or have different options or
            builds of the core.
    """
    forming = _Forming(core, store, rank, size, timeout, options)
    try:
        formed = forming.by_acquaintance(known) if known is not None else None
        return formed or forming.from_nothing()
    except BaseException as failure:
        forming.give_up(str(failure) or type(failure).__name__)
        raise


class _Forming:
    """One rank's part in the forming of a group; the arguments are those of `form_group`."""

    SUBJECTS = ("acquaintance", "host", "introduction", "joined", "introduction apart", "joined apart")

    def __init__(
        self, core: Core, store: Store, rank: int, size: int, timeout: timedelta, options: Options
    ) -> None:
        self._core = core
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._options = options
        self._assembly = Assembly(store, rank, size, timeout)
        self._group = 0
        self._name = ""

    def by_acquaintance(self, known: Formed) -> Formed | None:
        """Form the group in one round; return None, on all ranks, if the known facts are out of date."""
        members = known.members
        self._assembly.watch(self._neighbours(members))
        self._create(members)
        reads = known.all_read and self._options.direct_reads
        told = self._assembly.tell(
            "acquaintance", f"{_READS if reads else _COPIES} {self._about_itself()} {self._introduction()}"
        )
        parts = [text.split(" ", 4) for text in told]
        identities, pids = self._compare([" ".join(each[1:4]) for each in parts])
        if any((identities[each], pids[each]) != member[:2] for each, member in enumerate(members)):
            self._free()
            return None
        if self._join([each[4] for each in parts]) == _APART:
            raise self._core.failure("joining the group")
        return self._start(members, all(int(each[0]) == _READS for each in parts))

    def from_nothing(self) -> Formed:
        """Form the group in three rounds, or in five if the system forbids a host's ranks to share memory."""
        identities, pids = self._compare(self._assembly.tell("host", self._about_itself()))
        members = tuple(
            Member(identity, pid, identities.index(identity))
            for identity, pid in zip(identities, pids, strict=True)
        )
        formed = self._form(members, "")
        if isinstance(formed, Formed):
            return formed
        self._free()
        apart = {members[rank].host for rank in formed}
        if self._rank == formed[0]:
            warnings.warn(
                f"rank {formed[0]} cannot map the memory of other processes of its host (they may belong to "
                "another user, or be protected): the ranks of that host communicate over TCP, which is "
                "slower",
                stacklevel=2,
            )
        members = tuple(
            member._replace(host=self._size + rank) if member.host in apart else member
            for rank, member in enumerate(members)
        )
        formed = self._form(members, " apart")
        if not isinstance(formed, Formed):
            raise self._core.failure("joining the group")
        return formed

    def give_up(self, reason: str) -> None:
        """Tell the others why this rank will not come, and free the unfinished group."""
        self._assembly.give_up(reason, self.SUBJECTS)
        if self._group:
            self._core.group_abort(self._group, reason.encode())
            self._free()

    def _form(self, members: Sequence[Member], again: str) -> Formed | list[int]:
        """Return the group, or else the ranks that may not map the memory of others on their host."""
        self._assembly.watch(self._neighbours(members))
        self._create(members)
        told = self._assembly.tell("introduction" + again, self._introduction())
        outcome = self._join(told)
        if outcome == _READS and not self._options.direct_reads:
            outcome = _COPIES
        outcomes = [int(each) for each in self._assembly.tell("joined" + again, str(outcome))]
        apart = [rank for rank, each in enumerate(outcomes) if each == _APART]
        return apart or self._start(members, all(each == _READS for each in outcomes))

    def _about_itself(self) -> str:
        identity = hashlib.sha256(host_identity().encode()).hexdigest()[:16]
        return f"{self._options.fingerprint(self._core.build)} {os.getpid()} {identity}"

    def _compare(self, abouts: Sequence[str]) -> tuple[list[str], list[int]]:
        """Return the host identity of each rank, and the process of each.

        Raises:
            CollectiveError: Ranks have different options, or builds of the core.
        """
        fingerprints, pids, identities = zip(*(each.split(" ") for each in abouts), strict=True)
        require_same(fingerprints, self._rank)
        return list(identities), [int(pid) for pid in pids]

    def _neighbours(self, members: Sequence[Member]) -> dict[int, int]:
        own = members[self._rank].identity
        return {rank: member.pid for rank, member in enumerate(members) if member.identity == own}

    def _create(self, members: Sequence[Member]) -> None:
        hosts = [member.host for member in members]
        has_several_hosts = len(set(hosts)) > 1
        address = _own_address(self._store) if has_several_hosts else ""
        named = self._options.aggregator if has_several_hosts else ""
        aggregator = numeric_address(named, "SHOAL_AGGREGATOR") if named else ""
        self._group = self._core.group_create(
            self._rank,
            self._size,
            (ctypes.c_int * self._size)(*hosts),
            address.encode(),
            self._options.streams,
            self._options.heartbeat,
            aggregator.encode(),
            aggregator_secret() if named else None,
        )
        if not self._group:
            raise self._core.failure("forming a group")
        if self._options.direct_reads:  # before another rank tries to read
            own = hosts[self._rank]
            peers = [each.pid for rank, each in enumerate(members) if each.host == own and rank != self._rank]
            allowed = self._core.group_allow_reads(
                self._group, (ctypes.c_int * len(peers))(*peers), len(peers)
            )
            self._core.check(allowed, "forming a group")

    def _introduction(self) -> str:
        text = ctypes.create_string_buffer(512)
        self._core.check(self._core.group_introduce(self._group, text, len(text)), "forming a group")
        # The group's secret is rank 0's.
        secret = secrets.token_hex(32) if self._rank == 0 else "-"
        return f"{secret} {text.value.decode()}"

    def _join(self, told: Sequence[str]) -> int:
        secret, _, _ = told[0].partition(" ")
        self._name = hashlib.sha256(f"name of {secret}".encode()).hexdigest()[:16]
        introductions = [each.partition(" ")[2].encode() for each in told]
        everyone = (ctypes.c_char_p * self._size)(*introductions)
        seconds = self._timeout.total_seconds()
        outcome = self._core.group_join(self._group, everyone, bytes.fromhex(secret), seconds)
        return self._core.check(outcome, "joining the group")

    def _start(self, members: Sequence[Member], all_read: bool) -> Formed:
        turns = self._core.check(self._core.group_start(self._group, all_read), "forming a group")
        handle, self._group = self._group, 0
        return Formed(handle, tuple(members), all_read, turns, self._name)

    def _free(self) -> None:
        handle, self._group = self._group, 0
        self._core.group_free(handle)


def _own_address(store: Store, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address where this rank listens: of SHOAL_INTERFACE, or of the route to the store."""
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
