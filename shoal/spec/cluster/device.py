"""The Device: one accelerator or core, its limits, and the rates that programs reach on it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from decimal import Decimal
from functools import cache, cached_property
from typing import Annotated, Any, Protocol, cast, get_args, get_origin, get_type_hints

from shoal.errors import ClusterError, nearest
from shoal.spec.cluster.tables import (
    SHARE,
    Key,
    keys_of,
    matching,
    require,
    require_bytes,
    require_share,
    table,
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


_KINDS: dict[Any, tuple[Callable[[object], bool], str]] = {
    str: (lambda value: isinstance(value, str), "text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (_is_whole, "a whole number"),
    float: (_is_number, "a number"),
    tuple[int, int]: (
        lambda value: _are(_is_whole)(value) and len(cast("list", value)) == 2,
        "two whole numbers",
    ),
    Mapping[str, float]: (
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        "a table of numbers",
    ),
}
"""By the type of a field: the check of a TOML value, and the type's name in messages."""

_types_of = cache(get_type_hints)


def _kind_of(annotated: Any) -> tuple[Callable[[object], bool], str]:
    """Return the check of a value for a field of this type, which may be another dataclass, and its name."""
    if annotated in _KINDS:
        return _KINDS[annotated]
    if get_origin(annotated) is tuple:
        return _are(lambda value: isinstance(value, dict)), "a list of tables"
    if hasattr(annotated, "preset"):
        return lambda value: isinstance(value, str | dict), "a table, or the name of a known device"
    return lambda value: isinstance(value, dict), "a table"


def fields_of(kind: type, described: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a dataclass from a table, after checks of names, missing keys and types.

    Args:
        kind: The dataclass: Cluster, or a part of its description.
        described: The table.
        where: The object that the table describes, for messages.

    Raises:
        ClusterError: A key is unknown or missing, or its value is of another type.
    """
    known = {each.name: each for each in fields(kind)}
    for key, value in described.items():
        if key not in known:
            raise ClusterError(
                f"{where} has an unknown key {key!r}{nearest(key, known)}",
                possible=", ".join(known)
                + (", nodes (instead of devices)" if kind.__name__ == "Part" else ""),
                change=f"correct or remove {key}",
            )
        if not _kind_of(_types_of(kind)[key])[0](value):
            raise ClusterError(
                f"{where} has {key}={value!r}",
                possible=_meaning(kind, key),
                change=f"correct {key}{_such_as(kind, key)}",
            )
    for key, each in known.items():
        if key not in described and each.default is MISSING and each.default_factory is MISSING:
            raise ClusterError(
                f"{where} has no {key!r}",
                possible=_meaning(kind, key),
                change=f"add {key}{_such_as(kind, key)}",
            )
    return {key: tuple(value) if isinstance(value, list) else value for key, value in described.items()}


def _meaning(kind: type, key: str) -> str:
    """Return the type that a field's value has, and its unit."""
    unit, meaning = keys_of(kind)[key].unit, _kind_of(_types_of(kind)[key])[1]
    return meaning if unit in meaning else f"{meaning}: {unit}"


def _such_as(kind: type, key: str) -> str:
    """Return an example of a key: a line of TOML, or the heading of a table."""
    example = keys_of(kind)[key].example
    is_heading = example in (f"[{key}]", f"[[{key}]]")
    return f", such as {example if is_heading else f'{key} = {example}'}"


def toml_of(described: Mapping[str, Any]) -> str:
    """Return the TOML of a table of values, tables and lists of tables; numbers keep every digit."""
    return "".join(_lines(described, ()))


class _Described(Protocol):
    def described(self) -> dict[str, Any]: ...


def commented_toml(cluster: _Described) -> str:
    """Return a Cluster as TOML to be edited: with units, and large numbers as 450e9."""
    kind: Any = type(cluster)
    lines: list[str] = []
    for line in toml_of(cluster.described()).rstrip("\n").split("\n"):
        if line.startswith("["):
            kind = _class_at(type(cluster), line.strip("[]").split("."))
        key, _, value = line.partition(" = ")
        if not (value[:1].isdecimal() or value[:1] == "["):
            lines.append(line)
            continue
        unit = keys_of(kind)[key].unit if isinstance(kind, type) else "FLOP/s"
        lines.append(f"{f'{key} = {_in_thousands(value)}':<34}  # {unit}")
    return "\n".join(lines) + "\n"


def _class_at(kind: Any, headings: Sequence[str]) -> Any:
    """Return the class whose fields stand under these headings; for device.peak, a type of mappings."""
    for heading in headings:
        kind = _types_of(kind)[heading]
        kind = get_args(kind)[0] if get_origin(kind) is tuple else kind
    return kind


def _in_thousands(number: str) -> str:
    """Return a large fraction with an exponent that is a multiple of three, without loss: 450e9."""
    if not re.fullmatch(r"\d{5,}\.\d+|\d\.?\d*e\+\d+", number):
        return number
    exact = Decimal(number)
    exponent = exact.adjusted() // 3 * 3
    return f"{exact.scaleb(-exponent).normalize():f}e{exponent}"


def _lines(described: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Return the lines: values first, as TOML needs, then each table under its heading."""
    lines = [f"{_key(key)} = {_value(value)}\n" for key, value in described.items() if not _is_table(value)]
    for key, value in described.items():
        heading = ".".join(map(_key, (*path, key)))
        if isinstance(value, Mapping):
            lines += [f"\n[{heading}]\n", *_lines(value, (*path, key))]
        elif _is_table(value):
            for each in value:
                lines += [f"\n[[{heading}]]\n", *_lines(each, (*path, key))]
    return lines


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)
    )


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


_SHARES = (
    "product_share",
    "bandwidth_share",
    "attention_share",
    "attention_backward_share",
    "sustained",
    "flash2_share",
)
_INSTEAD = {"tf32": "fp32", "fp8": "bf16"}
"""The type in which products are computed on a device that has no rate in the first."""

_SECONDS = ("launch", "dispatch", "graph")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, with the rates of its data sheet and the shares that programs reach.

    Attributes:
        name: Name, such as "H100-SXM".
        memory: Bytes of memory.
        bandwidth: Bytes/s of its memory, by its data sheet.
        peak: FLOP/s by precision ("fp32", "tf32", "bf16", "fp8"), dense, by its data sheet.
        units: Number of parts that compute independently: multiprocessors, or cores.
        tile: Rows and columns of the largest tile of a product that one unit computes.
        product_share: Share of the peak that products reach in the middle of a tile.
        product_depth: Number of inputs that take as long as the beginning and end of a tile, in bf16.
        tile_bandwidth: Bytes/s at which one unit reads the operands of its tile; 0 if that bounds nothing.
        fp8_share: The share `product_share` in fp8; 0 if it is that of bf16.
        fp8_tile_bandwidth: The rate `tile_bandwidth` in fp8; 0 if that bounds nothing.
        sustained: Share of the rate of single products and attention that is left in long steps, in which
            power and heat lower the clock.
        bandwidth_share: Share of the bandwidth that passes over memory reach.
        stream_share: Share of the bandwidth that passes over more than caches hold reach, such as an
            optimizer's; 0 if it is `bandwidth_share`.
        stall: Share of the time of a product's bytes that no arithmetic hides: 1 on cores, which wait for
            what their caches do not have.
        attention_share: Share of the peak that fused attention reaches in forward, with heads of width 128.
        attention_backward_share: Share of the peak that it reaches in backward.
        attention_depth: Number of keys that take as long as the beginning and end of a tile of queries.
        exponentials: Exponentials that a unit computes each second, for attention; 0 if that bounds nothing.
        flash2_share: Share of these rates that FlashAttention 2 reaches, which torch called until 2025.
        launch: Seconds from one kernel's end to the next one's start, and until that one is under way.
        dispatch: Seconds that the host takes to start one operation; the device waits if it is quicker.
        graph: Seconds that the host takes to call a compiled graph, beside its kernels; 0 for as long as six
            operations.
        overlap: Share of tensor=async's communications that its products hide.
        contention: Share by which compute is slowed while a communication runs beside it at the innermost
            links' rate; a slower communication slows compute less, in proportion.
        host_bandwidth: Bytes/s to and from the host's memory; 0 if it has none of its own.
        source: Where these figures come from.
    """

    name: Annotated[str, Key("text", '"H100-SXM"')]
    memory: Annotated[float, Key("bytes", "85_899_345_920")]
    bandwidth: Annotated[float, Key("bytes/s", "3.35e12")]
    peak: Annotated[Mapping[str, float], Key("FLOP/s by precision", "{ bf16 = 989e12, fp32 = 67e12 }")]
    units: Annotated[int, Key("multiprocessors or cores", "132")]
    tile: Annotated[tuple[int, int], Key("rows and columns", "[256, 128]")] = (256, 128)
    product_share: Annotated[float, Key(SHARE, "0.8")] = 0.8
    product_depth: Annotated[float, Key("inputs", "64.0")] = 64.0
    tile_bandwidth: Annotated[float, Key("bytes/s of a unit", "1e11")] = 0.0
    fp8_share: Annotated[float, Key(SHARE, "0.7")] = 0.0
    fp8_tile_bandwidth: Annotated[float, Key("bytes/s of a unit", "1e11")] = 0.0
    sustained: Annotated[float, Key(SHARE, "0.9")] = 1.0
    bandwidth_share: Annotated[float, Key(SHARE, "0.85")] = 0.85
    stream_share: Annotated[float, Key(SHARE, "0.9")] = 0.0
    stall: Annotated[float, Key(SHARE, "0.0")] = 0.0
    attention_share: Annotated[float, Key(SHARE, "0.45")] = 0.45
    attention_backward_share: Annotated[float, Key(SHARE, "0.4")] = 0.4
    attention_depth: Annotated[float, Key("keys", "100.0")] = 0.0
    exponentials: Annotated[float, Key("exponentials/s of a unit", "3e10")] = 0.0
    flash2_share: Annotated[float, Key(SHARE, "0.6")] = 1.0
    launch: Annotated[float, Key("s", "2e-6")] = 2e-6
    dispatch: Annotated[float, Key("s", "40e-6")] = 8e-6
    graph: Annotated[float, Key("s", "200e-6")] = 0.0
    overlap: Annotated[float, Key(SHARE, "0.1")] = 0.0
    contention: Annotated[float, Key(SHARE, "0.2")] = 0.2
    host_bandwidth: Annotated[float, Key("bytes/s", "55e9")] = 0.0
    source: Annotated[str, Key("text", '"NVIDIA data sheet"')] = ""

    def __hash__(self) -> int:
        """Hash the fields, once: costs are looked up by device."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        others = (getattr(self, each.name) for each in fields(self) if each.name != "peak")
        return hash((*others, *self.peak.values()))

    def __post_init__(self) -> None:
        where = f"the device {self.name}"
        require_bytes(where, memory=self.memory, bandwidth=self.bandwidth)
        require_bytes(where, **{f"peak.{precision}": rate for precision, rate in self.peak.items()})
        require(self.units > 0, where, "units", self.units, "a positive number")
        for name in _SHARES:
            require_share(where, name, getattr(self, name))
        for name in ("stream_share", "fp8_share", "stall"):
            require(0 <= getattr(self, name) <= 1, where, name, getattr(self, name), "a share, 0 to 1")
        for name in _SECONDS:
            value = getattr(self, name)
            require(0 <= value < 1, where, name, value, "seconds: 0 or more, and far below 1, such as 2e-6")

    def flops(self, precision: str) -> float:
        """Return the peak in FLOP/s of products in a Plan's precision.

        A device without a rate in tf32 computes them in fp32, and one without fp8 in bf16.

        Raises:
            ClusterError: The rate is not known.
        """
        found = self.peak.get(precision, self.peak.get(_INSTEAD.get(precision, "")))
        if found is None:
            raise ClusterError(
                f"the peak of {self.name} in {precision} is not known",
                possible=f"precision={', '.join(self.peak)}",
                change="choose another precision, or describe the device's peak",
            )
        return found

    def product_rate(self, precision: str) -> float:
        """Return the FLOP/s of products in the middle of their tiles, in long steps.

        Raises:
            ClusterError: The peak is not known.
        """
        is_fp8 = precision == "fp8" and "fp8" in self.peak
        share = (self.fp8_share if is_fp8 else 0.0) or self.product_share
        return self.flops(precision) * share * self.sustained

    def tile_rate(self, precision: str) -> float:
        """Return the bytes/s at which a unit reads operands in a precision, in long steps; 0 if unbounded."""
        is_fp8 = precision == "fp8" and "fp8" in self.peak
        return (self.fp8_tile_bandwidth if is_fp8 else self.tile_bandwidth) * self.sustained

    @cached_property
    def alone(self) -> Device:
        """The device as single operations find it, whose clock nothing lowers."""
        return self if self.sustained == 1 else replace(self, sustained=1.0)

    @cached_property
    def with_flash2(self) -> Device:
        """The device with the attention of FlashAttention 2."""
        if self.flash2_share == 1:
            return self
        return replace(
            self,
            attention_share=self.attention_share * self.flash2_share,
            attention_backward_share=self.attention_backward_share * self.flash2_share,
            flash2_share=1.0,
        )

    def computes_instead(self, precision: str) -> str:
        """Return a sentence that says in which type products are computed instead; empty if in this one."""
        other = _INSTEAD.get(precision)
        if precision in self.peak or other not in self.peak:
            return ""
        return f"{self.name} has no known rate in {precision}: its products are predicted in {other}"

    def slowed(self, factor: float) -> Device:
        """Return a device that takes `factor` times as long for any work."""
        return replace(
            self,
            bandwidth=self.bandwidth / factor,
            peak={precision: rate / factor for precision, rate in self.peak.items()},
            tile_bandwidth=self.tile_bandwidth / factor,
            fp8_tile_bandwidth=self.fp8_tile_bandwidth / factor,
            exponentials=self.exponentials / factor,
            launch=self.launch * factor,
            dispatch=self.dispatch * factor,
            graph=self.graph * factor,
        )

    @classmethod
    def preset(cls, name: str) -> Device:
        """Return a known device by its name in the table, or in the form of drivers and published tables.

        Raises:
            ClusterError: No device has that name.
        """
        devices = table("devices")
        found = name if name in devices else matching("devices", name)
        if found is None:
            raise ClusterError(
                f"{name!r} is not a known device{nearest(name.lower(), devices)}",
                possible=", ".join(devices),
                change="use one of these names, or describe the device in a file",
            )
        described = {key: value for key, value in devices[found].items() if key != "match"}
        return cls(**fields_of(cls, described, f"the device {found}"))


def known_device(words: str) -> Device | None:
    """Return the device of the data files that a driver's name means; None if there is none."""
    found = matching("devices", words)
    return None if found is None else Device.preset(found)


def peak_flops(device: str, precision: str) -> float | None:
    """Return the dense peak of a device in FLOP/s; None if it is not known, as for CPUs.

    Args:
        device: The driver's name of the device, such as "NVIDIA H100 80GB HBM3".
        precision: A Plan's precision.
    """
    found = matching("devices", device)
    if found is None:
        return None
    peak: float | None = table("devices")[found]["peak"].get(precision)
    return peak


@dataclass(frozen=True, kw_only=True)
class Part:
    """Devices that are alike, in a Cluster whose devices are not. Ranks fill the parts in their order.

    Attributes:
        device: The device of this part; a file may leave it out where it is the Cluster's.
        devices: Number of devices of this part; a file may give its number of nodes as `nodes` instead.
        pace: Share of the usual rate at which these devices work: 0.9 for nodes that take 1/0.9 as long.
    """

    device: Annotated[Device, Key("table, or the name of a known device", '"a100-80"')]
    devices: Annotated[int, Key("devices; or write nodes = 4", "32")]
    pace: Annotated[float, Key("share of the usual rate", "0.9")] = 1.0

    def __post_init__(self) -> None:
        where = f"the part of {self.device.name}"
        require(self.devices >= 1, where, "devices", self.devices, "1 or more")
        require(
            0 < self.pace <= 1,
            where,
            "pace",
            self.pace,
            "a share of the usual rate, above 0 and at most 1, such as 0.9",
        )

    @property
    def title(self) -> str:
        """The name of the device, with its pace if that is not the usual one."""
        return self.device.name + ("" if self.pace == 1 else f" at {self.pace:g} of the usual rate")

    @property
    def at_pace(self) -> Device:
        """The device at the pace of this part."""
        return self.device if self.pace == 1 else self.device.slowed(1 / self.pace)

    def rate(self, precision: str) -> float:
        """Return the FLOP/s of products at this pace.

        Raises:
            ClusterError: The device's peak in this precision is not known.
        """
        return self.pace * self.device.flops(precision)


def first_devices(parts: Sequence[Part], devices: int) -> tuple[Part, ...]:
    """Return the parts of the first devices; the last one may be a part of a part."""
    found, left = list[Part](), devices
    for part in parts:
        if left > 0:
            found.append(replace(part, devices=min(left, part.devices)))
        left -= part.devices
    return tuple(found)


def slowest_device(parts: Sequence[Part], ranks: range, precision: str) -> Device:
    """Return the device that ranks wait for: the slowest one, at its pace, with the least memory of all.

    Args:
        parts: All parts, in order.
        ranks: Ranks, of which there is at least one, all of them in the parts.
        precision: Precision in which the devices' peaks are compared.

    Raises:
        ClusterError: A device's peak in this precision is not known.
    """
    used, begin = list[Part](), 0
    for part in parts:
        if any(begin <= rank < begin + part.devices for rank in (ranks[0], ranks[-1])) or (
            ranks[0] < begin and begin + part.devices <= ranks[-1]
        ):
            used.append(part)
        begin += part.devices
    slowest = min(used, key=lambda part: part.rate(precision))
    return replace(slowest.at_pace, memory=min(part.device.memory for part in used))


def device_described(described: str | Mapping[str, Any], where: str) -> Device:
    """Return the device that a file names, as in the tables of known ones, or describes.

    Args:
        described: The name, or a table of the device's fields.
        where: The object that the text describes, for messages.

    Raises:
        ClusterError: The name is not known, or a field is wrong.
    """
    return (
        Device.preset(described)
        if isinstance(described, str)
        else Device(**fields_of(Device, described, where))
    )


def part_described(described: Mapping[str, Any], usual: Device, node: int, where: str) -> Part:
    """Return the part that a table of a file describes.

    Args:
        described: The fields of the part; it may have `nodes` instead of `devices`.
        usual: Device of the part, if the table has none.
        node: Number of devices in a node.
        where: The object that the table describes, for messages.

    Raises:
        ClusterError: A field is wrong.
    """
    said = dict(described)
    if "nodes" in said and "devices" not in said:
        nodes = said.pop("nodes")
        require(type(nodes) is int and nodes >= 1, where, "nodes", nodes, "a whole number, 1 or more")
        said["devices"] = nodes * node
    values = fields_of(Part, {"device": usual.name} | said, where)
    if "device" in said:
        device = device_described(said["device"], f"the device of {where}")
    else:
        device = usual
    return Part(**values | {"device": device})
