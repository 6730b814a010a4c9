"""Tables of measured training steps, such as papers publish: one row is one model on one machine.

The machine that a row of a table names, as far as it is named.

Published programs compute in fp8 with degrees that a Plan in fp8 refuses. So these rows have Plans in bf16,
and their device has the rates of products in fp8: these run at that type's peak, and a tile takes as many
seconds to begin and end as in 16 bit. Attention and passes over memory take as long as in bf16.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import ClusterError, PlanError
from shoal.predict.validate.cells import (
    ATTENTIONS,
    PRECISIONS,
    RECOMPUTES,
    SHARDING_NAMES,
    Refuse,
    Row,
    Table,
    attention_of,
    count,
    measured,
    spelled,
    strictly,
    with_attention,
    word,
    year_of,
)
from shoal.predict.validate.programs import COMPILED, Program, as_trained, kernels_of_cast, program_of
from shoal.spec.cluster import Cluster, Device
from shoal.spec.plan import CHOICES, FULLY_SHARDED, SHARDINGS, UNSHARDED, Plan, SettledPlan, divisors
from shoal.spec.plan.stages import split_by_count
from shoal.spec.workload import ModelShape, shape, shape_names

_FLAGS = {
    **dict.fromkeys(("0", "0.0", "false", "no", "n", "off"), 0),
    **dict.fromkeys(("1", "1.0", "true", "yes", "y", "on"), 1),
}


def flag(cell: str) -> int:
    """Read yes or no, as 1 or 0."""
    found = _FLAGS.get(cell.lower())
    if found is None:
        raise ValueError("0 or 1")
    return found


def _some(cell: str) -> int:
    """Read a whole number of at least 0."""
    return 0 if cell == "0" else count(cell)


EXPERT_COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "head_dim": count,
    "experts": count,
    "experts_per_token": count,
    "expert_ffn": count,
    "shared_experts": _some,
    "dense_layers": _some,
}
"""Columns of models with experts, and of those whose heads do not divide the hidden state."""

SHAPE_COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "model": word(),
    "layers": count,
    "hidden": count,
    "ffn": count,
    "heads": count,
    "kv_heads": count,
    "vocab": count,
    "seq": count,
    "gated_mlp": flag,
    **EXPERT_COLUMNS,
}
"""The columns that describe the model, with a reader for their cells."""


def shape_of(row: Row) -> ModelShape:
    """Return the model's shape; unstated settings are as in most models of its kind, GPT's or Llama's."""
    hidden = row["hidden"]
    heads = row["heads"] or max(1, hidden // (128 if hidden >= 2048 else 64))
    gated = row["gated_mlp"]
    if gated is None:
        gated = (row["kv_heads"] or heads) < heads or (row["ffn"] or 4 * hidden) != 4 * hidden
    if heads % (row["kv_heads"] or 1):
        row.refuse(
            f"has {heads} heads and {row['kv_heads']} key-value heads",
            possible="kv_heads that divide the heads",
        )
    name = row["model"] or "transformer"
    found = ModelShape(
        name=name,
        layers=row["layers"],
        hidden=hidden,
        ffn=row["ffn"] or (round(8 * hidden / 3 / 256) * 256 if gated else 4 * hidden),
        heads=heads,
        kv_heads=row["kv_heads"],
        vocab=row["vocab"] or (32000 if gated else 51200),
        seq=row["seq"],
        gated=bool(gated),
        rotary=bool(gated),
        biases=not gated,
        dropout=row["attention"] == "unfused",
        fused_attention=row["attention"] != "unfused",
        head_dim=row["head_dim"],
    )
    return _with_experts(row, found.replace(latent=shape(name).latent) if name in shape_names() else found)


def _with_experts(row: Row, found: ModelShape) -> ModelShape:
    """Return the shape with the row's experts; every layer has some, unless the row says otherwise."""
    if row["experts"] is None:
        return found
    return found.replace(
        experts=row["experts"],
        experts_per_token=row["experts_per_token"] or 2,
        expert_ffn=row["expert_ffn"],
        shared_experts=row["shared_experts"] or 0,
        dense_layers=row["dense_layers"] or 0,
    )


def _degree(cell: str) -> int:
    """Read a count of ways to divide; 0 and none mean that there is no division."""
    return 1 if cell.lower() in ("0", "0.0", "none") else count(cell)


def _rate(cell: str) -> float:
    """Read a number above 0, or 0 for no network at all."""
    return 0.0 if cell in ("0", "0.0") else measured(cell)


COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "family": word(),
    **SHAPE_COLUMNS,
    "device": word(),
    "devices_per_node": count,
    "network_gbps_per_node": _rate,
    "num_devices": count,
    "tp": _degree,
    "pp": _degree,
    "dp": _degree,
    "cp": _degree,
    "ep": _degree,
    "virtual_stages": _degree,
    "microbatch": count,
    "global_batch": count,
    "sharding": spelled(SHARDING_NAMES),
    "recompute": spelled(RECOMPUTES),
    "sequence_parallel": flag,
    "precision": spelled(PRECISIONS),
    "attention": spelled(ATTENTIONS),
    "step_s": measured,
    "memory_gib": measured,
    "compile": spelled(COMPILED),
    "tied": flag,
    "year": count,
    "source": str,
    "note": str,
}
"""The columns of a table, with a reader for their cells. Further columns are ignored."""

_DEGREES = ("tp", "pp", "dp", "cp")
_OPTIONAL = frozenset(
    [
        *(name for name in SHAPE_COLUMNS if name not in ("layers", "hidden", "seq")),
        *("devices_per_node", "network_gbps_per_node", *_DEGREES, "ep", "virtual_stages", "microbatch"),
        *("sharding", "recompute", "sequence_parallel", "precision", "attention", "memory_gib"),
        *("compile", "tied", "year", "source", "note"),
    ]
)
"""Columns that may be absent, and whose cells may be blank: the value is not stated."""

_INSTEAD = {"step_s": "memory_gib"}
"""Columns that may be blank if the second column is filled in."""

_NOT_SETTINGS = ("family", "model", "step_s", "memory_gib", "source", "note")
_LATER = ("compile", "tied", "year", "ep", *EXPERT_COLUMNS)  # settings only where they are filled in

_MICROBATCHES = (1, 2, 4, 8, 16)  # values to try if a row states none
_SHARDS = tuple(each.name for each in SHARDINGS.values() if each.cuts_weights == each.cuts_gradients)
"""Shardings to try if a row states none.

To cut only gradients takes no less time than not to; authors who cut only weights say so.
"""

_VIRTUALS = (1, 2, 4)  # values to try if the row does not even state pp


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the table.

    Attributes:
        line: Line of the file, for messages.
        settings: Its cells without names and measurements, as text; equal for rows that ask for the same
            prediction.
        family: Name of the rows from one source.
        shape: Shape of the model.
        device: Name of the device.
        devices_per_node: Devices in a node; None if not stated.
        network: Bytes/s of a node's network interfaces together, one direction; None if not stated.
        program: The program of torch's kernels; None for one with fused kernels of its own.
        products: Type that products compute in: bf16, for any 16 bits; fp32, tf32 or fp8.
        casts: Number of kernels that cast an operand of a product to that type; 0 for none.
        attention: The program's fused attention, of `ages.attention_of`.
        plans: Every Plan that the row's settings allow, with the least recompute of these. There is one,
            unless some settings are blank. All have equally many ranks.
        recomputes: Recompute policies that the settings allow, the least first: each takes longer than the
            one before.
        batch: Samples of a step.
        seconds: Measured seconds of a step; None if not stated.
        memory: Measured bytes of the device that has most; None if not stated.
    """

    line: int
    settings: str
    family: str
    shape: ModelShape
    device: str
    devices_per_node: int | None
    network: float | None
    program: Program | None
    products: str
    casts: int
    attention: str
    plans: Sequence[SettledPlan]
    recomputes: Sequence[str]
    batch: int
    seconds: float | None
    memory: float | None


def read_table(path: str | Path, refuse: Refuse = strictly) -> list[Measured]:
    """Read a table of measured steps.

    Args:
        path: Path of the file.
        refuse: Called with the errors of rows that cannot be used.

    Raises:
        DataError: The file is missing, lacks a column, has an unreadable cell, or has a row that no Plan
            describes.
    """
    return list(Table.open(path).read(COLUMNS, _OPTIONAL, _measured, refuse, _INSTEAD))


def _measured(row: Row) -> Measured:
    memory = row["memory_gib"]
    recompute = "selective" if row["recompute"] == "per-op SAC" else row["recompute"]
    recomputes = (recompute,) if recompute else CHOICES["recompute"]
    program = program_of(row)
    plans = _plans(row, recomputes[0])
    is_sharded = all(plan.sharding.cuts_weights for plan in plans)
    settings = {name: value for name, value in row.values.items() if name not in _NOT_SETTINGS}
    return Measured(
        row.line,
        ",".join(
            f"{name}={value}" for name, value in settings.items() if value is not None or name not in _LATER
        ),
        row["family"],
        as_trained(shape_of(row), program, None if row["tied"] is None else bool(row["tied"])),
        row["device"],
        row["devices_per_node"],
        _network(row),
        program,
        _products(row),
        kernels_of_cast(row),
        attention_of(year_of(row), is_torch=is_sharded or program is not None),
        plans,
        recomputes,
        row["global_batch"],
        row["step_s"],
        None if memory is None else memory * 2**30,
    )


def _products(row: Row) -> str:
    """Return the type in which products compute; fp16 computes as quickly as bf16."""
    return "bf16" if row["precision"] in (None, "fp16") else str(row["precision"])


def _compile(row: Row) -> str:
    """Return a Plan's `compile`; it changes nothing in a program with fused kernels of its own."""
    program = program_of(row)
    return "auto" if program is None else "none" if program.compiled == "none" else "blocks"


def _network(row: Row) -> float | None:
    """Return the bytes/s of a node's interfaces; a single node needs none."""
    gigabits = row["network_gbps_per_node"]
    if gigabits == 0 and row["num_devices"] > (row["devices_per_node"] or row["num_devices"]):
        row.refuse(
            f"has {row['num_devices']} devices, {row['devices_per_node']} in a node, and a network of 0",
            possible="network_gbps_per_node above 0, or an empty cell for the default",
        )
    return gigabits * 1e9 / 8 if gigabits else None


def _plans(row: Row, recompute: str) -> list[SettledPlan]:
    """Return the Plans that the row allows; each blank setting takes every value that is legal."""
    plans, refusals = [], []
    for settings in _settings(row):
        try:
            plan = SettledPlan.of(Plan(**settings, recompute=recompute), row["global_batch"])
            split_by_count(row["layers"], plan.stages)  # raises if there are more stages than layers
        except PlanError as error:
            refusals.append(error)
            continue
        plans += _sharded(row, plan)
    if not plans:
        row.refuse(
            f"has a layout that no Plan describes: {refusals[0].given}",
            possible=refusals[0].possible,
        )
    return plans


def _sharded(row: Row, plan: SettledPlan) -> list[SettledPlan]:
    """Return the Plan with every sharding that may be meant; hsdp shards states within each node."""
    if row["sharding"] == "hsdp":
        within = (row["devices_per_node"] or plan.ranks) // (plan.tp * plan.cp)
        is_split = 1 < within < plan.dp and plan.dp % within == 0
        return [plan.replace(shard=FULLY_SHARDED.name, replicate=plan.dp // within if is_split else 1)]
    shards = [row["sharding"]] if row["sharding"] else _SHARDS if plan.dp * plan.cp > 1 else [UNSHARDED.name]
    return [plan.replace(shard=shard) for shard in shards]


def _settings(row: Row) -> Iterator[dict[str, Any]]:
    """Yield the fields of every Plan that may be meant, except sharding and recompute, which are free."""
    for degrees in _degrees(row):
        sizes, virtuals = _sizes(row, degrees["dp"]), _virtuals(row, degrees["pp"])
        for microbatch, virtual in itertools.product(sizes, virtuals):
            yield {
                **degrees,
                "ep": row["ep"] or 1,
                "tensor": _tensor(row, degrees["tp"]),
                "schedule": "interleaved" if virtual > 1 else "1f1b",
                "virtual": virtual,
                "split": "count",
                "microbatch": microbatch,
                "precision": "bf16" if _products(row) == "fp8" else _products(row),
                "compile": _compile(row),
            }


def _degrees(row: Row) -> list[dict[str, int]]:
    """Return all ways to give devices to the degrees that a row leaves open: tp within a node, least cp."""
    devices, batch = row["num_devices"], row["global_batch"]
    in_node = min(devices, row["devices_per_node"] or devices)
    tps = [row["tp"]] if row["tp"] else [size for size in divisors(shape_of(row).heads) if size <= in_node]
    pps = divisors(row["layers"]) if row["pp"] is None else [row["pp"]]
    cps = divisors(devices) if row["cp"] is None else [row["cp"]]
    found = next(filter(None, (_of_context(row, cp, itertools.product(tps, pps)) for cp in cps)), [])
    if not found:
        said = ", ".join(f"{name}={row[name]}" for name in _DEGREES if row[name] is not None)
        row.refuse(
            f"has {devices} devices, a batch of {batch}, and {said or 'no degrees'}",
            possible=f"dp x tp x pp x cp = {devices}, and a batch that dp divides",
        )
    return found


def _of_context(row: Row, cp: int, others: Iterable[tuple[int, int]]) -> list[dict[str, int]]:
    """Return the degrees with this cp and one of these pairs of tp and pp that fit devices and batch."""
    found = []
    for tp, pp in others:
        dp = row["num_devices"] // (tp * pp * cp) if row["dp"] is None else row["dp"]
        if dp * tp * pp * cp == row["num_devices"] and row["global_batch"] % dp == 0:
            found.append({"dp": dp, "tp": tp, "pp": pp, "cp": cp})
    return found


def _sizes(row: Row, dp: int) -> Sequence[int]:
    """Return the micro-batches to try."""
    if row["microbatch"] is not None:
        return (row["microbatch"],)
    return [size for size in _MICROBATCHES if row["global_batch"] // dp % size == 0]


def _virtuals(row: Row, pp: int) -> Sequence[int]:
    """Return the numbers of stages of a rank to try."""
    if row["virtual_stages"] is not None:
        return (row["virtual_stages"],)
    if pp == 1 or row["layers"] % pp:
        return (1,)
    legal = divisors(row["layers"] // pp)
    return legal if row["pp"] is not None else [virtual for virtual in _VIRTUALS if virtual in legal]


def _tensor(row: Row, tp: int) -> str:
    """Return how tensor parallelism communicates: with overlap, unless a note denies it."""
    if tp == 1 or (row["sequence_parallel"] != 0 and re.search("vanilla ?TP", row["note"] or "")):
        return "sequence"
    return "plain" if row["sequence_parallel"] == 0 else "async"


def machine_of(row: Measured, measured: Cluster | None = None) -> Cluster:
    """Return the Cluster that a row was measured on.

    Args:
        row: A row of a table.
        measured: The machines of all rows, in place of those that the row names.

    Raises:
        ClusterError: Its device is unknown, does not compute in the row's type, or its nodes are not whole.
    """
    if measured is not None:
        return measured.with_devices(row.plans[0].ranks)
    cluster = published_cluster(row.line, row.device, row.plans[0].ranks, row.devices_per_node, row.network)
    if row.products not in cluster.device.peak:
        raise ClusterError(
            f"line {row.line}: {cluster.device.name} has no known FLOP rate in {row.products}",
            possible=", ".join(cluster.device.peak),
            change="correct the device or the precision",
        )
    device = with_attention(cluster.device, row.attention)
    return cluster.replace(device=_in_fp8(device) if row.products == "fp8" else device)


def _in_fp8(device: Device) -> Device:
    """Return the device with the rates of products in fp8 in place of those in bf16."""
    faster = device.peak["fp8"] / device.peak["bf16"]
    return replace(
        device,
        peak={**device.peak, "bf16": device.peak["fp8"]},
        product_share=device.fp8_share or device.product_share,
        tile_bandwidth=2 * device.fp8_tile_bandwidth,
        product_depth=device.product_depth * faster,
        attention_share=device.attention_share / faster,
        attention_backward_share=device.attention_backward_share / faster,
    )


def published_cluster(
    line: int, device: str, devices: int, devices_per_node: int | None, network: float | None
) -> Cluster:
    """Return a Cluster as `Cluster.assemble` does, with errors that name a line of a table."""
    try:
        return Cluster.assemble(device, devices, devices_per_node, network)
    except ClusterError as error:
        raise ClusterError(
            f"line {line}: {error.given}", possible=error.possible, change=error.change
        ) from None
