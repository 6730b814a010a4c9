"""The Level: links that join devices into groups."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cluster.checks import require, require_bytes, require_share

__all__ = ["Level"]


@dataclass(frozen=True, kw_only=True)
class Level:
    """Links that join devices into groups, and these into larger ones, such as a node's switch or a fabric.

    Attributes:
        name: Name, such as "nvlink" or "network".
        devices: Number of devices in one group of this level.
        bandwidth: Bytes/s from one device, by its data sheet; in a mesh over all of its links together.
        share: Share of the bandwidth that large collectives reach.
        setup: Seconds that a collective takes to begin and end, however few take part.
        latency: Seconds that a step from device to device takes.
        half_size: Bytes s0 in the time `(S/B)(1 + sqrt(s0/S))` of S bytes: small buffers are slower by it.
        oversubscription: How many times more the devices can send than the level's links carry together.
        mesh: Whether each device has a link to each other one, rather than all of its bandwidth to any.
        reduces: Whether the switches add up: an all-reduce then sends each byte up once.
        reduction_share: Share of the bandwidth that these all-reduces reach.
        source: Where these figures come from.
    """

    name: str
    devices: int
    bandwidth: float
    share: float = 0.8
    setup: float = 0.0
    latency: float = 10e-6
    half_size: float = 0.0
    oversubscription: float = 1.0
    mesh: bool = False
    reduces: bool = False
    reduction_share: float = 0.7
    source: str = ""

    def __post_init__(self) -> None:
        where = f"the level {self.name}"
        require_bytes(where, bandwidth=self.bandwidth)
        require(self.devices >= 1, where, "devices", self.devices, "1 or more")
        for name in ("share", "reduction_share"):
            require_share(where, name, getattr(self, name))
        for name in ("setup", "latency"):
            value = getattr(self, name)
            require(0 <= value < 1, where, name, value, "seconds: 0 or more, and far below 1, such as 5e-6")
        require(self.half_size >= 0, where, "half_size", self.half_size, "bytes, 0 or more")
        require(
            self.oversubscription >= 1,
            where,
            "oversubscription",
            self.oversubscription,
            "1 if links carry all that devices send, 2 if they carry half of it",
        )

    def rate(self, members: int) -> float:
        """Return the bytes/s from each device that collectives of `members` devices reach.

        In a mesh a collective uses the links that lead to other members.
        """
        reached = self.bandwidth * self.share / self.oversubscription
        if self.mesh and members < self.devices:
            return reached * max(members - 1, 1) / (self.devices - 1)
        return reached
