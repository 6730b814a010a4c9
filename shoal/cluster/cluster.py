"""The Cluster: devices, the links between them level by level, their price and their failures.

A Cluster has the limits of the machine (data sheets), and the shares and latencies that programs reach
(measured or fitted); `source` says where each comes from. Rates are bytes a second in one direction, per
device; memory is in bytes, time in seconds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.cluster.checks import require
from shoal.cluster.description import fields_of, toml_of
from shoal.cluster.device import Device
from shoal.cluster.host import Host
from shoal.cluster.level import Level
from shoal.cluster.tables import described, matching, table
from shoal.errors import ClusterError

__all__ = ["PRESETS", "Cluster"]

PRESETS: tuple[str, ...] = tuple(table("nodes"))
"""Names of the known machines, from shoal/cluster/nodes.toml."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines: devices, the links between them, and their hosts.

    Attributes:
        name: Name, such as "dgx-h100".
        device: The device that ranks compute on; all devices are equal.
        levels: Innermost first; the groups of each are made of whole groups of the one before. The last has
            all devices.
        price: Dollars for one device and hour; 0 if not known.
        failures: Failures of one device in an hour; 0 if not known.
        jitter: Variation of a rank's steps: standard deviation over mean; 0 if they do not vary.
        noise: Variation of a rank's work within a step: standard deviation, in seconds, of one second of
            work; work of t seconds varies by sqrt(t) times as much. 0 if it does not vary.
        reserved: Bytes of each device's memory that programs do not get: contexts, libraries, fragments.
        cores: Number of cores in a node whose devices are ranks that share cores and host memory; 0 for
            accelerators. The device's rates and memory are then those of each rank with all ranks at work.
        host: The computer that the devices of a node are in.
        source: Where these figures come from.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    price: float = 0.0
    failures: float = 0.0
    jitter: float = 0.0
    noise: float = 0.0
    reserved: float = 0.0
    cores: int = 0
    host: Host = field(default_factory=Host)
    source: str = ""

    def __post_init__(self) -> None:
        if not self.levels:
            raise ClusterError(
                f"{self.name} has no levels of links",
                possible="one or more; the last joins all devices",
                change="add a level, with devices=1 for a single device",
            )
        inner = 1
        for level in self.levels:
            if level.devices < inner or level.devices % inner:
                raise ClusterError(
                    f"the level {level.name} of {self.name} joins {level.devices} devices, and the level "
                    f"inside it joins {inner}",
                    possible=f"a multiple of {inner}",
                    change="correct the number of devices of one of them",
                )
            inner = level.devices
        for name, value in {"price": self.price, "failures": self.failures}.items():
            require(
                value >= 0, self.name, name, value, "0 or more, for one device and hour; 0 if it is not known"
            )
        require(
            0 <= self.jitter < 1,
            self.name,
            "jitter",
            self.jitter,
            "a share of a step, 0 or more and below 1, such as 0.02",
        )
        require(
            0 <= self.noise < 1,
            self.name,
            "noise",
            self.noise,
            "seconds in a second, 0 or more and below 1, such as 0.005",
        )
        require(
            self.cores >= 0,
            self.name,
            "cores",
            self.cores,
            "the number of cores in a node; 0 if devices are not cores",
        )
        require(
            0 <= self.reserved < self.device.memory,
            self.name,
            "reserved",
            self.reserved,
            f"bytes: 0 or more, and less than the device's memory of {self.device.memory:g}",
        )

    @classmethod
    def preset(cls, name: str, devices: int | None = None) -> Cluster:
        """Return the known machines with this name.

        Args:
            name: One of PRESETS.
            devices: Number of devices; by default one node's, or all of a preset with pods.

        Raises:
            ClusterError: There is no such preset, or it has no such number of devices.
        """
        found = cls.of(described(name), f"the preset {name}")
        return found if devices is None else found.with_devices(devices)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read a preset or a file from text: "dgx-h100", "dgx-h100:64", "mine.toml", "mine.toml:16".

        Raises:
            ClusterError: There is no such preset or file, or no such number of devices of it.
        """
        name, colon, number = text.rpartition(":")
        if not colon:
            name = text
        elif not number.isdecimal():
            raise ClusterError(
                f"{text!r} has {number!r} as its number of devices",
                possible="a preset or a file, a colon, and the number of devices: dgx-h100:64",
                change="write a number after the colon",
            )
        is_file = name.endswith(".toml") or "/" in name
        found = cls.read(name) if is_file else cls.preset(name)
        return found.with_devices(int(number)) if colon else found

    @classmethod
    def assemble(
        cls, words: str, devices: int, devices_per_node: int | None, network: float | None
    ) -> Cluster:
        """Make a Cluster from few facts, as in tables of measurements; the nearest preset gives the rest.

        Args:
            words: Description of the node or its device, such as "p5.48xlarge (8xH100)" or "A100-80GB".
            devices: Number of devices in all.
            devices_per_node: Number of devices in a node; None for the preset's.
            network: Bytes/s of a node's interfaces together, one direction; None for the preset's.

        Raises:
            ClusterError: Neither node nor device is known, or the numbers contradict each other.
        """
        base = cls.preset(matching("nodes", words) or _node_of(words))
        inside, outside = base.levels[0], base.levels[-1]
        in_node = devices_per_node or inside.devices
        if network is not None:
            outside = replace(outside, bandwidth=network / in_node)
        joined = in_node
        if in_node == table("nodes")[base.name].get("board"):
            joined = _whole_groups(devices, in_node, inside.devices)
        levels = (_cut(inside, joined), replace(outside, devices=joined))
        return replace(base, levels=levels).with_devices(devices)

    @classmethod
    def read(cls, path: str | Path) -> Cluster:
        """Return the Cluster that a file describes.

        Raises:
            ClusterError: The file is missing, is not TOML, or has an impossible value.
        """
        try:
            described = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise ClusterError(
                f"the description of machines {path} cannot be read: {error.strerror}",
                possible="a .toml file that `shoal probe` or Cluster.write wrote",
                change="correct the path",
            ) from None
        except ValueError as error:  # an error in TOML or in UTF-8
            raise ClusterError(
                f"{path} is not TOML: {error}",
                possible="a .toml file that `shoal probe` or Cluster.write wrote",
                change="correct the file",
            ) from None
        return cls.of(described, str(path))

    def write(self, path: str | Path) -> None:
        """Write a file from which `read` makes an equal Cluster.

        Raises:
            ClusterError: The file cannot be written.
        """
        try:
            Path(path).write_text(toml_of(asdict(self)), encoding="utf-8")
        except OSError as error:
            raise ClusterError(
                f"the description of machines cannot be written to {path}: {error.strerror}",
                possible="a file in a directory that can be written to",
                change="give another path",
            ) from None

    @property
    def devices(self) -> int:
        """Number of all devices."""
        return self.levels[-1].devices

    @property
    def devices_per_node(self) -> int:
        """Number of devices that the innermost links join."""
        return self.levels[0].devices

    @property
    def crowding(self) -> float:
        """Number of ranks per core, at least 1; 1 if the devices are not cores."""
        return max(1.0, self.devices_per_node / self.cores) if self.cores else 1.0

    def replace(self, **changes: Any) -> Cluster:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def with_devices(self, devices: int) -> Cluster:
        """Return a Cluster of so many of these devices: part of one node, or whole nodes (and whole pods).

        All levels stay, so that one node can grow to many. If a mesh is cut, each device keeps the links to
        the devices that are left. A Cluster that was cut within a node grows by nodes of that size. Where
        ranks share cores, a single node of two ranks or more takes any number of ranks, each with its part of
        the cores and the memory.

        Raises:
            ClusterError: The number is not whole groups of some level, or no links join so many devices.
        """
        is_shared = self.cores and self.devices > 1  # a single device was described without links
        if len(self.levels) == 1 and devices > self.devices and not is_shared:
            raise ClusterError(
                f"{devices} devices are too many: {self.name} has {self.devices}, with no links to others",
                possible=f"1 to {self.devices}",
                change="ask for fewer, or add a level of links to the description",
            )
        require(devices >= 1, self.name, "devices", devices, "1 or more")
        levels = []
        for level in self.levels:
            is_last = level is self.levels[-1]
            if devices > level.devices and not is_last and devices % level.devices:
                below = devices - devices % level.devices
                raise ClusterError(
                    f"{devices} devices are not a multiple of the {level.devices} that {level.name} joins in "
                    f"{self.name}",
                    possible=f"up to {level.devices}, or a multiple of it, such as {below} or "
                    f"{below + level.devices}",
                    change="ask for another number of devices",
                )
            levels.append(_cut(level, devices if is_last else min(devices, level.devices)))
        memory = self.device.memory
        if self.cores:
            memory *= self.devices_per_node / levels[0].devices
        found = replace(self, levels=tuple(levels), device=replace(self.device, memory=memory))
        return found._slowed(found.crowding / self.crowding)

    def with_links_of(self, other: Cluster) -> Cluster:
        """Return a Cluster of these devices with the links of another, such as a preset of the same devices.

        Levels of links that were described here stay, and the other's levels around them follow. A single
        device gets all of them, and as many neighbours as the other's node has.

        Args:
            other: The Cluster whose links, host and reserved memory are taken.

        Raises:
            ClusterError: The levels do not fit round one another.
        """
        own = self.levels if self.devices > 1 else ()
        return replace(
            self,
            levels=(*own, *other.levels[len(own) :]),
            reserved=self.reserved or min(other.reserved, self.device.memory / 2),
            host=other.host,
            source=f"{self.source}; other links as in {other.name}",
        )

    def with_cores(self, cores: int) -> Cluster:
        """Return a Cluster with so many cores in each node, and the rates that its ranks then have.

        Raises:
            ClusterError: `cores` is less than 1.
        """
        require(cores >= 1, self.name, "cores", cores, "1 or more")
        found = replace(self, cores=cores)
        return found._slowed(found.crowding / self.crowding)

    def _slowed(self, factor: float) -> Cluster:
        return self if factor == 1 else replace(self, device=self.device.slowed(factor))

    @classmethod
    def of(cls, described: Mapping[str, Any], where: str) -> Cluster:
        """Return the Cluster that a table describes, such as the result of `dataclasses.asdict`.

        Args:
            described: The fields of the Cluster, with tables for the device and the levels.
            where: The source of the table, for messages.

        Raises:
            ClusterError: A value is impossible.
        """
        values = fields_of(cls, described, where)
        values["device"] = Device(**fields_of(Device, values["device"], f"the device of {where}"))
        if "host" in values:
            values["host"] = Host(**fields_of(Host, values["host"], f"the host of {where}"))
        values["levels"] = tuple(
            Level(**fields_of(Level, level, f"level {number} of {where}"))
            for number, level in enumerate(values["levels"], 1)
        )
        return cls(**values)


def _whole_groups(devices: int, board: int, most: int) -> int:
    """Return the number of devices in each innermost group, so that groups are equal and of whole boards."""
    sizes = [size for size in range(board, most + 1, board) if devices % size == 0]
    return min(max(sizes, default=board), max(devices, board))


def _node_of(words: str) -> str:
    """Return the first preset that has the device which the words name."""
    device = Device.preset(words)
    for name in PRESETS:
        if Device.preset(table("nodes")[name]["device"]) == device:
            return name
    raise ClusterError(
        f"no known node has the device {device.name}, which {words!r} names",
        possible=", ".join(PRESETS),
        change="describe the machines in a .toml file",
    )


def _cut(level: Level, devices: int) -> Level:
    """Return a level with so many devices; a mesh loses the links to the devices that are gone."""
    if not level.mesh or devices >= level.devices:
        return replace(level, devices=devices)
    left = max(devices - 1, 1) / (level.devices - 1)
    return replace(level, devices=devices, bandwidth=level.bandwidth * left)
