"""Prices of devices, and the power that they draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from shoal.spec.cluster.tables import DOLLARS, PER_HOUR, SHARE, Key, require, require_share

KINDS_OF_PRICE = ("on-demand", "reserved", "spot")
"""Ways to pay for devices: by the hour, for a year ahead, or as long as nobody else pays more."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices beside the one on demand, which is the Cluster's `price`.

    Attributes:
        reserved: Dollars for one device and hour that is reserved ahead; 0 if not known.
        spot: Dollars for one device and hour that may be taken away; 0 if not known.
        interruptions: Number of times that one spot device is taken away in an hour; where nodes are taken
            away whole, that of a node divided by its devices. 0 if not known.
        source: Where these figures and the price on demand come from, and their date.
    """

    reserved: Annotated[float, Key(DOLLARS, "1.99")] = 0.0
    spot: Annotated[float, Key(DOLLARS, "0.92")] = 0.0
    interruptions: Annotated[float, Key(PER_HOUR, "3.4e-5")] = 0.0
    source: Annotated[str, Key("text", '"the cloud\'s price list, January 2026"')] = ""

    def __post_init__(self) -> None:
        for name in ("reserved", "spot", "interruptions"):
            value = getattr(self, name)
            require(
                value >= 0,
                "the table prices",
                name,
                value,
                "0 or more, for one device and hour; 0 if it is not known",
            )


@dataclass(frozen=True, kw_only=True)
class Power:
    """The power that a device draws under load, with its part of the node and of the building.

    Attributes:
        device: Watts of one device under load; 0 if not known. Data sheets give the most that it may draw.
        overhead: Watts of the node beside its devices, under load, for each device: processors, memory,
            interfaces, fans, losses of power supplies.
        pue: Power of the building over power of its nodes (power usage effectiveness): 1.1 for the best,
            1.5 for many; at least 1.
        source: Where these figures come from.
    """

    device: Annotated[float, Key("W", "700.0")] = 0.0
    overhead: Annotated[float, Key("W for each device", "575.0")] = 0.0
    pue: Annotated[float, Key("W of the building for one of its nodes", "1.3")] = 1.0
    source: Annotated[str, Key("text", '"the meter of the rack"')] = ""

    def __post_init__(self) -> None:
        for name in ("device", "overhead"):
            value = getattr(self, name)
            require(value >= 0, "the table power", name, value, "watts, 0 or more; 0 if it is not known")
        require(1 <= self.pue < 10, "the table power", "pue", self.pue, "1 or more, such as 1.3")

    @property
    def watts(self) -> float:
        """Watts that one device costs, with all that it needs around it; 0 if not known."""
        return (self.device + self.overhead) * self.pue if self.device else 0.0


@dataclass(frozen=True, kw_only=True)
class Host:
    """The computer that devices are in, with memory and files to keep state outside of the devices.

    Attributes:
        name: Name, such as "2 x EPYC 7742".
        devices: Number of devices that share it.
        memory: Bytes of memory; 0 if not known.
        bandwidth: Bytes/s of the memory, by its data sheet; 0 if not known.
        share: Share of the bandwidth that passes over memory reach.
        file_bandwidth: Bytes/s to and from its files together; 0 if not known.
        source: Where these figures come from.
    """

    name: Annotated[str, Key("text", '"2 x EPYC 7742"')] = ""
    devices: Annotated[int, Key("devices", "8")] = 1
    memory: Annotated[float, Key("bytes", "2_199_023_255_552")] = 0.0
    bandwidth: Annotated[float, Key("bytes/s", "614.4e9")] = 0.0
    share: Annotated[float, Key(SHARE, "0.75")] = 0.75
    file_bandwidth: Annotated[float, Key("bytes/s", "40e9")] = 0.0
    source: Annotated[str, Key("text", '"NVIDIA data sheet"')] = ""

    def __post_init__(self) -> None:
        where = f"the host {self.name}"
        require(self.devices >= 1, where, "devices", self.devices, "1 or more")
        require_share(where, "share", self.share)
        for name in ("memory", "bandwidth", "file_bandwidth"):
            value = getattr(self, name)
            require(value >= 0, where, name, value, "bytes or bytes/s, 0 or more; 0 if it is not known")


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
