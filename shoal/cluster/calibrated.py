"""How a Cluster's figures were measured: by a probe, or by runs that corrected them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from shoal.cluster.checks import require
from shoal.cluster.keys import Key


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The measurement that the rates of a Cluster come from.

    Attributes:
        by: "probe" for `shoal probe`, "runs" for `shoal calibrate`; empty for data sheets and fits of others.
        devices: Number of devices that took part; predictions for more nodes are as for other machines.
        error: Error that is left between the description and what was measured, as a share.
    """

    by: Annotated[str, Key("probe, runs, or empty", '"probe"')] = ""
    devices: Annotated[int, Key("devices", "8")] = 0
    error: Annotated[float, Key("share", "0.03")] = 0.0

    def __post_init__(self) -> None:
        where = "the table calibrated"
        require(self.by in ("", "probe", "runs"), where, "by", repr(self.by), '"probe", "runs", or ""')
        require(self.devices >= (1 if self.by else 0), where, "devices", self.devices, "1 or more")
        require(0 <= self.error < 1, where, "error", self.error, "a share, 0 or more and below 1")
