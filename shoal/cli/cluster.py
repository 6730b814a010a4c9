"""Describes machines for the commands that predict. Start from the preset that is nearest, and edit it:

  shoal cluster ls
  shoal cluster export dgx-h100:64 --out mine.toml
  shoal cluster check mine.toml
  shoal plan --cluster mine.toml ...

Exit codes: 0; 2 wrong input, such as a file that contradicts itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from shoal.cli.files import write_new
from shoal.cli.table import as_json
from shoal.errors import ClusterError

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
    from shoal.cli.cluster_text import list_rows, list_text

    rows = list_rows()
    print(as_json(rows) if args.json else list_text(rows))
    return 0


def _show(args: argparse.Namespace) -> int:
    from shoal.cli.cluster_text import show_text
    from shoal.cluster import Cluster
    from shoal.cluster.derived import derived

    cluster = Cluster.parse(args.cluster)
    if args.json:
        print(as_json({"cluster": asdict(cluster), "derived": asdict(derived(cluster))}))
    else:
        print(show_text(cluster))
    return 0


def _check(args: argparse.Namespace) -> int:
    from shoal.cli.cluster_text import derived_text
    from shoal.cluster import Cluster
    from shoal.cluster.derived import derived
    from shoal.cluster.plausible import implausible

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
    from shoal.cluster import Cluster
    from shoal.cluster.description import commented_toml

    _put(args, commented_toml(Cluster.parse(args.cluster)))
    return 0


def _import(args: argparse.Namespace) -> int:
    from shoal.cluster.description import commented_toml
    from shoal.cluster.plausible import implausible
    from shoal.cluster.topology import cluster_of
    from shoal.cluster.topology_files import read_topology

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
