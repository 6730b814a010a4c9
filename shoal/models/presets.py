"""Named shapes of the transformer, from about 1 M to 70 B parameters; the table is `presets.toml`."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

from shoal.errors import ModelError, nearest
from shoal.models.config import TransformerConfig


def preset(name: str) -> TransformerConfig:
    """Return the configuration with this name.

    Raises:
        ModelError: There is no such preset.
    """
    presets = _read()
    if name not in presets:
        raise ModelError(
            f"there is no preset {name!r}{nearest(name, presets)}",
            possible=", ".join(presets),
            change="give one of these, or a factory as package.module:function",
        )
    return TransformerConfig(**presets[name])


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, from small to large."""
    return tuple(_read())


def _read() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("shoal.models").joinpath("presets.toml").read_text(encoding="utf-8"))
