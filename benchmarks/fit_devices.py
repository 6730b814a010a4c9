"""Fits what programs reach of devices: the constants in shoal/spec/cluster/devices.toml.

    python benchmarks/fit_devices.py [RUNS.csv ...] [--layers LAYERS.csv] [--without FAMILY ...]
                                     [--products PRODUCTS.csv ...] [--attention ATTENTION.csv ...]

Tables of single operations give the constants of products and attention (`fit_operations.py`), and tables of
training steps those that only whole steps show: the clock under load, the host, and what communication and
compute take from each other. Each of these has an expected value, and says how sure that is (the standard
deviation of its logarithm). What is minimised is the sum of squares of the rows' errors, in units of 6 % and
each family by the square root of its rows, and of the constants' departures from what is expected. Half of
the rows are fitted (`shoal.predict.validate.is_fitted`); the other half says how far that holds. Prints both,
and the constants as they stand in the data file.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fit_operations import fit_operations, report
from least_squares import least_squares, softened

from shoal.predict.cost import Costs, Memories
from shoal.predict.cost.time import block_cost
from shoal.predict.simulate import played_seconds
from shoal.predict.validate import (
    Measured,
    MeasuredLayer,
    is_fitted,
    published_workload,
    read_layers,
    read_operations,
    read_table,
)
from shoal.predict.validate.cells import with_attention
from shoal.predict.validate.predictions import Filled, fill_blanks
from shoal.spec.cluster import Cluster, Device
from shoal.spec.workload import workload_of

__all__ = ["CONSTANTS", "Constant", "fit", "main"]

_ERROR, _LAYER_ERROR = 0.06, 0.03  # what one standard deviation of a row is taken to be


@dataclass(frozen=True, slots=True)
class Constant:
    """A field of some devices that is fitted.

    Attributes:
        devices: Names of presets that share it.
        field: Of `Device`.
        expected: Before any row is seen.
        spread: Standard deviation of its logarithm.
        most: It can be no larger.
    """

    devices: tuple[str, ...]
    field: str
    expected: float
    spread: float
    most: float = math.inf


_A100, _H100 = ("a100-80", "a100-40"), ("h100", "h100-96")

CONSTANTS: Sequence[Constant] = (
    # Power of 400 W and 700 W lowers the clock in long runs; with 500 W it is as the square root of the power
    Constant(("a100-80",), "sustained", 0.9, 0.05, 1.0),
    Constant(("a100-40",), "sustained", 0.86, 0.05, 1.0),
    Constant(("h100",), "sustained", 0.8, 0.05, 1.0),
    Constant(("h100-96",), "sustained", 0.67, 0.05, 1.0),
    # 0.9 of forward (arXiv:2307.08691, figure 6); 0.59 by the probe of an H100
    Constant(_A100, "attention_backward_share", 0.55, 0.05, 1.0),
    Constant(_H100, "attention_backward_share", 0.59, 0.03, 1.0),
    # PyTorch's eager mode with a framework around it; 42 us by the probe of an H100
    Constant(_A100, "dispatch", 40e-6, 0.8),
    Constant(_H100, "dispatch", 40e-6, 0.1),
    Constant(_A100, "overlap", 0.2, 1.0, 0.95),
    Constant(_H100, "overlap", 0.6, 0.4, 0.95),
    # NCCL takes an eighth to a quarter of the multiprocessors, and some of the memory's rate
    Constant((*_A100, *_H100), "contention", 0.3, 0.1, 1.0),
)
"""What is fitted to steps."""


class Rows:
    """Measured rows whose predictions are asked for with changed devices.

    Args:
        steps: Of training.
        layers: Of one layer.
    """

    def __init__(self, steps: Sequence[Measured], layers: Sequence[MeasuredLayer]) -> None:
        self.steps = steps
        self.layers = layers
        self._workloads = {id(row): published_workload(row) for row in steps}
        self._layers = {row.shape: workload_of(row.shape) for row in layers}
        self._clusters = {
            (row.device, row.plans[0].ranks, row.devices_per_node, row.network): Cluster.assemble(
                row.device, row.plans[0].ranks, row.devices_per_node, row.network
            )
            for row in steps
        }
        self._filled = {id(row): self._fill(row) for row in steps}

    def errors(self, devices: Mapping[str, Device]) -> list[float]:
        """Of each step, the logarithm of predicted over measured."""
        measured = [(row, row.seconds) for row in self.steps if row.seconds is not None]
        return [math.log(self._step(row, devices) / seconds) for row, seconds in measured]

    def layer_errors(self, devices: Mapping[str, Device]) -> list[float]:
        """Of each layer's forward, backward and both."""
        errors = []
        for row in self.layers:
            workload = self._layers[row.shape]
            cluster = Cluster.assemble(row.device, row.layout.tp, max(row.layout.tp, 8), None)
            cluster = cluster.replace(device=devices[cluster.device.name])
            cost = block_cost(workload.layers[0], workload.hidden, workload.length, cluster, row.layout)
            both = cost.forward + cost.backward
            errors += [
                math.log(cost.forward / row.forward),
                math.log(cost.backward / row.backward),
                math.log(both / (row.forward + row.backward)),
            ]
        return errors

    def _step(self, row: Measured, devices: Mapping[str, Device]) -> float:
        cluster = self._cluster(row)
        device = with_attention(devices[cluster.device.name], row.attention)
        costs = Costs(self._workloads[id(row)], cluster.replace(device=device))
        return self._filled[id(row)].mixed(lambda plan: played_seconds(costs, plan, row.batch))

    def _fill(self, row: Measured) -> Filled:
        """The Plan of a row, with what it leaves open chosen by the constants of now."""
        cluster = self._cluster(row)
        cluster = cluster.replace(device=with_attention(cluster.device, row.attention))
        costs = Costs(self._workloads[id(row)], cluster)
        return fill_blanks(row, costs, Memories(costs.workload, cluster, costs))

    def _cluster(self, row: Measured) -> Cluster:
        return self._clusters[row.device, row.plans[0].ranks, row.devices_per_node, row.network]


def fit(rows: Rows) -> list[float]:
    """The constants that fit rows best, in the order of `CONSTANTS`.

    Damped least squares of logarithms; errors beyond one and a half standard deviations count less and less.
    """
    families = Counter(row.family for row in rows.steps)
    even = len(rows.steps) / len(families)
    weights = [(even / families[row.family]) ** 0.25 / _ERROR for row in rows.steps]
    weights += [1 / _LAYER_ERROR] * (3 * len(rows.layers))

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        devices = devices_with(_bounded(logarithms))
        found = np.array(rows.errors(devices) + rows.layer_errors(devices)) * weights
        departed = [
            (value - math.log(each.expected)) / each.spread
            for value, each in zip(logarithms, CONSTANTS, strict=True)
        ]
        return np.concatenate([softened(found, 1.5), departed])

    start = np.log([each.expected for each in CONSTANTS])
    return _bounded(least_squares(residuals, start))


def devices_with(values: Sequence[float]) -> dict[str, Device]:
    """The devices that are fitted, with these values of the constants, by their names in tables."""
    changes: dict[str, dict[str, Any]] = {}
    for value, constant in zip(values, CONSTANTS, strict=True):
        for name in constant.devices:
            changes.setdefault(name, {})[constant.field] = value
    made = [replace(Device.preset(name), **fields) for name, fields in changes.items()]
    return {device.name: device for device in made}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fits, and prints how well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="*", help="measured steps")
    parser.add_argument("--products", type=Path, nargs="+", default=(), help="measured products")
    parser.add_argument("--attention", type=Path, nargs="+", default=(), help="measured attention")
    parser.add_argument("--layers", type=Path, help="measured layers")
    parser.add_argument("--without", nargs="+", default=(), metavar="FAMILY", help="not fitted, but shown")
    options = parser.parse_args(arguments)
    operations = [row for table in (*options.products, *options.attention) for row in read_operations(table)]
    if operations:
        print(report(operations, fit_operations(operations)), end="\n\n")
    if options.runs:
        _fit_steps(options)


def _fit_steps(options: argparse.Namespace) -> None:
    """Fits the constants of steps, and prints how well."""
    layers = read_layers(options.layers) if options.layers else []
    known = {Device.preset(name).name for constant in CONSTANTS for name in constant.devices}
    every = [row for table in options.runs for row in read_table(table)]
    timed = [row for row in every if row.products == "bf16" and row.seconds is not None]
    steps = [row for row in timed if Device.preset(row.device).name in known]
    half = [row for row in steps if is_fitted(row) and row.family not in options.without]
    values = fit(Rows(half, layers))
    devices = devices_with(values)
    print("| family | rows | fitted rows: error | the others: error |\n| --- | ---: | ---: | ---: |")
    rows = Rows(steps, layers)
    errors = {id(row): math.exp(error) - 1 for row, error in zip(steps, rows.errors(devices), strict=True)}
    for family in [*dict.fromkeys(row.family for row in steps), "all"]:
        of_it = [row for row in steps if family in (row.family, "all")]
        cells = [
            _mean([errors[id(row)] for row in of_it if is_fitted(row) == side]) for side in (True, False)
        ]
        print(f"| {family} | {len(of_it)} | {cells[0]} | {cells[1]} |")
    if layers:
        print(f"\nlayers: at most {max(map(abs, rows.layer_errors(devices))):.1%}")
    for value, constant in zip(values, CONSTANTS, strict=True):
        print(
            f"{', '.join(constant.devices)}: {constant.field} = {value:.3g}  # expected {constant.expected:g}"
        )


def _mean(errors: Sequence[float]) -> str:
    if not errors:
        return ""
    return f"{np.mean(np.abs(errors)):.1%} ({np.mean(errors):+.1%})"


def _bounded(logarithms: np.ndarray) -> list[float]:
    values = np.exp(logarithms)
    return [min(float(value), each.most) for value, each in zip(values, CONSTANTS, strict=True)]


if __name__ == "__main__":
    main()
