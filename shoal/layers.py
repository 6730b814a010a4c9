"""The order of the packages: each imports only from the lines above its own.

Packages on one line do not import each other. A name with a dot is a package in a room, which is a folder of
packages that belong together. `tests/test_layers.py` holds the code to this list, and the docs print it.
"""

from __future__ import annotations

__all__ = ["LAYERS", "TORCH_FREE", "package_of"]

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "units", "layers", "proc", "release", "signals"),
    ("limits", "listener", "scratch"),
    ("lines", "values"),
    ("spec.plan", "spec.cluster", "spec.workload", "spec.timeline"),
    ("spec.run",),
    ("predict.cost",),
    ("predict.simulate",),
    ("predict.planner",),
    ("predict.validate",),
    ("analyze.diagnosis", "analyze.foreign", "analyze.replay"),
    ("analyze.compare", "analyze.advise", "analyze.hang", "machine.doctor", "launch.submit"),
    ("collectives", "channel"),
    ("models", "data", "record"),
    ("trace", "machine.bench"),
    ("machine.probe",),
    ("checkpoint",),
    ("parallel",),
    ("launch.local",),
    ("launch.elastic",),
    ("launch.hosts",),
    ("train", "launch.fleet"),
    ("testing",),
    ("web",),
    ("cli",),
    ("__main__",),
)
"""Top to bottom. `spec.run` is the directory on disk, with the timeline that it holds."""

TORCH_FREE: frozenset[str] = frozenset(name for line in LAYERS[:11] for name in line)
"""Packages that never import torch, so that planning and reporting start in well under a second."""

_ROOMS = {name.partition(".")[0] for line in LAYERS for name in line if "." in name}


def package_of(module: str) -> str:
    """Return the package of a module by its name in LAYERS: "spec.plan" for "shoal.spec.plan.groups"."""
    names = module.split(".")[1:]
    return ".".join(names[: 2 if names[0] in _ROOMS else 1]) if names else "shoal itself"
