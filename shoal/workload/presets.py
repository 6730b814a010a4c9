"""Shapes by name: published models' (`presets.toml`), and Shoal's own (`shoal/models/presets.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from shoal.errors import ModelError, nearest
from shoal.workload.model_shape import Latent, ModelShape


def shape(name: str) -> ModelShape:
    """Return the shape of a known model, by its name.

    Raises:
        ModelError: No model has this name.
    """
    own, published = _own(), _published()
    if name in own:
        return transformer_shape(own[name], name)
    if name not in published:
        raise ModelError(
            f"there is no model {name!r}{nearest(name, shape_names())}",
            possible=", ".join(shape_names()),
            change="give one of these",
        )
    return _published_shape(name, published)


def shape_names() -> tuple[str, ...]:
    """Return every shape's name: Shoal's own, then those of published models."""
    return (*_own(), *(name for name in _published() if name != "families"))


def transformer_shape(fields: Mapping[str, Any], name: str = "transformer") -> ModelShape:
    """Return the shape of Shoal's transformer.

    Args:
        fields: Fields of a `TransformerConfig`; absent ones have their defaults.
        name: Name of the shape.
    """
    return ModelShape(
        name=name,
        layers=fields["layers"],
        hidden=fields["hidden"],
        ffn=fields["ffn"],
        heads=fields["heads"],
        kv_heads=fields["kv_heads"],
        vocab=fields["vocab_size"],
        seq=fields["seq"],
        is_own=True,
        dropout=fields.get("dropout", 0.0) > 0,
        tied=fields.get("tie_embeddings", False),
        experts=fields.get("experts", 0),
        experts_per_token=fields.get("experts_per_token", 2),
        expert_ffn=fields.get("expert_ffn"),
        capacity=fields.get("capacity"),
        renormalize=fields.get("renormalize", False),
    )


def _published_shape(name: str, table: Mapping[str, dict[str, Any]]) -> ModelShape:
    fields = dict(table[name])
    family = fields.pop("like", None)
    if family is not None:
        fields = table["families"][family] | fields
    if "latent" in fields:
        fields["latent"] = Latent(**fields["latent"])
    return ModelShape(name=name, **fields)


@cache
def _own() -> dict[str, dict[str, Any]]:
    # Read as a file: an import of its package would import torch.
    return tomllib.loads(files("shoal").joinpath("models", "presets.toml").read_text("utf-8"))


@cache
def _published() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("shoal.workload").joinpath("presets.toml").read_text("utf-8"))
