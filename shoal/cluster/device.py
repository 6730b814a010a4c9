"""The Device: one accelerator or core, its limits, and the rates that programs reach on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated

from shoal.cluster.checks import require, require_bytes, require_share
from shoal.cluster.description import fields_of
from shoal.cluster.keys import SHARE, Key
from shoal.cluster.tables import matching, table
from shoal.errors import ClusterError, nearest

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
