"""All advice on a run, the largest gain first.

Advice from playing other Plans on the run's machines, as corrected by the run itself.

The description of the machines is calibrated with the run. What is left of its error then bounds what is
advised: a gain must be larger than the error of the prediction of the run's own Plan.

Advice: shares of the batch in proportion to the speed that ranks showed.

The seconds of a rank's micro-batch are those of its forward and backward without waits, which all-reduces do
not make equal. If the same rank is the slowest in nearly all steps, fewer micro-batches for it keep the
others from waiting: `shoal.predict.planner.in_proportion` hands them out. Smaller micro-batches are tried
too; their time is taken to be in proportion to their size.

Advice: another split of a model into the stages of a pipeline, by what the stages took.

Blocks are alike, so the stages before the last tell what a block takes: the median of their seconds over
their blocks. A stage that takes longer for each block has a slower device. What the last stage takes beyond
its blocks is its end: the last norm and the head. `shoal.spec.plan.stages` finds the best split for these
costs; a step changes by its `m R + (p - 1) S`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shoal.errors import PlanError, UserError
from shoal.predict.cost import Costs, calibrate
from shoal.predict.cost.outlook import Observation
from shoal.predict.planner import ALL_SIZES, changed, choose, in_proportion
from shoal.predict.simulate import StageTimes, played_seconds, stage_times
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Mesh, SettledPlan, Shares, divisors
from shoal.spec.plan.stages import Cost, split_by_cost, split_text
from shoal.spec.timeline import Breakdown, Kind, Timeline, explain
from shoal.spec.timeline.intervals import StepWindows
from shoal.spec.timeline.series import kinds_of_step
from shoal.spec.workload import Workload

LEAST_GAIN = 0.03
"""Share of a step from which on a gain is worth advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change that would make a run's step faster.

    Attributes:
        name: "shares", "split", "bucket", "plan", "data" or "launch".
        change: What to change, in a sentence.
        settings: The change as settings of `shoal train --set`; empty if it is none of these.
        before: Seconds of a step, measured.
        after: Seconds of a step, predicted; the least that is possible if `is_bound`.
        is_bound: Whether the gain may be smaller.
        reason: What the prediction rests on, in a sentence.
    """

    name: str
    change: str
    settings: tuple[str, ...]
    before: float
    after: float
    is_bound: bool = False
    reason: str

    @property
    def gain(self) -> float:
        """Return the share of the step's seconds that is saved."""
        return 1 - self.after / self.before


def played_advice(
    timeline: Timeline,
    breakdown: Breakdown,
    plan: SettledPlan,
    batch: int,
    workload: Workload,
    cluster: Cluster,
) -> Iterator[Advice]:
    """Yield advice on the bucket, and on the whole Plan, that playing on the calibrated machines gives."""
    try:
        observation = Observation.of(workload, plan, batch, timeline)
        machines = calibrate(cluster, [observation]).cluster
        costs = Costs(workload, machines)
        now = played_seconds(costs, plan, batch)
    except UserError:  # such as machines that cannot be calibrated by unequal shares
        return
    wall = breakdown.parts.wall
    error = abs(now / wall - 1)
    rests = (
        f"Played on {cluster.name}, calibrated with this run; its own step is then predicted with an error of"
    )

    def advice(name: str, change: str, found: SettledPlan, seconds: float) -> Advice | None:
        saved = 1 - seconds / now
        if saved < max(LEAST_GAIN, error):
            return None
        return Advice(
            name=name,
            change=change,
            settings=(f'plan="{found}"',),
            before=wall,
            after=wall * seconds / now,
            reason=f"{rests} {error:.1%}.",
        )

    buckets = [found for size in ALL_SIZES if (found := changed(plan, batch, bucket=size)) is not None]
    if plan.dp > 1 and buckets:
        seconds, best = min(
            ((played_seconds(costs, each, batch), each) for each in buckets), key=lambda of: of[0]
        )
        told = advice(
            "bucket", f"Communicate gradients in other buckets: bucket={best.bucket}.", best, seconds
        )
        if told is not None:
            yield told
    try:
        chosen = choose(workload, machines, batch, precision=plan.precision).best
    except PlanError:
        return
    told = advice("plan", f"Lay the model out by another Plan: {chosen.layout}.", chosen.plan, chosen.seconds)
    if told is not None:
        yield told


_PERSISTENT = 0.8
"""Share of the steps in which a rank must be the slowest."""


def shares_advice(timeline: Timeline, breakdown: Breakdown, plan: SettledPlan, batch: int) -> Advice | None:
    """Return advice on shares; None if the Plan takes none, ranks are alike, or the gain is small."""
    waits = plan.pp > 1 or plan.ep > 1 or plan.sharding.communicates_each_micro_batch
    if plan.dp == 1 or waits or len(breakdown.ranks) != plan.ranks:
        return None
    by_step = _seconds_by_step(timeline, breakdown, plan)
    if not by_step:
        return None
    slowest = Counter(max(range(plan.dp), key=seconds.__getitem__) for seconds in by_step.values())
    index, times = slowest.most_common(1)[0]
    if times < _PERSISTENT * len(by_step):
        return None
    made = [_made(plan, batch, rank) for rank in range(plan.dp)]
    now = [median(seconds[rank] for seconds in by_step.values()) for rank in range(plan.dp)]
    each = [seconds / count for seconds, count in zip(now, made, strict=True)]
    best, work = None, max(now)
    for microbatch in divisors(batch):
        if microbatch > plan.microbatch:
            continue
        smaller = [seconds * microbatch / plan.microbatch for seconds in each]
        numbers = in_proportion(smaller, batch // microbatch)
        if numbers is None or len(set(numbers)) == 1:
            continue
        longest = max(number * seconds for number, seconds in zip(numbers, smaller, strict=True))
        found = changed(plan, batch, microbatch=microbatch, shares=str(Shares.of(numbers)))
        # Of equally good ones the largest micro-batch, which runs best, comes last.
        if found is not None and longest <= work:
            best, work = found, longest
    wall = breakdown.parts.wall
    after = wall - (max(now) - work)
    if best is None or after > (1 - LEAST_GAIN) * wall:
        return None
    return Advice(
        name="shares",
        change=f"Give slower ranks fewer micro-batches: shares={best.shares}.",
        settings=(f'plan="{best}"',),
        before=wall,
        after=after,
        reason=(
            f"Measured: along dp, rank {index} takes {max(now):.4g} s for forward and backward, the quickest "
            f"{min(now):.4g} s; it is the slowest in {times / len(by_step):.0%} of the steps."
        ),
    )


def _made(plan: SettledPlan, batch: int, index: int) -> int:
    return plan.microbatches_of(batch) if plan.shared is None else plan.shared.of_rank(index)


def _seconds_by_step(
    timeline: Timeline, breakdown: Breakdown, plan: SettledPlan
) -> dict[int, Mapping[int, float]]:
    """Return the seconds of forward and backward in each counted step, by index along dp."""
    mesh = Mesh.of(plan)
    found: dict[int, dict[int, float]] = {}
    for rank in breakdown.ranks:
        windows = StepWindows(timeline, rank.rank)
        spans = windows.share_out((span, span) for span in timeline.of(rank.rank))
        index = mesh.coordinate(rank.rank, "dp")
        for step in rank.counted:
            kinds = kinds_of_step(windows[step], spans[step], ())
            seconds = kinds[Kind.FORWARD] + kinds[Kind.BACKWARD]
            of_step = found.setdefault(step, {})
            of_step[index] = max(seconds, of_step.get(index, 0.0))
    return {step: seconds for step, seconds in found.items() if len(seconds) == plan.dp}


def split_advice(
    stages: Sequence[StageTimes], breakdown: Breakdown, plan: SettledPlan, batch: int
) -> Advice | None:
    """Return advice on the split; None without a pipeline of one stage a rank, or if the gain is small."""
    if plan.pp == 1 or plan.stages != plan.pp or len(stages) != plan.pp or not plan.split[:1].isdecimal():
        return None
    count = plan.microbatches_of(batch)
    blocks = [int(number) for number in plan.split.split("-")]
    seconds = [stage.step / count for stage in stages]
    first = [took / number for took, number in zip(seconds[:-1], blocks[:-1], strict=True) if number]
    if not first or not blocks[-1]:
        return None
    of_block = median(first)
    end = max(0.0, seconds[-1] - blocks[-1] * of_block)
    factors = [
        took / (number * of_block) if number else 1.0
        for took, number in zip(seconds[:-1], blocks[:-1], strict=True)
    ]
    factors.append(1.0)
    costs = [
        Cost(0.0, 0.0),
        *[Cost(of_block / 3, of_block * 2 / 3)] * sum(blocks),
        Cost(end / 3, end * 2 / 3),
    ]
    try:
        pieces = split_by_cost(costs, plan.pp, microbatches=count, factors=factors)
    except PlanError:
        return None
    better = [pieces[0] - 1, *pieces[1:-1], pieces[-1] - 1]
    then = [number * of_block * factor for number, factor in zip(better, factors, strict=True)]
    then[-1] += end
    saved = (count + plan.pp - 1) * (max(seconds) - max(then))
    wall = breakdown.parts.wall
    found = changed(plan, batch, split=split_text(pieces))
    if found is None or saved < LEAST_GAIN * wall:
        return None
    return Advice(
        name="split",
        change=f"Move blocks between stages: split={found.split} in place of {plan.split}.",
        settings=(f'plan="{found}"',),
        before=wall,
        after=wall - saved,
        reason=(
            f"Measured: a micro-batch takes {max(seconds):.4g} s on the slowest stage and "
            f"{min(seconds):.4g} s on the quickest; with this split {max(then):.4g} s on the slowest."
        ),
    )


def data_advice(breakdown: Breakdown, data: Mapping[str, Any] | None = None) -> Advice | None:
    """Return advice on the wait for data, of the rank that waits most; None if it is short.

    Where text is encoded during the training, encoding is what is waited for: it takes the whole step now,
    and in n processes the n-th part.

    Args:
        breakdown: Where the time goes.
        data: The configuration of the run's data; None if it is not known.
    """
    parts = max((rank.parts for rank in breakdown.ranks), key=lambda parts: parts.data_wait)
    wall, waits = parts.wall, parts.data_wait
    if waits < LEAST_GAIN * wall:
        return None
    # While a step computes, so much data must be made that none is waited for.
    workers = math.ceil(wall / (wall - waits)) if waits < wall else 2
    if data is not None and _is_encoded(data):
        now = max(int(data.get("workers") or 0), 1)
        workers = max(now * workers, 2)
        return Advice(
            name="data",
            change=f"Encode text in {workers} processes beside the training: data.workers={workers}.",
            settings=(f"data.workers={workers}",),
            before=wall,
            after=max(wall - waits, wall * now / workers),
            reason=f"Measured: a rank waits {waits:.4g} s of each step for text that is encoded in "
            f"{now} process{'es' * (now > 1)}. Predicted for cores that have no other work.",
        )
    return Advice(
        name="data",
        change=f"Prepare data beside the training: {workers} processes or more (shoal.train.TrainingData("
        f"workers={workers})), or a loader that does less for each sample.",
        settings=(),
        before=wall,
        after=wall - waits,
        is_bound=True,
        reason=f"Measured: a rank waits {waits:.4g} s of each step for data.",
    )


def _is_encoded(data: Mapping[str, Any]) -> bool:
    """Return whether text is encoded during the training, in a way that processes share."""
    tokenizer = str(data.get("tokenizer", "bytes"))
    has_tokenizer = tokenizer != "bytes" and not tokenizer.startswith("ids:")
    return bool(data.get("streaming")) and (has_tokenizer or bool(data.get("messages")))


def launch_advice(breakdown: Breakdown, plan: SettledPlan, batch: int) -> Advice | None:
    """Return advice on launches, which a GPU waits for; None if they cost little."""
    launch, wall = breakdown.parts.launch or 0.0, breakdown.parts.wall
    if launch < LEAST_GAIN * wall:
        return None
    found = changed(plan, batch, compile="blocks") if plan.compile != "blocks" else None
    larger = "Make larger micro-batches: more work for each launch."
    return Advice(
        name="launch",
        change=larger if found is None else "Compile blocks: fewer launches.",
        settings=() if found is None else (f'plan="{found}"',),
        before=wall,
        after=wall - launch,
        is_bound=True,
        reason=f"Measured: the device idles for {launch:.4g} s of each step until the host gives it work.",
    )


@dataclass(frozen=True, slots=True)
class Known:
    """The work and the machines of a run, which playing other Plans needs.

    Attributes:
        workload: The work of the model.
        cluster: The machines, with as many devices as the run has ranks.
    """

    workload: Workload
    cluster: Cluster


def advices(
    timeline: Timeline,
    plan: SettledPlan,
    batch: int,
    known: Known | None = None,
    data: Mapping[str, Any] | None = None,
) -> list[Advice]:
    """Return the advice on a run, the largest gain first; sure gains come before bounds.

    Args:
        timeline: The measured Timeline of its steps under its present Plan.
        plan: The Plan, with the stages that the model was cut into.
        batch: Samples of a step.
        known: Its work and machines; None if they are not known: then no Plan is played.
        data: The configuration of its data; None if it is not known.

    Raises:
        ShoalError: No rank finished a step.
    """
    breakdown = explain(timeline)
    found = [
        shares_advice(timeline, breakdown, plan, batch),
        split_advice(stage_times(timeline), breakdown, plan, batch),
        data_advice(breakdown, data),
        launch_advice(breakdown, plan, batch),
    ]
    told = [each for each in found if each is not None]
    if known is not None:
        told += played_advice(timeline, breakdown, plan, batch, known.workload, known.cluster)
    return sorted(told, key=lambda each: (each.is_bound, -each.gain))
