"""The order of the packages: each imports only from the lines above its own.

Packages on one line do not import each other. `tests/test_layers.py` holds the code to this list,
and the architecture page of the docs prints it.
"""

from __future__ import annotations

__all__ = ["LAYERS", "TORCH_FREE"]

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "units", "layers", "proc", "release", "signals"),
    ("limits", "listener", "scratch"),
    ("lines",),
    ("plan", "cluster", "workload", "timeline", "values"),
    ("run",),
    ("cost",),
    ("simulate",),
    ("diagnosis", "foreign", "replay"),
    ("planner",),
    ("validate", "compare", "advise", "doctor", "hang", "submit"),
    ("collectives", "channel"),
    ("models", "data", "record"),
    ("trace", "bench"),
    ("probe",),
    ("checkpoint",),
    ("server",),
    ("parallel",),
    ("launch",),
    ("train", "fleet"),
    ("check",),
    ("web",),
    ("cli",),
    ("testing", "__main__"),
)
"""Top to bottom. `run` is the directory on disk, with the timeline that it holds."""

TORCH_FREE: frozenset[str] = frozenset(name for line in LAYERS[:10] for name in line)
"""Packages that never import torch, so that planning and reporting start in well under a second."""
