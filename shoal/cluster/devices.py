"""What is known of devices by their names."""

from __future__ import annotations

import re
import tomllib
from importlib import resources

__all__ = ["peak_flops"]


def peak_flops(device: str, precision: str) -> float | None:
    """Dense peak of a device in FLOP/s; None where it is not known, as for CPUs.

    Args:
        device: Its name as the driver gives it, such as "NVIDIA H100 80GB HBM3".
        precision: Type of the weights that compute, as in a Plan: fp32 or bf16.
    """
    table = tomllib.loads(resources.files("shoal.cluster").joinpath("devices.toml").read_text("utf-8"))
    for entry in table.values():
        if re.search(entry["match"], device):
            peak: float | None = entry.get(precision)
            return peak
    return None
