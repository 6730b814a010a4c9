"""Bytes of memory that passes over parameters move: the optimizer's, and those of sums of gradients."""

from __future__ import annotations

from shoal.cost.time.buckets import owned_by_rank
from shoal.cost.time.wire import SUM_WIDTH, Wire
from shoal.plan import Groups, SettledPlan
from shoal.workload import Parameters, Workload

UPDATE_BYTES = (
    30  # Adam reads gradient, master weight, two moments; it writes the last three and a 16-bit weight
)
_NORM_BYTES = 4  # reads the sums of gradients
_ADAM_BYTES = 28  # reads gradient, weight and two moments in fp32, writes the last three
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
