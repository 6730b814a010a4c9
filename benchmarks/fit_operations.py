"""Fits the constants of products and attention to single operations that were timed one by one.

`fit_devices.py` calls it. Each constant has an expected value, and stays there where no row tells more. What
is minimised is the sum of squares of the logarithms of predicted over measured; errors beyond a tenth count
less and less, and products of few rows count less than half as much as others. Half of the rows are fitted
(`shoal.predict.validate.is_fitted`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from least_squares import least_squares, softened

from shoal.predict.validate import MeasuredOperation, is_fitted
from shoal.spec.cluster import Device

__all__ = ["GROUPS", "Fitted", "fit_operations", "report"]

_FAR = 0.1
_SURE = 0.02  # weight of a constant's departure from what is expected
_WEIGHTS = {"product of few rows": 0.4}


@dataclass(frozen=True, slots=True)
class Fitted:
    """Constants that are fitted to rows of some devices together.

    Attributes:
        devices: Names of presets.
        precision: Of the rows.
        quantities: Of the rows.
        expected: By field of `Device`, the value before any row is seen.
    """

    devices: tuple[str, ...]
    precision: str
    quantities: tuple[str, ...]
    expected: Mapping[str, float]

    def has(self, row: MeasuredOperation) -> bool:
        """Return whether a row is one of these."""
        known = {Device.preset(name).name for name in self.devices}
        return row.device.name in known and (row.precision, row.quantity in self.quantities) == (
            self.precision,
            True,
        )


_PRODUCTS, _ATTENTION = ("product", "product of few rows"), ("attention",)
_AMPERE, _HOPPER, _BLACKWELL = ("a100-80",), ("h100", "h200"), ("b200",)

GROUPS: Sequence[Fitted] = (
    Fitted(
        _AMPERE,
        "bf16",
        _PRODUCTS,
        {"product_share": 0.9, "product_depth": 150, "tile_bandwidth": 50e9},
    ),
    Fitted(_HOPPER, "bf16", _PRODUCTS, {"product_share": 0.9, "product_depth": 150}),
    Fitted(_BLACKWELL, "bf16", _PRODUCTS, {"product_share": 0.8, "product_depth": 150}),
    Fitted(_HOPPER, "fp8", _PRODUCTS, {"fp8_share": 0.9, "fp8_tile_bandwidth": 80e9}),
    Fitted(_BLACKWELL, "fp8", _PRODUCTS, {"fp8_share": 0.9, "fp8_tile_bandwidth": 160e9}),
    Fitted(_AMPERE, "bf16", _ATTENTION, {"attention_share": 0.6, "attention_depth": 100}),
    Fitted(
        _HOPPER, "bf16", _ATTENTION, {"attention_share": 0.7, "attention_depth": 300, "exponentials": 18e9}
    ),
    Fitted(
        _BLACKWELL, "bf16", _ATTENTION, {"attention_share": 0.6, "attention_depth": 300, "exponentials": 22e9}
    ),
)
"""What is fitted. Memory's rates are those of copies, and `launch` is the least time of a product."""


def fit_operations(rows: Sequence[MeasuredOperation]) -> dict[str, dict[str, float]]:
    """Return the fitted fields by name of a preset."""
    found: dict[str, dict[str, float]] = {}
    for group in GROUPS:
        fitted = [row for row in rows if group.has(row) and is_fitted(row)]
        if not fitted:
            continue
        values = _fit(group, fitted)
        for name in group.devices:
            found.setdefault(name, {}).update(values)
    return found


def _fit(group: Fitted, rows: Sequence[MeasuredOperation]) -> dict[str, float]:
    weights = np.array([_WEIGHTS.get(row.quantity, 1.0) for row in rows])
    expected = np.log(list(group.expected.values()))
    presets = {row.device.name: row.device for row in rows}

    def values_at(point: np.ndarray) -> dict[str, float]:
        named = zip(group.expected, np.exp(point), strict=True)
        return {name: min(float(value), 1.0) if "share" in name else float(value) for name, value in named}

    def residuals(point: np.ndarray) -> np.ndarray:
        devices = _changed(presets, values_at(point))
        logarithms = [math.log(row.predicted(devices[row.device.name]) / row.seconds) for row in rows]
        errors = softened(weights * np.array(logarithms), _FAR)
        return np.concatenate([errors, _SURE * (point - expected)])

    return values_at(least_squares(residuals, expected))


def _changed(presets: Mapping[str, Device], values: Mapping[str, Any]) -> dict[str, Device]:
    return {name: replace(device, **values) for name, device in presets.items()}


def report(rows: Sequence[MeasuredOperation], found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of errors of both halves, and the fitted fields."""
    devices = {Device.preset(name).name: replace(Device.preset(name), **found[name]) for name in found}
    lines = [
        "| operations | rows | fitted rows: error (bias) | the others: error (bias) |",
        "| --- | ---: | ---: | ---: |",
    ]
    kinds = dict.fromkeys((row.quantity, row.family) for row in rows if row.device.name in devices)
    for quantity, family in kinds:
        chosen = [row for row in rows if (row.quantity, row.family) == (quantity, family)]
        cells = []
        for side in (True, False):
            errors = [
                row.predicted(devices[row.device.name]) / row.seconds - 1
                for row in chosen
                if is_fitted(row) == side
            ]
            cells.append(f"{fmean(map(abs, errors)):.1%} ({fmean(errors):+.1%})" if errors else "")
        lines.append(f"| {quantity}, {family} | {len(chosen)} | {cells[0]} | {cells[1]} |")
    lines.append("")
    for name, fields in found.items():
        lines += [f"{name}: {field} = {value:.4g}" for field, value in fields.items()]
    return "\n".join(lines)
