"""Seconds and bytes of a step whose state is outside of the device: a Plan's `offload`.

A rank's optimizer owns N elements. L is the rate of the device's link to the host in one direction. H and D
are one device's share of the rates of the host's memory and of its files. F and B are the seconds of a
micro-batch's forward and backward on the rank, in each of m micro-batches, and A the bytes that layers in
files keep from one to the other. The seconds of one step are:

    update      The optimizer passes 28 N bytes through the host's memory. On a GPU gradients and values come
                down the link before that, 8 N bytes, and values go up after it, 4 N. Meanwhile files are read
                and written: moments 16 N, gradients 4 N, parameters 8 N bytes. The longer of both counts:
                max(28 N / H + 12 N / L, files / D). It replaces the optimizer's passes on the device
    forward     Parameters in files are read while the block before computes, 4 N bytes, and activations are
                written, A: m (c + max(0, bytes / D - F - c))
    backward    Parameters and activations are read, 4 N + A, and gradients written, 4 N; after the first
                micro-batch the sum of gradients so far is read too, 4 N: as in forward, with B
                in place of F. Nothing hides the reads for the last block of a stage, if it is in files

c are the processor's seconds on CPUs: a byte of activations in files takes 1 / MOVED_RATE in each direction.

Only what is in files counts for D. With optimizer:host the host's memory holds the moments. Buffers of blocks
are in the host's memory too, which on CPUs is the device's: see `staging_bytes`.

On CPUs there is no link, H is the rate of the device's memory, and optimizer:host changes nothing. Compare
ZeRO-Offload (Ren et al., arXiv:2101.06840) and ZeRO-Infinity (Rajbhandari et al., arXiv:2104.07857).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import ClusterError
from shoal.predict.cost.layout import Layout
from shoal.predict.cost.memory.activations import kept_bytes
from shoal.predict.cost.time.buckets import SUM_WIDTH, Wire, owned_by_rank
from shoal.predict.cost.time.split import stored_pieces
from shoal.spec.cluster import Cluster
from shoal.spec.plan import BLOCK_ELEMENTS, BUFFERS, Groups, Plan, SettledPlan, Tiers
from shoal.spec.workload import Block, Parameters, Workload
from shoal.units import format_bytes


class Stored(NamedTuple):
    """Bytes of a micro-batch's activations on a rank.

    Attributes:
        every: Bytes in files.
        last: Bytes in files of blocks at the end of a stage, whose backward waits for them when it begins.
    """

    every: float = 0.0
    last: float = 0.0


def stored_bytes(
    workload: Workload,
    plan: SettledPlan,
    stages: Sequence[range],
    pieces: Sequence[Block],
    layout: Layout,
    place: int,
) -> Stored:
    """Return the bytes of activations on a rank.

    Args:
        workload: The Workload.
        plan: The Plan.
        stages: The pieces of each stage.
        pieces: The Workload's pieces, those that recompute leaves out as kept.
        layout: The Plan's layout, settled.
        place: The rank's place along the pipeline.
    """
    if not plan.tiers.has_files:
        return Stored()
    stored = stored_pieces(workload, plan, stages)
    known: dict[Block, float] = {}
    every = last = 0.0
    for stage, rank in zip(stages, plan.placement if plan.pp > 1 else (0,), strict=True):
        layers = range(max(stage.start, 1), min(stage.stop, len(workload.layers) + 1))
        for piece in layers if rank == place else ():
            if piece not in stored:
                continue
            block = pieces[piece]
            if block not in known:
                known[block] = kept_bytes(block, workload, layout, is_layer=True)
            every += known[block]
            if piece == layers[-1]:
                last += known[block]
    return Stored(every, last)


_FP32 = 4.0  # bytes
_MOMENTS = 2

MOVED_RATE = 4e9
"""[Fitted] Bytes/s of activations that the processor can move one way: it copies them, and makes requests."""

_ADAM_BYTES = 28  # reads gradient, value and two moments in fp32, writes the last three


@dataclass(frozen=True, slots=True)
class Offload:
    """The effect on a step of keeping state outside of the device.

    Attributes:
        parts: Exposed seconds of a step, by name: forward, backward, update.
        waits: Seconds of a step in which a device waits for files: what is exposed, without the work of the
            update and of moving activations.
        replaced: Seconds that the step saves: the optimizer's passes on the device.
        link_bytes: Bytes in a step over the device's link, in both directions.
        file_bytes: Bytes in a step to and from files.
        host_bytes: Bytes of state, without activations, that a host's devices together keep outside.
    """

    parts: Mapping[str, float]
    waits: float
    replaced: float
    link_bytes: float
    file_bytes: float
    host_bytes: float

    @property
    def extra(self) -> float:
        """Seconds that offloading adds to a step."""
        return sum(self.parts.values()) - self.replaced


def tiers_on(plan: Plan, cluster: Cluster | None) -> Tiers:
    """Return where a Plan's state is on a Cluster's devices; None is taken for CPUs."""
    return plan.tiers.of_cpu if cluster is None or cluster.cores else plan.tiers


def offload_of(
    cluster: Cluster,
    plan: Plan,
    owned: float,
    passes: tuple[float, float],
    count: int,
    update: float,
    stored: Stored,
) -> Offload:
    """Return the effect of a Plan's `offload` on a rank.

    Args:
        cluster: The machines.
        plan: The Plan.
        owned: Number of elements that the rank's optimizer owns.
        passes: Seconds of a micro-batch's forward and backward on the rank.
        count: Micro-batches of a step.
        update: Seconds of the optimizer's passes on the device.
        stored: Bytes of a micro-batch's activations, in files or not.

    Raises:
        ClusterError: A rate of the host is not known.
    """
    tiers = tiers_on(plan, cluster)
    if not tiers.moved:
        return Offload({}, 0.0, 0.0, 0.0, 0.0, 0.0)
    forward, backward = passes
    shard = _FP32 * owned
    in_files = {part: float(place == "file") for part, place in tiers.moved.items()}
    reads, gradients = in_files.get("parameters", 0.0), in_files.get("gradients", 0.0)
    rate = _file_rate(cluster) if tiers.has_files else math.inf
    down = reads * shard + stored.every
    work = stored.every / MOVED_RATE if cluster.cores else 0.0
    first, later = down + gradients * shard, down + 2 * gradients * shard
    files, made, link = _update_of(cluster, tiers, owned, update)
    state = shard * (_MOMENTS * ("optimizer" in tiers.moved) + gradients + reads)
    alone = stored.last / rate
    reads_of = [max(work, (each - stored.last) / rate - backward) for each in (first, later)]
    parts = {
        "forward": count * max(work, down / rate - forward),
        "backward": count * alone + reads_of[0] + (count - 1) * reads_of[1],
        "update": max(made, files / rate),
    }
    return Offload(
        parts=parts,
        waits=sum(parts.values()) - made - 2 * count * work,
        replaced=update,
        link_bytes=link,
        file_bytes=files + count * down + first + (count - 1) * later,
        host_bytes=state * min(cluster.host.devices, cluster.devices_per_node),
    )


def fits_host(plan: Plan, cluster: Cluster, owned: float) -> bool:
    """Return whether a host has memory for what its devices keep there.

    Args:
        plan: The Plan.
        cluster: The machines.
        owned: Number of elements that a rank's optimizer owns.
    """
    if tiers_on(plan, cluster).optimizer != "host":
        return True
    sharing = min(cluster.host.devices, cluster.devices_per_node)
    return _FP32 * _MOMENTS * owned * sharing <= cluster.host.memory


def require_host(plan: Plan, cluster: Cluster, owned: float, nbytes: float) -> None:
    """Check that a host has memory for what its devices keep there: `nbytes` together.

    Raises:
        ClusterError: It has not.
    """
    if not fits_host(plan, cluster, owned):
        raise ClusterError(
            f"offload={plan.offload} takes {format_bytes(round(nbytes))} on each host, which has "
            f"{format_bytes(round(cluster.host.memory))}",
            possible="more sharding, more hosts, or optimizer:file",
            change="shard the state over more ranks, or write offload=optimizer:file",
        )


def update_outside(cluster: Cluster, plan: Plan, owned: float, update: float) -> float:
    """Return the seconds of an update, with a Plan's `offload`.

    Args:
        cluster: The machines.
        plan: The Plan.
        owned: Number of elements that the rank's optimizer owns.
        update: Seconds of the optimizer's passes on the device.

    Raises:
        ClusterError: A rate of the host is not known.
    """
    tiers = tiers_on(plan, cluster)
    rate = _file_rate(cluster) if tiers.has_files else math.inf
    files, made, _ = _update_of(cluster, tiers, owned, update)
    return max(made, files / rate)


def _update_of(cluster: Cluster, tiers: Tiers, owned: float, update: float) -> tuple[float, float, float]:
    """Return an update's bytes of files, the seconds of its passes, and its bytes over the link."""
    shard = _FP32 * owned
    blocks = 2 * _MOMENTS * (tiers.optimizer == "file") + (tiers.gradients == "file")
    files = shard * (blocks + 2 * (tiers.parameters == "file"))
    if cluster.cores or tiers.optimizer == "device":
        return files, update, 0.0
    link = 3 * shard
    return files, _ADAM_BYTES * owned / _host_rate(cluster) + link / _link_rate(cluster), link


def staging_bytes(plan: Plan, owned: float, largest: float) -> tuple[float, float]:
    """Return the bytes of the buffers through which state passes to and from files.

    In forwards and backwards these are a shard of parameters that is read, and the gradients of up to three
    buckets that are written; then, while the optimizer steps, three blocks of each array in files.

    Args:
        plan: The Plan.
        owned: Number of elements that the rank's optimizer owns.
        largest: Number of elements of the rank's largest shard of a bucket.

    Returns:
        The bytes in forwards and backwards, and those in the optimizer's step.
    """
    tiers = plan.tiers
    if not tiers.has_files:
        return 0.0, 0.0
    reads, gradients = tiers.parameters == "file", tiers.gradients == "file"
    blocks = BUFFERS * (_MOMENTS + reads + gradients) * min(BLOCK_ELEMENTS, owned)
    return _FP32 * largest * (reads + 3 * gradients), _FP32 * blocks


def _link_rate(cluster: Cluster) -> float:
    return _known(cluster, "device.host_bandwidth", cluster.device.host_bandwidth)


def _host_rate(cluster: Cluster) -> float:
    host = cluster.host
    rate = _known(cluster, "host.bandwidth", host.bandwidth) * host.share
    return rate / min(host.devices, cluster.devices_per_node)


def _file_rate(cluster: Cluster) -> float:
    host = cluster.host
    rate = _known(cluster, "host.file_bandwidth", host.file_bandwidth)
    return rate / min(host.devices, cluster.devices_per_node)


def _known(cluster: Cluster, name: str, rate: float) -> float:
    if not rate:
        raise ClusterError(
            f"{cluster.name} has no {name}, which offload needs",
            possible="bytes/s above 0; shoal probe --files DIR measures a host's files",
            change=f"write {name} into the cluster's .toml file, or choose another cluster",
        )
    return rate


UPDATE_BYTES = (
    30  # Adam reads gradient, master weight, two moments; it writes the last three and a 16-bit weight
)
_NORM_BYTES = 4  # reads the sums of gradients
_COPY_BYTES = 6  # reads the weight in fp32, writes the 16-bit weight that computes


def update_bytes(plan: SettledPlan, parameters: Parameters, *, is_torch: bool) -> float:
    """Return the bytes that the optimizer moves for a rank's shard; 0 if parameter servers make its step.

    Args:
        plan: The Plan.
        parameters: Parameters that the rank holds.
        is_torch: Whether torch's operators compute, and no kernel that is fused further.
    """
    if plan.exchange == "server":
        return 0.0
    nbytes = UPDATE_BYTES
    if is_torch:
        nbytes = _NORM_BYTES + _ADAM_BYTES + (_COPY_BYTES if plan.element_bytes == 2 else 0)
    return nbytes * owned_by_rank(parameters, plan)


def gradient_sum_bytes(
    plan: SettledPlan, parameters: Parameters, count: int, workload: Workload, *, is_torch: bool
) -> float:
    """Return the bytes that torch moves to add the gradients of `count` micro-batches to sums in fp32.

    The first gradient is copied. Products may add them without a pass. If each is copied to a bucket that
    ranks reduce at once, there is no pass here. With reduce=bf16 the sums are cast, and cast back. The other
    arguments are those of `update_bytes`.
    """
    dense = Groups.of(plan).dense
    ranks = dense.shards.size * dense.summed.size
    if plan.sharding.cuts_gradients and dense.shards.size > 1:
        return 0.0
    nbytes = 0
    if is_torch:
        nbytes = count * (plan.element_bytes + SUM_WIDTH) + (count - 1) * SUM_WIDTH
    sent = Wire.of(plan, workload).width
    if ranks > 1 and sent != SUM_WIDTH:
        nbytes += 2 * (SUM_WIDTH + sent)
    return float(nbytes * (parameters.whole + parameters.divided + parameters.experts))
