"""What local updates add to a mean step: the merges of what workers changed, one in `every` steps.

If servers join the workers, it is the exchange with them instead.

A merge reads weights and anchors, sends the difference of its fragment, and updates momentum, anchor and
weights: 60 bytes a parameter. With `delay` the exchange runs beside the next steps, and only what is longer
than these is exposed. The length of rounds is taken as `every`: `stretch` makes them longer, not more costly.

What an exchange through parameter servers adds to a mean step.

With W workers of r ranks, S servers, n bytes of values on a rank, payloads of c bytes (n if nothing is
compressed), and links that carry b bytes/s each way:

    a rank's link     c for the push, and c for the pull; without rounds the least of W c and n for the pull
    a server's link   W r c / S each way for a round; r n / S more each way if it mirrors
    a rank's host     encodes c, and decodes what it pulls
    a server's host   adds up W contributions, and passes over values and the optimizer's state once a round;
                      compressed, it decodes the contributions, and encodes what its values changed

In rounds all workers push at once and then pull at once, so the busier of both links counts. Without rounds
(`staleness`) a worker has the servers to itself while others compute, until servers are busy all the time. A
server is taken to have the link of one device. With `exchange=local` this is once in `every` steps.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.predict.cost.time.buckets import (
    SUM_WIDTH,
    compressed_sums,
    decode_passes,
    encode_passes,
    low_rank_share,
    payload_bytes,
    whole_sum,
)
from shoal.predict.cost.time.compute import stream_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Groups, Plan
from shoal.spec.workload import Workload

_WIDTH = 4  # bytes of an element: fp32
_ADD = 12  # bytes of memory that adding a contribution moves for each element
_FOLLOW = 20  # bytes that a view moves to follow the values: it takes the difference, and copies itself
_UPDATE = 28  # bytes that an update moves: it reads value, gradient and two moments, and writes three


class ServedTimes(NamedTuple):
    """The seconds of one exchange of a worker with servers.

    Attributes:
        alone: Seconds of a push, and of a pull, while no other worker does; the mean of both.
        shared: Those of them in which a server's link is busy.
        turn: Seconds to ask whether it may go on, and to hear it; in rounds of gradients their norm too.
        add: Seconds in which a server adds a contribution to a round.
        update: Seconds of an update on a server.
        copy: Seconds in which the next server gets it.
        code: Seconds in which a rank encodes what it pushes, and decodes what it pulls.
    """

    alone: float
    shared: float
    turn: float
    add: float
    update: float
    copy: float
    code: float


def served_times(plan: Plan, owned: float, cluster: Cluster) -> ServedTimes:
    """Return the seconds of one exchange.

    Args:
        plan: The Plan, whose workers exchange through servers.
        owned: Parameters of which a rank owns values.
        cluster: The machines.
    """
    exchange, level = plan.exchanged, cluster.levels[-1]
    rate = level.rate(2)
    one_way = sent_bytes(plan, owned) / 2
    part = (plan.ranks // plan.replicas) / exchange.processes  # of a rank's bytes: one worker to one server
    elements = part * owned
    code, add, update = 0.0, _ADD * elements, _UPDATE * elements
    if exchange.compresses:
        compression = exchange.compression
        payloads = round(_pulled(plan, 1.0) / payload_bytes(compression, 1.0))
        payloads = 0 if _pulled(plan, 1.0) == _WIDTH else payloads
        decode = decode_passes(compression, 1.0)
        add = decode * elements
        update += (_FOLLOW + encode_passes(compression, 1.0) + decode) * elements
        code = (encode_passes(compression, 1.0) + payloads * decode) * owned
    return ServedTimes(
        alone=level.latency + max(one_way, part * one_way) / rate,
        shared=part * one_way / rate,
        turn=(2 if exchange.staleness or exchange.merges else 4) * level.latency,
        add=_host_seconds(cluster, add),
        update=_host_seconds(cluster, update),
        copy=exchange.mirror * (level.latency + _WIDTH * elements / rate),
        code=_host_seconds(cluster, code),
    )


def served_seconds(plan: Plan, owned: float, beside: float, cluster: Cluster) -> float:
    """Return the exposed seconds of one exchange.

    Args:
        plan: The Plan, whose workers exchange through servers.
        owned: Parameters of which a rank owns values.
        beside: Seconds that a worker computes between two exchanges.
        cluster: The machines.
    """
    times, workers = served_times(plan, owned, cluster), plan.replicas
    if not plan.exchanged.staleness:
        one_way = max(times.alone, workers * times.shared)
        return 2 * one_way + times.turn + times.code + workers * times.add + times.update + times.copy
    alone = 2 * times.alone + times.turn + times.code + times.update + times.copy
    busy = workers * max(times.shared, times.update + times.copy)
    return max(alone, busy - beside)


def sent_bytes(plan: Plan, owned: float) -> float:
    """Return the bytes that a rank pushes and pulls in one exchange."""
    return payload_bytes(plan.exchanged.compression, owned) + _pulled(plan, owned)


def _pulled(plan: Plan, owned: float) -> float:
    """Return the bytes of a pull: what each update changed since the last one, or the whole values."""
    updates = plan.replicas if plan.exchanged.staleness else 1
    return min(updates * payload_bytes(plan.exchanged.compression, owned), _WIDTH * owned)


def _host_seconds(cluster: Cluster, nbytes: float) -> float:
    """Return the seconds in which a server's processors pass over so many bytes."""
    host = cluster.host
    if cluster.cores or not host.bandwidth:
        return stream_seconds(cluster.device, nbytes, 0)
    return nbytes / (host.bandwidth * host.share)


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
