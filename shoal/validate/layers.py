"""Tables of the times of one transformer layer, such as Table 4 of arXiv:2205.05198.

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

from shoal.cost import Layout
from shoal.validate.cells import Refuse, Row, Table, measured, strictly, word
from shoal.workload import ModelShape

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
