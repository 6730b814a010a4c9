"""The shape of the model that a row of a table of steps describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.validate.cells import Row, count, word
from shoal.workload import ModelShape, shape, shape_names

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
