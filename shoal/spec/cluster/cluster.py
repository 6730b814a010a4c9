"""The Cluster: devices, the links between them level by level, their price and their failures.

A Cluster has the limits of the machine (data sheets), and the shares and latencies that programs reach
(measured or fitted); `source` says where each comes from. Rates are bytes a second in one direction, per
device; memory is in bytes, time in seconds.

A Cluster whose devices differ, seen as uniform ones: as if every device were of one of its kinds.

Costs, memory and the planner know uniform Clusters. They take a view for each kind of device, and combine
these by the devices that a stage sits on (`shoal.predict.cost.device_kinds`). All views have the Cluster's
links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from shoal.errors import ClusterError, ConfigError
from shoal.limits import CLUSTER, read_limited
from shoal.limits import toml_of as table_of
from shoal.spec.cluster.device import (
    Device,
    Part,
    device_described,
    fields_of,
    first_devices,
    part_described,
    slowest_device,
    toml_of,
)
from shoal.spec.cluster.level import Level, cut, require_nested, resized, whole_groups
from shoal.spec.cluster.prices import Calibrated, Host, Power, Prices
from shoal.spec.cluster.tables import DOLLARS, PER_HOUR, Key, described, matching, require, table
from shoal.units import parse_bytes

PRESETS: tuple[str, ...] = tuple(table("nodes"))
"""Names of the known machines, from shoal/spec/cluster/nodes.toml."""

LIMIT_OF_JITTER = 0.99
"""The most to which a measured or changed jitter or noise is set; a Cluster's are below 1."""

_TABLES = {"host": Host, "prices": Prices, "power": Power, "calibrated": Calibrated}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines: devices, the links between them, and their hosts.

    Attributes:
        name: Name, such as "dgx-h100".
        device: The device that ranks compute on; of several kinds, the first.
        levels: Innermost first; full groups of each are made of full groups of the one before. The last has
            all devices, failed and spare ones too: whole nodes, so that its last pod may be a part of one.
        parts: Kinds of devices, in the order of ranks, where they differ: together all that Plans use. Empty
            if all are equal.
        failed: Number of nodes that do not work. Plans use the others.
        spare: Number of nodes that stand by for others to fail. Plans do not use them.
        price: Dollars for one device and hour on demand; 0 if not known.
        prices: Prices of other kinds: reserved, and spot with its interruptions.
        power: Watts of a device, its node and the building.
        failures: Failures of one device in an hour; 0 if not known.
        jitter: Variation of a rank's steps: standard deviation over mean; 0 if they do not vary.
        noise: Variation of a rank's work within a step: standard deviation, in seconds, of one second of
            work; work of t seconds varies by sqrt(t) times as much. 0 if it does not vary.
        reserved: Bytes of each device's memory that programs do not get: contexts, libraries, fragments.
        cores: Number of cores in a node whose devices are ranks that share cores and host memory; 0 for
            accelerators. The device's rates and memory are then those of each rank with all ranks at work.
        host: The computer that the devices of a node are in.
        calibrated: The measurement that the rates come from.
        source: Where these figures come from.
    """

    name: Annotated[str, Key("text", '"rack-7"')]
    device: Annotated[Device, Key("table, or the name of a known device", '"h100"')]
    levels: Annotated[tuple[Level, ...], Key("tables", "[[levels]]")]
    parts: Annotated[tuple[Part, ...], Key("tables", "[[parts]]")] = ()
    failed: Annotated[int, Key("nodes", "1")] = 0
    spare: Annotated[int, Key("nodes", "2")] = 0
    price: Annotated[float, Key(DOLLARS, "2.99")] = 0.0
    prices: Annotated[Prices, Key("table", "[prices]")] = field(default_factory=Prices)
    power: Annotated[Power, Key("table", "[power]")] = field(default_factory=Power)
    failures: Annotated[float, Key(PER_HOUR, "2e-5")] = 0.0
    jitter: Annotated[float, Key("share of a step", "0.02")] = 0.0
    noise: Annotated[float, Key("s in one second of work", "0.005")] = 0.0
    reserved: Annotated[float, Key("bytes", "1.5e9")] = 0.0
    cores: Annotated[int, Key("cores", "0")] = 0
    host: Annotated[Host, Key("table", "[host]")] = field(default_factory=Host)
    calibrated: Annotated[Calibrated, Key("table", "[calibrated]")] = field(default_factory=Calibrated)
    source: Annotated[str, Key("text", '"the invoice, and shoal probe on 2026-01-31"')] = ""

    def __hash__(self) -> int:
        """Hash what a fit changes, once: costs are looked up by cluster, thousands of which a fit tries."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.device, self.levels, self.host, self.jitter, self.noise))

    def __post_init__(self) -> None:
        require_nested(self.name, self.levels)
        nodes = self.levels[-1].devices // self.devices_per_node
        for name, count in {"failed": self.failed, "spare": self.spare}.items():
            require(count >= 0, self.name, name, count, "a number of nodes, 0 or more")
        require(
            self.failed + self.spare < nodes,
            self.name,
            "failed + spare",
            self.failed + self.spare,
            f"fewer than its nodes, of which it has {nodes}",
        )
        parted = sum(part.devices for part in self.parts)
        require(
            not self.parts or parted == self.devices,
            self.name,
            "devices of its parts",
            parted,
            f"together the {self.devices} devices that Plans use; failed and spare nodes are in no part",
        )
        for name, value in {"price": self.price, "failures": self.failures}.items():
            require(
                value >= 0, self.name, name, value, "0 or more, for one device and hour; 0 if it is not known"
            )
        of_a_step = "a share of a step, 0 or more and below 1, such as 0.02"
        require(0 <= self.jitter < 1, self.name, "jitter", self.jitter, of_a_step)
        of_a_second = "seconds in a second, 0 or more and below 1, such as 0.005"
        require(0 <= self.noise < 1, self.name, "noise", self.noise, of_a_second)
        require(
            self.cores >= 0,
            self.name,
            "cores",
            self.cores,
            "the number of cores in a node; 0 if devices are not cores",
        )
        memory = min([self.device.memory, *(part.device.memory for part in self.parts)])
        require(
            0 <= self.reserved < memory,
            self.name,
            "reserved",
            self.reserved,
            f"bytes: 0 or more, and less than the device's memory of {memory:g}",
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
            joined = whole_groups(devices, in_node, inside.devices)
        levels = (cut(inside, joined), replace(outside, devices=joined))
        return replace(base, levels=levels).with_devices(devices)

    @classmethod
    def read(cls, path: str | Path) -> Cluster:
        """Return the Cluster that a file describes.

        Raises:
            ClusterError: The file is missing, is not TOML, or has an impossible value.
        """
        try:
            described = table_of(read_limited(path, CLUSTER))
        except OSError as error:
            raise ClusterError(
                f"the description of machines {path} cannot be read: {error.strerror}",
                possible="a .toml file as `shoal cluster export` or `shoal probe` writes it",
                change="correct the path",
            ) from None
        except ValueError as error:  # an error in TOML or in UTF-8, or too much of it
            raise ClusterError(
                f"{path} is not TOML: {error}",
                possible="a .toml file as `shoal cluster export` or `shoal probe` writes it",
                change="correct the file",
            ) from None
        return cls.of(described, str(path))

    def write(self, path: str | Path) -> None:
        """Write a file from which `read` makes an equal Cluster.

        Raises:
            ClusterError: The file cannot be written.
        """
        try:
            Path(path).write_text(toml_of(self.described()), encoding="utf-8")
        except OSError as error:
            raise ClusterError(
                f"the description of machines cannot be written to {path}: {error.strerror}",
                possible="a file in a directory that can be written to",
                change="give another path",
            ) from None

    def described(self) -> dict[str, Any]:
        """Return the tables of a file, without parts if there are none."""
        fields = asdict(self)
        if not self.parts:
            del fields["parts"]
        for written, part in zip(fields.get("parts", ()), self.parts, strict=True):
            if part.device == self.device:
                del written["device"]
        return fields

    @property
    def devices(self) -> int:
        """Number of devices that Plans use: all but those of failed and spare nodes."""
        return self.levels[-1].devices - (self.failed + self.spare) * self.devices_per_node

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
        """Return a Cluster in which Plans use so many of these devices: part of one node, or whole nodes.

        All levels stay, so that one node can grow to many. The last pod may be a part of one. Failed and
        spare nodes stay beside the devices that are used, but for a part of a node. If a mesh is cut, each
        device keeps the links to the devices that are left. A Cluster that was cut within a node grows by
        nodes of that size. Where ranks share cores, a single node of two ranks or more takes any number of
        ranks, each with its part of the cores and the memory.

        Raises:
            ClusterError: The number is not whole nodes, no links join so many devices, or they are more than
                the parts have.
        """
        is_shared = self.cores and self.devices > 1  # a single device was described without links
        if len(self.levels) == 1 and devices > self.devices and not is_shared:
            raise ClusterError(
                f"{devices} devices are too many: {self.name} has {self.devices}, with no links to others",
                possible=f"1 to {self.devices}",
                change="ask for fewer, or add a level of links to the description",
            )
        require(
            not self.parts or devices <= self.devices,
            self.name,
            "devices",
            devices,
            f"up to {self.devices}, which its parts have together",
        )
        failed, spare = (self.failed, self.spare) if devices >= self.devices_per_node else (0, 0)
        levels = resized(self.name, self.levels, devices, beside=failed + spare)
        found = replace(
            self, levels=levels, parts=first_devices(self.parts, devices), failed=failed, spare=spare
        )
        slower = found.crowding / self.crowding
        if self.cores:
            share = self.devices_per_node / levels[0].devices
            found = found.with_each_device(lambda each: replace(each, memory=each.memory * share))
        return found if slower == 1 else found.with_each_device(lambda each: each.slowed(slower))

    def device_of(self, ranks: range, precision: str = "bf16") -> Device:
        """Return the device that some ranks wait for: the slowest of them, with the least memory of them all.

        Args:
            ranks: Ranks that work together, such as those of a stage.
            precision: Precision in which the devices' peaks are compared.

        Raises:
            ClusterError: There are no such ranks, or a peak in this precision is not known.
        """
        require(
            len(ranks) > 0 and min(ranks) >= 0 and max(ranks) < self.devices,
            self.name,
            "ranks",
            ranks,
            f"one or more of the ranks 0 to {self.devices - 1}",
        )
        return slowest_device(self.parts, ranks, precision) if self.parts else self.device

    def with_links_of(self, other: Cluster) -> Cluster:
        """Return a Cluster of these devices with the links of another, such as a preset of the same devices.

        Levels of links that were described here stay, and the other's levels around them follow. A single
        device gets all of them, and as many neighbours as the other's node has.

        Args:
            other: The Cluster whose links, host, power and reserved memory are taken.

        Raises:
            ClusterError: The levels do not fit round one another.
        """
        own = self.levels if self.devices > 1 else ()
        return replace(
            self,
            levels=(*own, *other.levels[len(own) :]),
            reserved=self.reserved or min(other.reserved, self.device.memory / 2),
            host=other.host,
            power=self.power if self.power.device else other.power,
            source=f"{self.source}; other links as in {other.name}",
        )

    def with_cores(self, cores: int) -> Cluster:
        """Return a Cluster with so many cores in each node, and the rates that its ranks then have.

        Raises:
            ClusterError: `cores` is less than 1.
        """
        require(cores >= 1, self.name, "cores", cores, "1 or more")
        found = replace(self, cores=cores)
        return found.with_each_device(lambda each: each.slowed(found.crowding / self.crowding))

    def with_each_device(self, change: Callable[[Device], Device]) -> Cluster:
        """Return a Cluster in which a function has changed the device, of each part too."""
        parts = tuple(replace(part, device=change(part.device)) for part in self.parts)
        return replace(self, device=change(self.device), parts=parts)

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
        values["device"] = device_described(values["device"], f"the device of {where}")
        for name, kind in _TABLES.items():
            if name in values:
                values[name] = kind(**fields_of(kind, values[name], f"the table {name} of {where}"))
        values["levels"] = tuple(
            Level(**fields_of(Level, level, f"level {number} of {where}"))
            for number, level in enumerate(values["levels"], 1)
        )
        if "parts" in values and values["levels"]:
            node = values["levels"][0].devices
            values["parts"] = tuple(
                part_described(part, values["device"], node, f"part {number} of {where}")
                for number, part in enumerate(values["parts"], 1)
            )
        return cls(**values)


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


def limited(cluster: Cluster, memory: str) -> Cluster:
    """Return the Cluster whose devices have no more memory than was asked for.

    Args:
        cluster: The machines.
        memory: A size such as 20GiB; "" for all that there is.

    Raises:
        ConfigError: The size cannot be read.
        ClusterError: It is less than what contexts and libraries take on every device.
    """
    if not memory:
        return cluster
    try:
        size = parse_bytes(memory)
    except ValueError as error:
        raise ConfigError(
            f"the memory {memory} cannot be read: {error}",
            possible="a size such as 512MiB or 20GiB",
            change="write, for example, 20GiB",
        ) from error
    return cluster.with_each_device(lambda device: replace(device, memory=min(device.memory, size)))


def devices_of(cluster: Cluster) -> tuple[Device, ...]:
    """Return the different devices of a Cluster, each at the pace of its part, in the order of ranks."""
    if not cluster.parts:
        return (cluster.device,)
    return tuple(dict.fromkeys(part.at_pace for part in cluster.parts))


def counts_of(cluster: Cluster) -> dict[str, int]:
    """Return the number of devices of each kind, by title, in the order of `devices_of`."""
    if not cluster.parts:
        return {cluster.device.name: cluster.devices}
    found: dict[str, int] = {}
    for number, device in enumerate(devices_of(cluster), 1):
        alike = [part for part in cluster.parts if part.at_pace == device]
        title = alike[0].title
        found[title if title not in found else f"{title} (kind {number})"] = sum(
            each.devices for each in alike
        )
    return found


def every_device(cluster: Cluster, device: Device) -> Cluster:
    """Return the Cluster as if every device were this one."""
    return cluster.replace(device=device, parts=())


def peak_of_all(cluster: Cluster, precision: str) -> float:
    """Return the FLOP/s of all devices together by their data sheets; a slow node counts in full.

    Raises:
        ClusterError: A device's peak in this precision is not known.
    """
    if not cluster.parts:
        return cluster.device.flops(precision) * cluster.devices
    return sum(part.device.flops(precision) * part.devices for part in cluster.parts)
