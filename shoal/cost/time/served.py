"""What an exchange through parameter servers adds to a mean step.

With W workers of r ranks, S servers, n bytes of values on a rank, and links that carry b bytes/s each way:

    a rank's link     n for the push, and n for the pull
    a server's link   W r n / S each way for a round; r n / S more each way if it mirrors
    a server's host   adds up W contributions, and passes over values and the optimizer's state once a round

In rounds all workers push at once and then pull at once, so the busier of both links counts. Without rounds
(`staleness`) a worker has the servers to itself while others compute, until servers are busy all the time. A
server is taken to have the link of one device. With `exchange=local` this is once in `every` steps.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.cluster import Cluster
from shoal.cost.time.passes import stream_seconds
from shoal.plan import Plan

__all__ = ["ServedTimes", "sent_bytes", "served_seconds", "served_times"]

_WIDTH = 4  # bytes of an element: fp32
_ADD = 12  # bytes of memory that adding a contribution moves for each element
_UPDATE = 28  # bytes that an update moves: it reads value, gradient and two moments, and writes three


class ServedTimes(NamedTuple):
    """The seconds of one exchange of a worker with servers.

    Attributes:
        alone: Seconds of a push, and of a pull, while no other worker does.
        shared: Those of them in which a server's link is busy.
        turn: Seconds to ask whether it may go on, and to hear it.
        add: Seconds in which a server adds a contribution to a round.
        update: Seconds of an update on a server.
        copy: Seconds in which the next server gets it.
    """

    alone: float
    shared: float
    turn: float
    add: float
    update: float
    copy: float


def served_times(plan: Plan, owned: float, cluster: Cluster) -> ServedTimes:
    """Return the seconds of one exchange.

    Args:
        plan: The Plan, whose workers exchange through servers.
        owned: Parameters of which a rank owns values.
        cluster: The machines.
    """
    exchange, level = plan.exchanged, cluster.levels[-1]
    rate = level.rate(2)
    vector = _WIDTH * owned
    of_worker = vector * (plan.ranks // plan.replicas) / exchange.processes  # of one worker to one server
    elements = of_worker / _WIDTH
    return ServedTimes(
        alone=level.latency + max(vector, of_worker) / rate,
        shared=of_worker / rate,
        turn=2 * level.latency,
        add=_host_seconds(cluster, _ADD * elements),
        update=_host_seconds(cluster, _UPDATE * elements),
        copy=exchange.mirror * (level.latency + of_worker / rate),
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
        return 2 * one_way + times.turn + workers * times.add + times.update + times.copy
    alone = 2 * times.alone + times.turn + times.update + times.copy
    busy = workers * max(times.shared, times.update + times.copy)
    return max(alone, busy - beside)


def sent_bytes(owned: float) -> float:
    """Return the bytes that a rank pushes and pulls in one exchange."""
    return 2 * _WIDTH * owned


def _host_seconds(cluster: Cluster, nbytes: float) -> float:
    """Return the seconds in which a server's processors pass over so many bytes."""
    host = cluster.host
    if cluster.cores or not host.bandwidth:
        return stream_seconds(cluster.device, nbytes, 0)
    return nbytes / (host.bandwidth * host.share)
