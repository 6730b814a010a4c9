"""Predictions beside measurements, row by row, for tables of steps, layers, collectives and operations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from shoal.cluster import Cluster
from shoal.cost import Costs, Memories
from shoal.cost.collectives import algorithm_seconds
from shoal.cost.memory import every_second_product
from shoal.cost.time import block_cost
from shoal.errors import UserError
from shoal.plan import SettledPlan
from shoal.plan.group import Group
from shoal.simulate import played_seconds
from shoal.units import format_bytes
from shoal.validate.accuracy import Comparison
from shoal.validate.cells import Refuse, Table, strictly
from shoal.validate.collectives import USUAL_NODE, MeasuredCollective, read_collectives
from shoal.validate.fill_blanks import fill_blanks
from shoal.validate.layers import MeasuredLayer, read_layers
from shoal.validate.machines import machine_of, published_cluster
from shoal.validate.operations import MeasuredOperation, read_operations
from shoal.validate.programs import program_workload
from shoal.validate.steps import Measured, read_table
from shoal.workload import Workload, workload_of

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
