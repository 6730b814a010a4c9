"""Units and examples of the keys in a Cluster's file, for messages, comments and the reference page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["KEYS", "Key", "key_of"]


class Key(NamedTuple):
    """How a value is written.

    Attributes:
        unit: Unit of the value, or what kind of thing it is.
        example: A value in TOML.
    """

    unit: str
    example: str


_SHARE = "share, 0 to 1"
_DOLLARS = "dollars for a device and hour"
_PER_HOUR = "for a device and hour"
_SOURCE = Key("text", '"NVIDIA data sheet"')

KEYS: Mapping[str, Mapping[str, Key]] = {
    "Cluster": {
        "name": Key("text", '"rack-7"'),
        "device": Key("table, or the name of a known device", '"h100"'),
        "levels": Key("tables", "[[levels]]"),
        "parts": Key("tables", "[[parts]]"),
        "failed": Key("nodes", "1"),
        "spare": Key("nodes", "2"),
        "price": Key(_DOLLARS, "2.99"),
        "prices": Key("table", "[prices]"),
        "power": Key("table", "[power]"),
        "failures": Key(_PER_HOUR, "2e-5"),
        "jitter": Key("share of a step", "0.02"),
        "noise": Key("s in one second of work", "0.005"),
        "reserved": Key("bytes", "1.5e9"),
        "cores": Key("cores", "0"),
        "host": Key("table", "[host]"),
        "calibrated": Key("table", "[calibrated]"),
        "source": Key("text", '"the invoice, and shoal probe on 2026-01-31"'),
    },
    "Device": {
        "name": Key("text", '"H100-SXM"'),
        "memory": Key("bytes", "85_899_345_920"),
        "bandwidth": Key("bytes/s", "3.35e12"),
        "peak": Key("FLOP/s by precision", "{ bf16 = 989e12, fp32 = 67e12 }"),
        "units": Key("multiprocessors or cores", "132"),
        "tile": Key("rows and columns", "[256, 128]"),
        "product_share": Key(_SHARE, "0.8"),
        "product_depth": Key("inputs", "64.0"),
        "tile_bandwidth": Key("bytes/s of a unit", "1e11"),
        "fp8_share": Key(_SHARE, "0.7"),
        "fp8_tile_bandwidth": Key("bytes/s of a unit", "1e11"),
        "sustained": Key(_SHARE, "0.9"),
        "bandwidth_share": Key(_SHARE, "0.85"),
        "stream_share": Key(_SHARE, "0.9"),
        "stall": Key(_SHARE, "0.0"),
        "attention_share": Key(_SHARE, "0.45"),
        "attention_backward_share": Key(_SHARE, "0.4"),
        "attention_depth": Key("keys", "100.0"),
        "exponentials": Key("exponentials/s of a unit", "3e10"),
        "flash2_share": Key(_SHARE, "0.6"),
        "launch": Key("s", "2e-6"),
        "dispatch": Key("s", "40e-6"),
        "graph": Key("s", "200e-6"),
        "overlap": Key(_SHARE, "0.1"),
        "contention": Key(_SHARE, "0.2"),
        "host_bandwidth": Key("bytes/s", "55e9"),
        "source": _SOURCE,
    },
    "Level": {
        "name": Key("text", '"nvlink"'),
        "devices": Key("devices", "8"),
        "bandwidth": Key("bytes/s of a device, in one direction; 400 Gbit/s are 50e9", "50e9"),
        "share": Key(_SHARE, "0.9"),
        "exchange_share": Key(_SHARE, "0.8"),
        "setup": Key("s", "20e-6"),
        "latency": Key("s", "14e-6"),
        "slices": Key("parts of a step's bytes", "2"),
        "packet_latency": Key("s", "2e-6"),
        "packet_share": Key(_SHARE, "0.25"),
        "packet_limit": Key("bytes", "1e6"),
        "half_size": Key("bytes", "2.5e6"),
        "copy_rate": Key("bytes/s", "1e12"),
        "peers": Key("messages at once", "8"),
        "oversubscription": Key("times, 1 or more", "2.0"),
        "mesh": Key("true or false", "false"),
        "chain": Key("true or false", "false"),
        "rails": Key("true or false", "true"),
        "reduces": Key("true or false", "true"),
        "reduction_start": Key("s", "4e-6"),
        "reduction_share": Key(_SHARE, "0.7"),
        "source": Key("text", '"the switches\' data sheet"'),
    },
    "Host": {
        "name": Key("text", '"2 x EPYC 7742"'),
        "devices": Key("devices", "8"),
        "memory": Key("bytes", "2_199_023_255_552"),
        "bandwidth": Key("bytes/s", "614.4e9"),
        "share": Key(_SHARE, "0.75"),
        "file_bandwidth": Key("bytes/s", "40e9"),
        "source": _SOURCE,
    },
    "Calibrated": {
        "by": Key("probe, runs, or empty", '"probe"'),
        "devices": Key("devices", "8"),
        "error": Key("share", "0.03"),
    },
    "Part": {
        "device": Key("table, or the name of a known device", '"a100-80"'),
        "devices": Key("devices; or write nodes = 4", "32"),
        "pace": Key("share of the usual rate", "0.9"),
    },
    "Prices": {
        "reserved": Key(_DOLLARS, "1.99"),
        "spot": Key(_DOLLARS, "0.92"),
        "interruptions": Key(_PER_HOUR, "3.4e-5"),
        "source": Key("text", '"the cloud\'s price list, January 2026"'),
    },
    "Power": {
        "device": Key("W", "700.0"),
        "overhead": Key("W for each device", "575.0"),
        "pue": Key("W of the building for one of its nodes", "1.3"),
        "source": Key("text", '"the meter of the rack"'),
    },
}
"""Key by class and field. A test holds it to the fields of the classes."""


def key_of(kind: str, name: str) -> Key | None:
    """Return how a field of a class is written; None if that is not known.

    Args:
        kind: Name of the class, such as "Level".
        name: Name of the field.
    """
    return KEYS.get(kind, {}).get(name)
