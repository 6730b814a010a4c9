"""Describes machines for the commands that predict. Start from the preset that is nearest, and edit it:

  shoal cluster ls
  shoal cluster export dgx-h100:64 --out mine.toml
  shoal cluster check mine.toml
  shoal plan --cluster mine.toml ...

Exit codes: 0; 2 wrong input, such as a file that contradicts itself.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from shoal.cli.table import as_json, labelled, paragraph, table_of, write_new
from shoal.errors import ClusterError
from shoal.spec.cluster import PRESETS, Cluster, Device, Level
from shoal.spec.cluster.money import derived
from shoal.spec.cluster.tables import keys_of
from shoal.units import format_bytes, format_seconds

_GIGABIT = 1e9 / 8
_IMPORT = """\
Describes a node from its topology, as NCCL (or RCCL) writes it to NCCL_TOPO_DUMP_FILE, or as
`nvidia-smi topo -m` prints it. Says what it took for granted. Ask for more nodes with --devices.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, text: str, action: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = actions.add_parser(
            name, help=text.partition(".")[0], description=text
        )
        added.set_defaults(run=action)
        return added

    add("ls", "Lists the presets: a node of each.", _list).add_argument(
        "--json", action="store_true", help="print a JSON array"
    )
    show = add("show", "Shows every figure of a Cluster with its unit and source.", _show)
    show.add_argument("cluster", metavar="CLUSTER", help="a preset, such as dgx-h100:64, or a .toml file")
    show.add_argument("--json", action="store_true", help="print one JSON object")
    export = add("export", "Writes a Cluster as TOML, to be edited.", _export)
    export.add_argument("cluster", metavar="CLUSTER", help="a preset, such as dgx-h100:64, or a .toml file")
    _add_out(export)
    check = add("check", "Checks a file: what is wrong, what looks wrong, and what follows from it.", _check)
    check.add_argument("file", metavar="FILE", type=Path, help="a .toml file that describes machines")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    imported = add("import", _IMPORT, _import)
    imported.add_argument(
        "--topology",
        metavar="FILE",
        type=Path,
        required=True,
        help="NCCL_TOPO_DUMP_FILE's XML, or the output of nvidia-smi topo -m",
    )
    imported.add_argument(
        "--device", metavar="NAME", help="the device, such as h100 (default: the one that the file names)"
    )
    imported.add_argument(
        "--nic-gbits", metavar="N", type=float, help="Gbit/s of one network interface, if the file has none"
    )
    imported.add_argument("--devices", metavar="N", type=int, help="devices in all (default: one node's)")
    imported.add_argument("--name", metavar="NAME", help="name of the machines (default: the file's)")
    _add_out(imported)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", type=Path, help="file to write (default: print it)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it is there")


def _list(args: argparse.Namespace) -> int:
    from shoal.cli.cluster import list_rows, list_text

    rows = list_rows()
    print(as_json(rows) if args.json else list_text(rows))
    return 0


def _show(args: argparse.Namespace) -> int:
    from shoal.cli.cluster import show_text
    from shoal.spec.cluster import Cluster
    from shoal.spec.cluster.money import derived

    cluster = Cluster.parse(args.cluster)
    if args.json:
        print(as_json({"cluster": asdict(cluster), "derived": asdict(derived(cluster))}))
    else:
        print(show_text(cluster))
    return 0


def _check(args: argparse.Namespace) -> int:
    from shoal.cli.cluster import derived_text
    from shoal.spec.cluster import Cluster
    from shoal.spec.cluster.money import derived
    from shoal.spec.cluster.plausible import implausible

    cluster = Cluster.read(args.file)
    warnings = implausible(cluster)
    if args.json:
        summary = {"cluster": asdict(cluster), "derived": asdict(derived(cluster)), "warnings": warnings}
        print(as_json(summary))
    else:
        verdict = f"{len(warnings)} warnings" if len(warnings) > 1 else "1 warning" if warnings else "sound"
        print(f"{args.file}: {cluster.name}, {verdict}\n\n{derived_text(cluster)}")
    _warn(warnings)
    return 0


def _export(args: argparse.Namespace) -> int:
    from shoal.spec.cluster import Cluster
    from shoal.spec.cluster.device import commented_toml

    _put(args, commented_toml(Cluster.parse(args.cluster)))
    return 0


def _import(args: argparse.Namespace) -> int:
    from shoal.spec.cluster.device import commented_toml
    from shoal.spec.cluster.plausible import implausible
    from shoal.spec.cluster.topology import cluster_of, read_topology

    if args.nic_gbits is not None and not 0 < args.nic_gbits < 1e5:
        raise ClusterError(
            f"--nic-gbits {args.nic_gbits:g} is out of range",
            possible="Gbit/s of one interface, above 0, such as 400",
            change="correct --nic-gbits",
        )
    cluster, notes = cluster_of(
        read_topology(args.topology, args.device),
        name=args.name or args.topology.stem,
        device=args.device,
        interface_rate=None if args.nic_gbits is None else args.nic_gbits * _GIGABIT,
    )
    if args.devices is not None:
        cluster = cluster.with_devices(args.devices)
    _put(args, commented_toml(cluster))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    _warn(implausible(cluster))
    return 0


def _put(args: argparse.Namespace, text: str) -> None:
    if args.out is None:
        print(text, end="")
    else:
        write_new("description", args.out, text, overwrite=args.overwrite)


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


_THOUSANDS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_UNKNOWN = {"price", "reserved", "spot", "interruptions", "failures", "overhead", "file_bandwidth"}
"""Fields of which 0 means that they are not known."""

_TABLES = ("prices", "power", "host", "calibrated")
"""Fields with a section of their own, under their names."""


def list_rows() -> list[dict[str, Any]]:
    """Return the presets' figures, one object each."""
    rows = []
    for name in PRESETS:
        cluster = Cluster.preset(name)
        rows.append(
            {
                "name": name,
                "devices": cluster.devices_per_node,
                "device": cluster.device.name,
                "memory": cluster.device.memory,
                "links": [
                    {
                        "name": level.name,
                        "devices": level.devices,
                        "bandwidth": level.bandwidth,
                        "oversubscription": level.oversubscription,
                    }
                    for level in cluster.levels
                ],
                "price": cluster.price or None,
            }
        )
    return rows


def list_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the presets."""
    head = ["preset", "devices", "device", "memory", "in a node", "between nodes", "$/device/h"]
    lines = []
    for row in rows:
        inside, *outside = row["links"]
        lines.append(
            [
                row["name"],
                str(row["devices"]),
                row["device"],
                format_bytes(round(row["memory"])),
                f"{inside['name']} {_scaled(inside['bandwidth'], 'B/s')}",
                _outside_text(outside) if outside else "-",
                f"{row['price']:.2f}" if row["price"] else "-",
            ]
        )
    told = "Rates are those of one device, in one direction. Ask for devices as in dgx-h100:64."
    return f"{table_of(head, lines)}\n\n{told}"


def _outside_text(links: Sequence[Mapping[str, Any]]) -> str:
    """Return the Gbit/s of one device, level by level."""
    rates = (link["bandwidth"] / link["oversubscription"] / _GIGABIT for link in links)
    return ", ".join(f"{rate:.4g}" for rate in rates) + " Gbit/s"


def show_text(cluster: Cluster) -> str:
    """Return every figure of a Cluster, section by section, with what follows from them."""
    sections = [
        derived_text(cluster),
        _section("cluster", cluster, ("name", "device", "levels", "parts", *_TABLES)),
        _device_section("device", cluster.device),
        *(
            _section(f"level {number}: {level.name}", level, ("name",))
            for number, level in enumerate(cluster.levels, 1)
        ),
    ]
    for number, part in enumerate(cluster.parts, 1):
        told = _section(f"part {number}: {part.device.name}", part, ("device",))
        sections.append(told)
        if part.device != cluster.device:
            sections.append(_device_section(f"device of part {number}", part.device))
    sections += [_section(name, getattr(cluster, name), ("name",)) for name in _TABLES]
    return "\n\n".join(sections)


def derived_text(cluster: Cluster) -> str:
    """Return what follows from a Cluster's figures."""
    found = derived(cluster)
    beside = ", ".join(
        f"{count} {name}" for name, count in (("failed", cluster.failed), ("spare", cluster.spare)) if count
    )
    rows = [
        ("devices", f"{found.devices:,}: {found.nodes:,} x {cluster.devices_per_node} in a node"),
        ("nodes beside", beside),
        *(
            (f"part {number}", f"{part.devices:,} x {part.device.name}" + _pace_text(part.pace))
            for number, part in enumerate(cluster.parts, 1)
        ),
        ("memory", f"{format_bytes(round(found.memory))} of a device for programs"),
        ("memory of all", format_bytes(round(found.memory_of_all))),
        *((f"peak {name}", f"{_scaled(rate, 'FLOP/s')} together") for name, rate in found.peak.items()),
    ]
    if found.network is not None and found.network_reached is not None:
        rows.append(
            (
                "network of a node",
                f"{found.network / _GIGABIT:,.4g} Gbit/s, {_scaled(found.network, 'B/s')}; collectives reach "
                f"{_scaled(found.network_reached, 'B/s')}",
            )
        )
    if found.between_failures is not None:
        rows.append(("a failure every", format_seconds(found.between_failures)))
    rows.append(("dollars an hour", _unknown(found.dollars, lambda value: f"${value:,.2f} on demand")))
    watts = None if found.kilowatts is None else 1e3 * found.kilowatts
    rows.append(("power", _unknown(watts, lambda value: f"{_scaled(value, 'W')} with nodes and building")))
    return labelled([row for row in rows if row[1]])


def _pace_text(pace: float) -> str:
    return "" if pace == 1 else f", at {pace:g} of the usual rate"


def _unknown(value: float | None, text: Any) -> str:
    return "not known" if value is None else str(text(value))


def _device_section(title: str, device: Device) -> str:
    peaks = [(f"peak {name}", _scaled(rate, "FLOP/s")) for name, rate in device.peak.items()]
    return _section(title, device, ("peak",), peaks)


def _section(
    title: str, described: object, without: Sequence[str], more: Sequence[tuple[str, str]] = ()
) -> str:
    """Return a heading, the fields with their units, and the source."""
    kind = type(described)
    rows = [
        (each.name, _value_text(kind, each.name, getattr(described, each.name)))
        for each in fields(kind)  # type: ignore[arg-type]
        if each.name not in (*without, "source")
    ]
    source = getattr(described, "source", None)
    name = getattr(described, "name", "")
    heading = f"{title}: {name}" if name and name not in title else title
    told = "" if source is None else "\n" + paragraph(f"  source: {source or 'not told'}", indent="    ")
    return f"{heading}\n{labelled([*rows, *more], indent='  ')}{told}"


def _value_text(kind: type, name: str, value: Any) -> str:
    """Return a field's value with its unit."""
    unit = keys_of(kind)[name].unit
    if value == 0 and name in _UNKNOWN and (kind, name) != (Cluster, "reserved"):
        return "not known"
    if value == "":
        return "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit.startswith("bytes/s"):
        gigabits = f" ({value / _GIGABIT:g} Gbit/s)" if kind is Level else ""
        return _scaled(value, "B/s") + gigabits
    if unit == "bytes":
        return format_bytes(round(value))
    if unit == "s":
        return format_seconds(value) if value else "0 s"
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    if unit.startswith("share"):
        return f"{value:.4g}"
    return (
        f"{value:,.12g} {re.split('[,;]', unit)[0]}".strip() if isinstance(value, int | float) else str(value)
    )


def _scaled(value: float, unit: str) -> str:
    """Return a rate with a decimal prefix: 450 GB/s."""
    for scale, prefix in _THOUSANDS:
        if value >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:g} {unit}"
