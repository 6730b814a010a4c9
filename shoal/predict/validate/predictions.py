"""Predictions beside measurements, row by row, for tables of steps, layers, collectives and operations.

The Plan of a row that leaves settings open: the one that its authors most likely chose.

This is the quickest Plan that fits. There may be thousands, so not all are played. Each Plan first waits in a
heap with a lower bound on its time. When its bound is the least of all, there are two cases. If the Plan is
too large, it waits again with the next recompute policy, which takes longer; if it fits, it waits again with
the seconds of its played step. The first Plan with played seconds to be the least is the quickest. If even
the smallest micro-batch does not fit with the most recompute, no larger one is tried.

Programs with fused kernels of their own can recompute some layers whole, as many as memory needs (Megatron's
`recompute_num_layers`). So where recompute=full fits and the policy before does not, the quantities of both
Plans are mixed: memory and seconds grow with the share of the layers.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from shoal.errors import UserError
from shoal.predict.cost import Costs, Memories
from shoal.predict.cost.collectives import algorithm_seconds
from shoal.predict.cost.memory import every_second_product
from shoal.predict.cost.time import block_cost
from shoal.predict.planner.space import usual_bucket
from shoal.predict.simulate import played_seconds
from shoal.predict.validate.cells import Comparison, Refuse, Table, strictly
from shoal.predict.validate.collectives import USUAL_NODE, MeasuredCollective, read_collectives
from shoal.predict.validate.operations import MeasuredLayer, MeasuredOperation, read_layers, read_operations
from shoal.predict.validate.programs import program_workload
from shoal.predict.validate.steps import Measured, machine_of, published_cluster, read_table
from shoal.spec.cluster import Cluster
from shoal.spec.plan import SettledPlan
from shoal.spec.plan.group import Group
from shoal.spec.workload import Workload, workload_of
from shoal.units import format_bytes


class Filled(NamedTuple):
    """The Plan of a row.

    Attributes:
        plan: The Plan.
        lighter: The same Plan with the recompute of the layers that are not recomputed whole; None if there
            are none.
        share: Share of the layers that are recomputed as `plan` says.
    """

    plan: SettledPlan
    lighter: SettledPlan | None = None
    share: float = 1.0

    def mixed(self, quantity: Callable[[SettledPlan], float]) -> float:
        """Return a quantity of a Plan, such as its seconds, over all layers."""
        found = quantity(self.plan)
        if self.lighter is None:
            return found
        return self.share * found + (1 - self.share) * quantity(self.lighter)


def fill_blanks(row: Measured, costs: Costs, memories: Memories) -> Filled:
    """Return the quickest of a row's Plans that fit; if none fits, the quickest of all.

    Args:
        row: A row of a table.
        costs: Costs of the row's workload on its cluster.
        memories: Memory of the row's workload on its cluster.
    """
    if len(row.plans) == 1 and len(row.recomputes) == 1:
        return Filled(_bucketed(row.plans[0], costs))
    smallest = min(plan.microbatch or 0 for plan in row.plans)

    @cache
    def fits(plan: SettledPlan) -> bool:
        return memories.fullest(plan, row.batch).fits(costs.cluster)

    def play(order: int, filled: Filled) -> None:
        seconds = filled.mixed(lambda plan: played_seconds(costs, plan, row.batch))
        heapq.heappush(waiting, (seconds, order, True, filled))

    waiting = [(_least(plan, row, costs), order, False, Filled(plan)) for order, plan in enumerate(row.plans)]
    heapq.heapify(waiting)
    while waiting:
        _, order, is_played, filled = heapq.heappop(waiting)
        if is_played:
            return filled
        plan = filled.plan
        if not fits(plan.replace(microbatch=smallest, recompute=row.recomputes[-1])):
            continue
        if fits(plan):
            play(order, Filled(_bucketed(plan, costs)))
            continue
        later = row.recomputes[row.recomputes.index(plan.recompute) + 1 :]
        if not later:
            continue
        longer = plan.replace(recompute=later[0])
        if longer.recompute == "full" and row.program is None and fits(longer):
            over, under = (memories.fullest(each, row.batch).peak for each in (plan, longer))
            share = (over - costs.cluster.device.memory) / (over - under)
            play(order, Filled(_bucketed(longer, costs), _bucketed(plan, costs), share))
        else:
            heapq.heappush(waiting, (_least(longer, row, costs), order, False, Filled(longer)))
    plans = (_bucketed(plan, costs) for plan in row.plans)
    return Filled(min(plans, key=lambda plan: played_seconds(costs, plan, row.batch)))


def _bucketed(plan: SettledPlan, costs: Costs) -> SettledPlan:
    """Return the Plan with buckets that suit the links: no table states their size."""
    return plan.replace(bucket=usual_bucket(costs.cluster, plan))


def _least(plan: SettledPlan, row: Measured, costs: Costs) -> float:
    """Return a lower bound on the seconds of a step."""
    return costs.least(_bucketed(plan, costs), row.batch)


_Row = TypeVar("_Row")


def validate(path: str | Path, refuse: Refuse = strictly, cluster: Cluster | None = None) -> list[Comparison]:
    """Predict every row of a table; its columns say what it has: steps, layers, collectives or operations.

    Args:
        path: Path of the table.
        cluster: The machines on which the steps of a table were measured; None for those that its rows name.
        refuse: Called with the error of each row that cannot be predicted: an unreadable cell, a layout that
            no Plan describes, or an unknown device.

    Raises:
        DataError: The table cannot be read, or lacks a column.
        UserError: An error that `refuse` raises.
    """
    columns = Table.open(path).columns
    if "forward_ms" in columns:
        return list(compare_layers(read_layers(path, refuse), refuse))
    if "forward_us" in columns or {"m", "n", "k"} <= set(columns):
        return list(compare_operations(read_operations(path, refuse)))
    if "size_bytes" in columns:
        return list(compare_collectives(read_collectives(path, refuse)))
    return list(compare_steps(read_table(path, refuse), refuse, cluster))


def is_fitted(row: Measured | MeasuredCollective | MeasuredOperation) -> bool:
    """Return whether constants may be fitted to a row; the other half of the rows only tests them.

    The SHA-256 of the row's settings decides. Measurements do not enter, and rows that ask for the same
    prediction are in the same half.
    """
    return hashlib.sha256(row.settings.encode()).digest()[0] % 2 == 0


def compare_steps(
    rows: Sequence[Measured], refuse: Refuse = strictly, cluster: Cluster | None = None
) -> Iterator[Comparison]:
    """Compare every row's step and memory, if these were measured.

    Args:
        rows: Rows of a table.
        refuse: Called with the errors of rows whose machine is unknown.
        cluster: The machines of all rows; None for those that they name.
    """
    known: dict[object, tuple[Costs, Memories]] = {}

    def compare(row: Measured) -> Iterator[Comparison]:
        machine = (
            row.device,
            row.plans[0].ranks,
            row.devices_per_node,
            row.network,
            row.products,
            row.attention,
        )
        key = (row.shape, row.program, machine, _is_per_operator(row), _is_fsdp(row))
        if key not in known:
            costs = Costs(published_workload(row), machine_of(row, cluster))
            known[key] = costs, Memories(costs.workload, costs.cluster, costs)
        return _compare_step(row, *known[key])

    return _each(rows, compare, refuse)


def compare_layers(rows: Sequence[MeasuredLayer], refuse: Refuse = strictly) -> Iterator[Comparison]:
    """Compare every row's forward, backward and sum; `refuse` gets the errors of unknown devices."""
    return _each(rows, _compare_layer, refuse)


def compare_collectives(rows: Sequence[MeasuredCollective]) -> Iterator[Comparison]:
    """Compare every row's time of the collective."""
    for row in rows:
        group = Group(row.cluster.devices)
        seconds = algorithm_seconds(row.collective, row.nbytes, group, row.cluster)
        yield Comparison(
            line=row.line,
            family=row.platform,
            name=f"{row.collective} of {format_bytes(row.nbytes)} on {group.size}",
            quantity=row.quantity,
            measured=row.seconds,
            predicted=row.predicted(seconds),
            fitted=is_fitted(row),
        )


def compare_operations(rows: Sequence[MeasuredOperation]) -> Iterator[Comparison]:
    """Compare every row's seconds on the device that it names."""
    for row in rows:
        yield Comparison(
            line=row.line,
            family=row.family,
            name=row.name,
            quantity=row.quantity,
            measured=row.seconds,
            predicted=row.predicted(row.device),
            fitted=is_fitted(row),
        )


def _each(
    rows: Iterable[_Row], compare: Callable[[_Row], Iterable[Comparison]], refuse: Refuse
) -> Iterator[Comparison]:
    """Yield the comparisons of all rows except those that raise a UserError."""
    for row in rows:
        try:
            compared = list(compare(row))
        except UserError as error:
            refuse(error)
        else:
            yield from compared


def _compare_step(row: Measured, costs: Costs, memories: Memories) -> Iterator[Comparison]:
    filled = fill_blanks(row, costs, memories)
    plan = filled.plan
    compared = partial(
        Comparison,
        line=row.line,
        family=row.family,
        name=f"{row.shape.name} on {plan.ranks} x {row.device}",
        plan=str(plan),
        fitted=is_fitted(row),
    )
    if row.seconds is not None:
        seconds = filled.mixed(lambda plan: played_seconds(costs, plan, row.batch))
        yield compared(quantity="step", measured=row.seconds, predicted=seconds)
    if row.memory is not None:
        is_shoal = _is_shoal(row)

        def held(plan: SettledPlan) -> float:
            fullest = memories.fullest(plan, row.batch)
            return fullest.allocated if is_shoal else fullest.held

        yield compared(quantity="memory", measured=row.memory, predicted=filled.mixed(held))


def _compare_layer(row: MeasuredLayer) -> Iterator[Comparison]:
    layout = row.layout
    workload = workload_of(row.shape)
    cluster = published_cluster(row.line, row.device, layout.tp, max(layout.tp, USUAL_NODE), None)
    cost = block_cost(workload.layers[0], workload.hidden, workload.length, cluster, layout)
    for quantity, measured, predicted in (
        ("forward", row.forward, cost.forward),
        ("backward", row.backward, cost.backward),
        ("layer", row.forward + row.backward, cost.forward + cost.backward),
    ):
        yield Comparison(
            line=row.line,
            family="layers",
            name=row.name,
            quantity=quantity,
            measured=measured,
            predicted=predicted,
            fitted=True,
        )


def _is_per_operator(row: Measured) -> bool:
    """Return whether a selective recompute is torchtitan's, which shards like zero3 and fuses attention."""
    return (
        not _is_shoal(row)
        and row.shape.fused_attention
        and tuple(row.recomputes) == ("selective",)
        and all(plan.sharding.cuts_weights for plan in row.plans)
    )


def published_workload(row: Measured) -> Workload:
    """Return the workload of the row's model, with the recompute that its authors mean.

    Programs that shard by FSDP recompute by torch's own function; others recompute the whole block.
    """
    workload = program_workload(row.shape, row.program, row.casts)
    if not _is_fsdp(row) and row.program is None:
        workload = workload.with_layers(lambda layer: replace(layer, stops_early=False))
    return every_second_product(workload) if _is_per_operator(row) else workload


def _is_shoal(row: Measured) -> bool:
    return row.program is not None and row.program.is_shoal


def _is_fsdp(row: Measured) -> bool:
    return all(plan.sharding.cuts_weights for plan in row.plans)
