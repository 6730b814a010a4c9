"""Measure links: every collective's curve at each level, pairs of hosts, and contention with compute.

Inside the hosts each host's ranks are a group, and all groups are busy at once. Between hosts there are two
forms: the group of all ranks, and the groups of ranks with the same index on each host. These groups share
the hosts' links as data-parallel groups do beside tensor-parallel ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench import Settings
from shoal.bench.contestants.torch_group import TorchGroup
from shoal.bench.measure import measure
from shoal.bench.world import Ranks
from shoal.collectives import Options
from shoal.errors import CommunicationError
from shoal.plan.group import Group
from shoal.probe.measurements import CollectiveTime, HostRates, SendTime
from shoal.probe.place import Place
from shoal.probe.turns import COLD, Effort, time_in_turns

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
