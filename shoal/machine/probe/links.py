"""Measure links: every collective's curve at each level, pairs of hosts, and contention with compute.

Inside the hosts each host's ranks are a group, and all groups are busy at once. Between hosts there are two
forms: the group of all ranks, and the groups of ranks with the same index on each host. These groups share
the hosts' links as data-parallel groups do beside tensor-parallel ones.

The time that ranks lose by waiting for one another, when they repeat equal work and synchronise after it.

Work of several lengths is done with a synchronisation after each piece, and without. The time that
synchronisations add, beside their own, grows in proportion to the work if one rank is slower than another,
and with the square root of the work if delays are random.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shoal.collectives import Options
from shoal.errors import CommunicationError, ConfigError
from shoal.machine.bench import Settings
from shoal.machine.bench.contestants.contestant import TorchGroup
from shoal.machine.bench.measure import measure
from shoal.machine.bench.settings import Ranks
from shoal.machine.probe.measurements import CollectiveTime, HostRates, SendTime, SynchronisationTime
from shoal.machine.probe.place import COLD, Effort, Place, time_in_turns
from shoal.spec.plan.group import Group

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
_PAIR_BYTES = 16 << 20
_PAIR_ROUNDS = 5
_BESIDE = {"cpu": 1024, "cuda": 8192}  # size of a product that takes longer than the collective beside it
_BESIDE_BYTES = 4 << 20


def form_groups(place: Place, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make process groups of the probe's backend, one for each rank; return this rank's.

    Each group has had a collective of all its ranks: NCCL forms it at the first operation, and would wait
    forever for a rank that takes no part in that.
    """
    own: dist.ProcessGroup | None = None
    for members in groups:
        options: Any = Options.from_environment() if place.backend == "shoal" else None
        group: dist.ProcessGroup = dist.new_group(list(members), backend=place.backend, pg_options=options)
        if place.ranks.rank in members:
            own = group
    assert own is not None
    dist.all_reduce(torch.zeros(1, device=place.device), group=own)
    place.finish()
    return own


def form_innermost(place: Place) -> dist.ProcessGroup:
    """Make groups of each host's ranks, or one of all if each host has one rank; return this rank's."""
    return form_groups(place, place.hosts if place.ranks_per_host > 1 else [range(place.ranks.count)])


def measure_links(place: Place, effort: Effort) -> tuple[CollectiveTime | SendTime, ...]:
    """Time every collective at every size, level by level."""
    times: list[CollectiveTime | SendTime] = []
    if place.ranks_per_host > 1:
        times += _curves(place, 0, place.hosts, 1, effort)
    if len(place.hosts) > 1:
        everyone = tuple(range(place.ranks.count))
        times += _curves(place, 1, [everyone], 1, effort)
    if len(place.hosts) > 1 and place.ranks_per_host > 1:
        across = list(zip(*place.hosts, strict=True))
        times += _curves(place, 1, across, place.ranks_per_host, effort)
    return tuple(times)


def _curves(
    place: Place, level: int, groups: Sequence[Sequence[int]], stride: int, effort: Effort
) -> list[CollectiveTime | SendTime]:
    own = form_groups(place, groups)
    within = Ranks(dist.get_rank(own), dist.get_world_size(own), place.ranks.local_rank)
    on_cuda = place.device.type == "cuda"
    contestant = TorchGroup(
        place.backend,
        own,
        memory=place.device.type,
        device=place.device if on_cuda else None,
    )
    settings = Settings(
        collectives=COLLECTIVES,
        backends=(place.backend,),
        sizes=effort.sizes,
        rounds=effort.rounds,
        apart=0 if on_cuda else COLD,
    )
    times: list[CollectiveTime | SendTime] = []
    for (row,) in measure(settings, {place.backend: contestant}, within):
        if row.wrong:
            raise CommunicationError(
                f"{row.collective} of {row.bytes} bytes over {place.backend}: {row.wrong} elements are wrong"
            )
        if not row.seconds or (row.collective == "send_recv" and level and stride < place.ranks_per_host):
            continue  # with all ranks, most messages stay inside a host
        if row.collective == "send_recv":
            times.append(SendTime(level, stride, row.bytes, row.median))
        else:
            group = Group(within.count, stride)
            times.append(CollectiveTime(level, row.collective, group, row.bytes, row.median))
    dist.destroy_process_group(own)
    return times


def measure_hosts(place: Place) -> tuple[HostRates, ...]:
    """Time pairs of hosts: neighbours in both pairings, far pairs all at once, and one pair alone.

    A slow link shows in one pairing of neighbours, a slow adapter in both. Links that many flows share show
    in far pairs that are slower all at once than one alone. Fewer than three hosts give no such signs.
    """
    count = len(place.hosts)
    if count < 3:
        return ()
    everyone = form_groups(place, [range(place.ranks.count)])
    far = [(host, host + count // 2) for host in range(count // 2)]
    pairings = {
        "even": [(host, host + 1) for host in range(0, count - 1, 2)],
        "odd": [(host, (host + 1) % count) for host in range(1, count - (count % 2 == 1), 2)],
        "far": far,
        "alone": far[:1],
    }
    rates = tuple(
        HostRates(name, _paired(place, everyone, pairs))  # type: ignore[arg-type]
        for name, pairs in pairings.items()
    )
    dist.destroy_process_group(everyone)
    return rates


def _paired(place: Place, group: dist.ProcessGroup, pairs: Sequence[tuple[int, int]]) -> dict[int, float]:
    partners = dict(pairs) | {second: first for first, second in pairs}
    own = next(host for host, members in enumerate(place.hosts) if place.ranks.rank in members)
    given = torch.zeros(_PAIR_BYTES, dtype=torch.uint8, device=place.device)
    got = torch.empty_like(given)
    seconds = []
    for _ in range(_PAIR_ROUNDS):
        place.ranks.start_together()
        start = time.perf_counter()
        if own in partners:
            place_in_host = place.hosts[own].index(place.ranks.rank)
            _exchange(group, given, got, place.hosts[partners[own]][place_in_host])
            place.finish()
        seconds.append(time.perf_counter() - start)
    quickest = place.gathered(min(seconds))
    return {
        host: len(members) * _PAIR_BYTES / max(quickest[rank] for rank in members)
        for host, members in enumerate(place.hosts)
        if host in partners
    }


def _exchange(group: dist.ProcessGroup, given: torch.Tensor, got: torch.Tensor, other: int) -> None:
    pair = [dist.P2POp(dist.isend, given, other, group), dist.P2POp(dist.irecv, got, other, group)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


def measure_contention(place: Place, effort: Effort) -> float:
    """Measure the share, 0 to 1, by which an all-reduce slows a product that runs beside it.

    Measured over the innermost links; the slowdown by slower links follows from their rate.
    """
    if place.ranks.count == 1:
        return 0.0
    group = form_innermost(place)
    size = _BESIDE[place.device.type]
    matrix = torch.randn(size, size, device=place.device)
    result = torch.empty_like(matrix)
    buffer = torch.zeros(_BESIDE_BYTES // 4, device=place.device)
    product = partial(torch.mm, matrix, matrix, out=result)
    reduce = partial(dist.all_reduce, buffer, group=group)

    def together() -> None:
        work = reduce(async_op=True)
        product()
        work.wait()

    seconds = time_in_turns({"product": product, "reduce": reduce, "together": together}, place, effort)
    dist.destroy_process_group(group)
    return min(max((seconds["together"] - seconds["product"]) / seconds["reduce"], 0.0), 1.0)


_CHUNK = 8 << 20
_CHUNKS = 16


def measure_files(folder: Path, effort: Effort) -> float:
    """Return the bytes/s of writes and reads together, by turns; of several rounds, the median.

    Args:
        folder: A folder on the file system to measure. A file without a name is made there.
        effort: Amount of measuring.

    Raises:
        ConfigError: No such file can be made, or the file system cannot pass by the page cache.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file, mmap.mmap(-1, _CHUNK) as buffer:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.posix_fallocate(file.fileno(), 0, _CHUNK * _CHUNKS)
            _turn(file.fileno(), buffer)  # reserved space takes longer to write for the first time
            rates = sorted(_turn(file.fileno(), buffer) for _ in range(effort.rounds))
    except OSError as error:
        reason = error.strerror if error.errno != errno.EINVAL else "its file system has no O_DIRECT"
        raise ConfigError(
            f"--files {folder} cannot be measured: {reason}",
            possible="a folder on a local disk, with 128 MiB of space, in which this user may write",
            change="give such a folder to --files",
        ) from error
    return rates[len(rates) // 2]


def _turn(descriptor: int, buffer: mmap.mmap) -> float:
    """Return the bytes/s of writing each chunk and reading it again."""
    began = time.perf_counter()
    for chunk in range(_CHUNKS):
        os.pwritev(descriptor, [buffer], chunk * _CHUNK)
    for chunk in range(_CHUNKS):
        os.preadv(descriptor, [buffer], chunk * _CHUNK)
    return 2 * _CHUNKS * _CHUNK / (time.perf_counter() - began)


_LENGTHS = (1, 4, 16)  # products of a piece of work, each with a pass over its result
_SIZES = {"cpu": 512, "cuda": 4096}
_LONGER = 10  # times the turns of other operations, so that each has many synchronisations


def measure_synchronisations(place: Place, effort: Effort) -> tuple[SynchronisationTime, ...]:
    """Time synchronisations of the ranks of a host, or of all if each host has one rank, by work length."""
    if place.ranks.count == 1:
        return ()
    group = form_innermost(place)
    size = _SIZES[place.device.type]
    pool = torch.randn(COLD // 4 // size**2, size, size, device=place.device)
    given = cycle(zip(pool[::2], pool[1::2], strict=False))
    number = torch.zeros(1, device=place.device)

    def work(length: int) -> None:
        for _ in range(length):
            F.silu(torch.mm(*next(given)))

    def work_and_meet(length: int) -> None:
        work(length)
        dist.all_reduce(number, group=group)

    operations = {("meeting", 0): partial(dist.all_reduce, number, group=group)}
    operations |= {("work", length): partial(work, length) for length in _LENGTHS}
    operations |= {("both", length): partial(work_and_meet, length) for length in _LENGTHS}
    longer = replace(effort, turn_seconds=_LONGER * effort.turn_seconds)
    times = place.gathered(time_in_turns(operations, place, longer))
    ranks = dist.get_world_size(group)
    dist.destroy_process_group(group)
    return tuple(
        SynchronisationTime(
            ranks,
            fmean(each["work", length] for each in times),
            fmean(each["both", length] - each["work", length] - each["meeting", 0] for each in times),
        )
        for length in _LENGTHS
    )
