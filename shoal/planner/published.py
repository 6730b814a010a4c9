"""Tables of measured training steps, such as those that papers publish: one row is a model on a machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import PlanError
from shoal.plan import CHOICES, Plan, divisors
from shoal.plan.stages import split_by_count
from shoal.planner.cells import Row, Table, count, measured, word
from shoal.workload import ModelShape

__all__ = ["COLUMNS", "Measured", "read_table"]

_PRECISIONS = {"fp16": "bf16", "bf16": "bf16", "fp32": "fp32"}  # both 16-bit types compute at one rate
_RECOMPUTES = {**{name: name for name in CHOICES["recompute"]}, "per-op SAC": "selective"}


def _flag(cell: str) -> int:
    return int(word("0", "1")(cell))


COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "family": word(),
    "model": word(),
    "layers": count,
    "hidden": count,
    "ffn": count,
    "heads": count,
    "kv_heads": count,
    "vocab": count,
    "seq": count,
    "gated_mlp": _flag,
    "device": word(),
    "devices_per_node": count,
    "network_gbps_per_node": measured,
    "num_devices": count,
    "tp": count,
    "pp": count,
    "dp": count,
    "cp": count,
    "virtual_stages": count,
    "microbatch": count,
    "global_batch": count,
    "sharding": word(*CHOICES["shard"]),
    "recompute": word(*_RECOMPUTES),
    "sequence_parallel": _flag,
    "precision": word(*_PRECISIONS),
    "attention": word("flash", "unfused"),
    "step_s": measured,
    "memory_gib": measured,
}
"""The columns of a table, and what reads their cells. Further columns are ignored."""

_DEGREES = ("tp", "pp", "dp", "cp")
_OPTIONAL = frozenset(
    [
        *("model", "kv_heads", "network_gbps_per_node", *_DEGREES, "virtual_stages", "microbatch"),
        *("sharding", "recompute", "sequence_parallel", "precision", "attention", "memory_gib"),
    ]
)
"""Columns that may be absent, and whose cells may be blank: not stated."""

_NOT_SETTINGS = ("family", "model", "step_s", "memory_gib")

_MICROBATCHES = (1, 2, 4, 8, 16)  # what is tried where a row does not say
_SHARDS = ("none", "zero1", "zero3")  # zero2 takes no less time than zero1
_VIRTUALS = (1, 2, 4)  # where not even the pipeline's degree is said


@dataclass(frozen=True, slots=True)
class Measured:
    """One row.

    Attributes:
        line: Of the file, for messages.
        settings: Its cells but for names and measurements, as text: equal for rows that ask for the same
            prediction.
        family: Rows of one source.
        shape: Of the model.
        device: Its name.
        devices_per_node: In a node.
        network: Bytes/s of a node's network interfaces together, one direction; None if not said.
        plans: Every Plan that the row's settings allow: one, unless some are blank. All have as many ranks.
        batch: Samples of a step.
        seconds: Of a step, measured.
        memory: Bytes of the device that has most, measured; None if not said.
    """

    line: int
    settings: str
    family: str
    shape: ModelShape
    device: str
    devices_per_node: int
    network: float | None
    plans: Sequence[Plan]
    batch: int
    seconds: float
    memory: float | None


def read_table(path: str | Path) -> list[Measured]:
    """Reads a table of measured steps.

    Raises:
        DataError: The file is missing, lacks a column, has a cell that cannot be read, or a row that no Plan
            describes.
    """
    return [_measured(row) for row in Table.open(path).rows(COLUMNS, _OPTIONAL)]


def _measured(row: Row) -> Measured:
    network, memory = row["network_gbps_per_node"], row["memory_gib"]
    return Measured(
        row.line,
        ",".join(f"{name}={value}" for name, value in row.values.items() if name not in _NOT_SETTINGS),
        row["family"],
        _shape(row),
        row["device"],
        row["devices_per_node"],
        None if network is None else network * 1e9 / 8,
        _plans(row),
        row["global_batch"],
        row["step_s"],
        None if memory is None else memory * 2**30,
    )


def _shape(row: Row) -> ModelShape:
    gated = bool(row["gated_mlp"])
    if row["heads"] % (row["kv_heads"] or 1):
        row.refuse(
            f"has {row['heads']} heads and {row['kv_heads']} key-value heads",
            possible="kv_heads that divide the heads",
        )
    return ModelShape(
        name=row["model"] or "transformer",
        layers=row["layers"],
        hidden=row["hidden"],
        ffn=row["ffn"],
        heads=row["heads"],
        kv_heads=row["kv_heads"],
        vocab=row["vocab"],
        seq=row["seq"],
        gated=gated,
        rotary=gated,
        biases=not gated,
        dropout=row["attention"] == "unfused",
        fused_attention=row["attention"] != "unfused",
    )


def _plans(row: Row) -> list[Plan]:
    """What the row says; each blank setting takes every value that is legal."""
    plans, refusals = [], []
    for settings in _settings(row):
        try:
            plan = Plan(**settings).with_microbatch_for(row["global_batch"])
            split_by_count(row["layers"], plan.stages)  # raises if there are more stages than layers
            plans.append(plan)
        except PlanError as error:
            refusals.append(error)
    if not plans:
        row.refuse(
            f"has a layout that no Plan describes: {refusals[0].given}",
            possible=refusals[0].possible,
        )
    return plans


def _settings(row: Row) -> Iterator[dict[str, Any]]:
    """The fields of every Plan that may be meant."""
    recomputes = [_RECOMPUTES[row["recompute"]]] if row["recompute"] else CHOICES["recompute"]
    shards = [row["sharding"]] if row["sharding"] else _SHARDS
    sizes = _MICROBATCHES if row["microbatch"] is None else (row["microbatch"],)
    for degrees in _degrees(row):
        choices = itertools.product(
            sizes, _virtuals(row, degrees["pp"]), _tensors(row, degrees["tp"]), recomputes, shards
        )
        for microbatch, virtual, tensor, recompute, shard in choices:
            yield {
                **degrees,
                "shard": shard,
                "tensor": tensor,
                "schedule": "interleaved" if virtual > 1 else "1f1b",
                "virtual": virtual,
                "split": "count",
                "microbatch": microbatch,
                "recompute": recompute,
                "precision": _PRECISIONS[row["precision"] or "bf16"],
            }


def _degrees(row: Row) -> Iterator[dict[str, int]]:
    """Every way to give the devices to degrees that the row leaves open: tp within a node, and cp 1."""
    devices, batch = row["num_devices"], row["global_batch"]
    in_node = min(devices, row["devices_per_node"])
    tps = [size for size in divisors(row["heads"]) if size <= in_node] if row["tp"] is None else [row["tp"]]
    pps = divisors(row["layers"]) if row["pp"] is None else [row["pp"]]
    cp = row["cp"] or 1
    found = False
    for tp, pp in itertools.product(tps, pps):
        dp = devices // (tp * pp * cp) if row["dp"] is None else row["dp"]
        if dp * tp * pp * cp == devices and batch % dp == 0:
            found = True
            yield {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
    if not found:
        said = ", ".join(f"{name}={row[name]}" for name in _DEGREES if row[name] is not None)
        row.refuse(
            f"has {devices} devices, a batch of {batch}, and {said or 'no degrees'}",
            possible=f"dp x tp x pp x cp = {devices}, and a batch that dp divides",
        )


def _virtuals(row: Row, pp: int) -> Sequence[int]:
    """Stages of a rank."""
    if row["virtual_stages"] is not None:
        return (row["virtual_stages"],)
    if pp == 1 or row["layers"] % pp:
        return (1,)
    legal = divisors(row["layers"] // pp)
    return legal if row["pp"] is not None else [virtual for virtual in _VIRTUALS if virtual in legal]


def _tensors(row: Row, tp: int) -> Sequence[str]:
    """How tensor parallelism may communicate: overlap is not stated by any table, and so always open."""
    if tp == 1:
        return ("sequence",)
    return ("plain",) if row["sequence_parallel"] == 0 else ("sequence", "async")
