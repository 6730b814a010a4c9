"""What local updates add to a mean step: the merges of what workers changed, one in `every` steps.

If servers join the workers, it is the exchange with them instead (`served.py`).

A merge reads weights and anchors, sends the difference of its fragment, and updates momentum, anchor and
weights: 60 bytes a parameter. With `delay` the exchange runs beside the next steps, and only what is longer
than these is exposed. The length of rounds is taken as `every`: `stretch` makes them longer, not more costly.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.time.passes import stream_seconds
from shoal.cost.time.served import sent_bytes, served_seconds
from shoal.cost.time.wire import SUM_WIDTH, compressed_sums, low_rank_share, whole_sum
from shoal.plan import Groups, Plan
from shoal.workload import Workload

_PASSES = 60
"""Bytes of memory that a merge moves for each parameter of fp32: it reads ten times, and writes five."""


_PACK, _OUTER = 16, 40
"""Bytes that a rank's passes move for each parameter, if servers make the update.

It copies the gradient to what it sends, and the values from what it gets; after local steps it takes the
difference instead, and keeps the anchor."""


class Merge(NamedTuple):
    """A mean step's share of merges.

    Attributes:
        seconds: Exposed seconds.
        nbytes: Bytes of the vectors or payloads that are exchanged.
    """

    seconds: float = 0.0
    nbytes: float = 0.0


def merge_of(plan: Plan, owned: float, beside: float, workload: Workload, cluster: Cluster) -> Merge:
    """Return a mean step's share of merges; nothing if the Plan has none.

    Args:
        plan: The Plan.
        owned: Parameters of which the rank owns values.
        beside: Seconds of a step at least, beside which a merge with `delay` runs.
        workload: The model.
        cluster: The machines.
    """
    exchange, workers = plan.exchanged, Groups.of(plan).workers
    if exchange.is_served:
        every = exchange.every if exchange.merges else 1
        passes = stream_seconds(cluster.device, (_OUTER if exchange.merges else _PACK) * owned, 8)
        seconds = passes + served_seconds(plan, owned, every * beside, cluster)
        return Merge(seconds / every, sent_bytes(plan, owned) / every)
    if not exchange.merges:
        return Merge()
    seconds = stream_seconds(cluster.device, _PASSES * owned, 8 * exchange.fragments)
    nbytes = 0.0
    if workers.size > 1:
        elements = owned / exchange.fragments
        if exchange.compresses:
            share = low_rank_share(exchange.compression, workload)
            sums = compressed_sums(elements, exchange.compression, share, workers, cluster)
        else:
            sums = [whole_sum("all_reduce", SUM_WIDTH * elements, workers, cluster)]
        sent = sum(each.seconds for each in sums)
        nbytes = exchange.fragments * sum(each.nbytes for each in sums)
        seconds += max(0.0, sent - exchange.delay * beside) * exchange.fragments
    return Merge(seconds / exchange.every, nbytes / exchange.every)
