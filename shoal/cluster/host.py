"""The Host: the computer that some devices share, with its memory and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from shoal.cluster.checks import require, require_share
from shoal.cluster.keys import SHARE, Key


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
