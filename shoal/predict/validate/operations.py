"""Tables of single operations that were timed on one device: matrix products, and forwards of attention.

Some programs time more than the operation. The column `kernel` names the program:

- vLLM's products in fp8 (`Cutlass...`) take inputs in 16 bit, and first cast each row by its largest number;
- vLLM's attention (`vllm_...`) first writes keys and values to a cache in pages.

What these take besides is fitted to all such rows together, on four types of devices, and is no part of the
cost model.

Tables of the times of one transformer layer, such as Table 4 of arXiv:2205.05198.

The settings are given in words: `config` has the shape and layout as `h=6144 a=64 s=2048 mbs=4 TP=8` and ends
with the device. `experiment` says "sequence" if the stream is split along the sequence, and "full" or
"selective recompute". The layer is one of Megatron's GPT in 16 bit: four times as wide inside, with dropout,
and with attention that is not fused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ClusterError
from shoal.predict.cost import Layout
from shoal.predict.cost.time import attention_seconds, product_seconds
from shoal.predict.validate.cells import (
    PRECISIONS,
    Refuse,
    Row,
    Table,
    count,
    measured,
    spelled,
    strictly,
    word,
)
from shoal.spec.cluster import Device
from shoal.spec.workload import Attention, ModelShape

FEW_ROWS = 512
"""Products of fewer rows are compared apart: they are those of inference."""

PRODUCT_COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "device": word(),
    "dtype": spelled(PRECISIONS),
    "m": count,
    "n": count,
    "k": count,
    "time_us": measured,
    "tflops": measured,
    "kernel": str,
}
"""The columns of a table of products, with a reader for their cells. Further columns are ignored."""

ATTENTION_COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "device": word(),
    "dtype": spelled(PRECISIONS),
    "batch": count,
    "length": count,
    "heads": count,
    "kv_heads": count,
    "head_dim": count,
    "forward_us": measured,
    "kernel": str,
}
"""The columns of a table of attention, with a reader for their cells. Further columns are ignored."""

_CAST = 2.8e-6  # seconds of vLLM's cast
_CAST_ROW = 5.9e-9  # and for each row
_CAST_ELEMENT = 1.6e-12  # and for each element
_CACHE = 5.5e-6  # seconds of vLLM's write to the cache, and of what FlashAttention 3 prepares
_CACHE_TOKEN = 0.8e-9  # and for each token
_CACHE_SHARE = 0.4  # share of the memory's rate at which it reads and writes keys and values


@dataclass(frozen=True, slots=True)
class MeasuredOperation:
    """A timed operation.

    Attributes:
        line: Line of the file.
        settings: Its cells without the measurement, as text.
        device: The device.
        precision: Type in which it computes: a Plan's precision.
        quantity: "product", "product of few rows" or "attention".
        name: Its sizes.
        alone: Seconds by the cost model, on a device whose clock nothing lowers.
        beside: Seconds that the program is known to take besides.
        seconds: Measured seconds.
    """

    line: int
    settings: str
    device: Device
    precision: str
    quantity: str
    name: str
    alone: Callable[[Device], float]
    beside: float
    seconds: float

    @property
    def family(self) -> str:
        """The device's name and the precision."""
        return f"{self.device.name} {self.precision}"

    def predicted(self, device: Device) -> float:
        """Return the seconds on a device, with those that the program takes besides."""
        return self.alone(device.alone) + self.beside


def read_operations(path: str | Path, refuse: Refuse = strictly) -> list[MeasuredOperation]:
    """Read a table of products or of attention, as its columns say.

    Args:
        path: Path of the file.
        refuse: Called with the errors of rows that cannot be used.

    Raises:
        DataError: The file is missing, lacks a column, or has a cell that cannot be read.
        ClusterError: A row names an unknown device.
    """
    table = Table.open(path)
    if "forward_us" in table.columns:
        return list(table.read(ATTENTION_COLUMNS, frozenset(("kernel",)), _attention, refuse))
    return list(table.read(PRODUCT_COLUMNS, frozenset(("time_us", "tflops", "kernel")), _product, refuse))


def _product(row: Row) -> MeasuredOperation:
    rows, inputs, outputs = row["m"], row["k"], row["n"]
    if row["time_us"] is None and row["tflops"] is None:
        row.refuse("has no measurement", possible="time_us, microseconds, or tflops")
    seconds = 2.0 * rows * inputs * outputs / (row["tflops"] * 1e12) if row["tflops"] else 0.0
    beside = 0.0
    if row["dtype"] == "fp8" and (row["kernel"] or "").startswith("Cutlass"):
        beside = _CAST + rows * (_CAST_ROW + inputs * _CAST_ELEMENT)
    precision = _precision(row)
    return MeasuredOperation(
        line=row.line,
        settings=_settings(row, "time_us", "tflops"),
        device=_device(row),
        precision=precision,
        quantity="product" if rows >= FEW_ROWS else "product of few rows",
        name=f"[{rows}, {inputs}] x [{inputs}, {outputs}]",
        alone=lambda device: product_seconds(device, precision, rows, inputs, outputs),
        beside=beside,
        seconds=row["time_us"] / 1e6 if row["time_us"] else seconds,
    )


def _attention(row: Row) -> MeasuredOperation:
    batch, width = row["batch"], row["head_dim"]
    if row["heads"] % row["kv_heads"]:
        row.refuse(f"has {row['heads']} heads for {row['kv_heads']} of keys", possible="a multiple of these")
    attention = Attention(row["length"], row["heads"], row["kv_heads"], width, width)
    device, precision = _device(row), _precision(row)
    layout = Layout(batch, precision=precision)
    beside = 0.0
    if (row["kernel"] or "").startswith("vllm"):
        tokens = batch * row["length"]
        nbytes = 8.0 * tokens * row["kv_heads"] * width  # keys and values, read and written, in 16 bit
        beside = _CACHE + tokens * _CACHE_TOKEN + nbytes / (device.bandwidth * _CACHE_SHARE)
    return MeasuredOperation(
        line=row.line,
        settings=_settings(row, "forward_us"),
        device=device,
        precision=precision,
        quantity="attention",
        name=f"{batch} x {row['length']}, {row['heads']} heads of {width}, {row['kv_heads']} of keys",
        alone=lambda device: attention_seconds(attention, device, layout)[0],
        beside=beside,
        seconds=row["forward_us"] / 1e6,
    )


def _settings(row: Row, *measurements: str) -> str:
    return ",".join(f"{name}={value}" for name, value in row.values.items() if name not in measurements)


def _precision(row: Row) -> str:
    """Return the type that computes; fp16 computes as quickly as bf16."""
    return "bf16" if row["dtype"] == "fp16" else str(row["dtype"])


def _device(row: Row) -> Device:
    """Return the device that the row names, which must compute in the row's type."""
    try:
        device = Device.preset(row["device"])
        device.flops(_precision(row))
    except ClusterError as error:
        raise row.located(error) from None
    return device


COLUMNS: Mapping[str, Callable[[str], Any]] = {
    "experiment": word(),
    "forward_ms": measured,
    "backward_ms": measured,
    "config": word(),
}
"""The columns of a table, with a reader for their cells. Further columns are ignored."""

_CONFIGURATION = re.compile(r"(?P<name>\w+)=(?P<value>\d+)")
_WANTED = ("h", "a", "s", "mbs", "tp")


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """One row of the table.

    Attributes:
        line: Line of the file.
        name: Name of the experiment.
        shape: Shape of a model of one such layer.
        device: Name of the device.
        layout: Layout of the layer.
        forward: Measured seconds of forward.
        backward: Measured seconds of backward, including recompute.
    """

    line: int
    name: str
    shape: ModelShape
    device: str
    layout: Layout
    forward: float
    backward: float


def read_layers(path: str | Path, refuse: Refuse = strictly) -> list[MeasuredLayer]:
    """Read a table of layer times; call `refuse` with the errors of rows that cannot be used.

    Raises:
        DataError: The file is missing, lacks a column, or has a cell that cannot be read.
    """
    return list(Table.open(path).read(COLUMNS, frozenset(), _measured, refuse))


def _measured(row: Row) -> MeasuredLayer:
    config = row["config"]
    sizes = {match["name"].lower(): int(match["value"]) for match in _CONFIGURATION.finditer(config)}
    if not all(sizes.get(name) for name in _WANTED) or sizes["h"] % sizes["a"]:
        row.refuse(
            f"has config={config!r}",
            possible="hidden, heads that divide it, tokens, micro-batch, tensor-parallel degree and device: "
            "h=6144 a=64 s=2048 mbs=4 TP=8 A100-80GB",
        )
    shape = ModelShape(
        layers=1,
        hidden=sizes["h"],
        ffn=4 * sizes["h"],
        heads=sizes["a"],
        vocab=1,
        seq=sizes["s"],
        gated=False,
        rotary=False,
        biases=True,
        dropout=True,
        fused_attention=False,
    )
    return MeasuredLayer(
        row.line,
        row["experiment"],
        shape,
        config.split()[-1],
        _layout(row["experiment"], sizes),
        row["forward_ms"] / 1e3,
        row["backward_ms"] / 1e3,
    )


def _layout(experiment: str, sizes: Mapping[str, int]) -> Layout:
    recompute = next((name for name in ("full", "selective") if name in experiment), "none")
    tensor = "sequence" if "sequence" in experiment else "plain"
    return Layout(sizes["mbs"], sizes["tp"], tensor=tensor, recompute=recompute)
