"""The time that ranks lose by waiting for one another, when they repeat equal work and synchronise after it.

Work of several lengths is done with a synchronisation after each piece, and without. The time that
synchronisations add, beside their own, grows in proportion to the work if one rank is slower than another,
and with the square root of the work if delays are random.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import fmean

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shoal.probe.links import form_innermost
from shoal.probe.measurements import SynchronisationTime
from shoal.probe.place import Place
from shoal.probe.turns import COLD, Effort, time_in_turns

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
