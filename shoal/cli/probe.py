"""Measures this machine: matrix products by shape and type, passes over memory, attention, small operators,
and each collective by size, within a host and between hosts, with all ranks busy. Fits a description of
the machine, reports errors of the fit and suspicious figures, and writes the description to a file for
--cluster. A fit that errs by more than a quarter is not used: a known GPU keeps its preset's figures, with
a warning.

Starts one rank on this machine for each GPU, or for each core. Under torchrun or srun, it runs as one of the
ranks they started; measure on three hosts or more to describe a fabric.

Exit codes: 0 measured; 1 a rank failed; 2 wrong input; 130 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.local import nursery_for
from shoal.cli.table import as_json, table_of
from shoal.errors import ConfigError, UserError, WorkerError, nearest
from shoal.spec.cluster import Cluster

if TYPE_CHECKING:
    from shoal.launch.local import Nursery
    from shoal.machine.bench.settings import Ranks
    from shoal.machine.probe import Probed

_STOPPED = 130
_BACKENDS = ("shoal", "gloo", "nccl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("cluster.toml"),
        help="file for the description (default cluster.toml)",
    )
    parser.add_argument(
        "--name", metavar="NAME", default="", help="name of the machine (default: the file's)"
    )
    parser.add_argument(
        "--links",
        metavar="CLUSTER",
        help="take the links that are not measured from this preset, such as dgx-h100, or .toml file",
    )
    parser.add_argument(
        "--from",
        dest="measurements",
        metavar="FILE",
        type=Path,
        help="measure nothing: fit the measurements that --json printed to this file",
    )
    parser.add_argument(
        "--files",
        metavar="DIR",
        type=Path,
        help="also measure the file system of this folder, for Plans with `offload`",
    )
    parser.add_argument("--ranks", metavar="N", type=int, help="local ranks to start")
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help=f"{', '.join(_BACKENDS)} (default: what `shoal train` uses here)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure fewer rounds and sizes, with larger errors"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every measurement")


def run(args: argparse.Namespace) -> int:
    """Measure, as one of the ranks that a launcher started or on local ranks that this starts.

    Raises:
        UserError: Something given cannot work; nothing was started.
        WorkerError: A rank failed.
    """
    # Imported here because they bring torch, which `--help` should not wait for.
    from shoal.launch.local import find_world, run_rank
    from shoal.machine.bench.settings import Ranks

    if args.links:
        Cluster.parse(args.links)  # raises
    if args.measurements is not None:
        return _fit_again(args)
    world = find_world()
    if world is None:
        with nursery_for(args, "shoal.machine.probe") as nursery:
            return _on_this_machine(args, nursery)
    backend = _backend(args.backend)
    _require_writable(args.out)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = world.master[0], str(world.master[1])
    ranks = Ranks(world.rank, world.ranks, world.local_rank)
    return run_rank(world.rank, lambda _: _measure(args, backend, ranks))


def _on_this_machine(args: argparse.Namespace, nursery: Nursery | None) -> int:
    from shoal.launch.local import launch

    backend = _backend(args.backend)
    _require_writable(args.out)
    words = ["probe", f"--out={args.out}", f"--name={args.name}", f"--backend={backend}"]
    words += [f"--links={args.links}"] if args.links else []
    words += [f"--files={args.files}"] if args.files else []
    words += [f"--{flag}" for flag in ("quick", "json") if getattr(args, flag)]
    try:
        command = [sys.executable, "-m", "shoal", *words]
        return launch(command, _local_ranks(args.ranks, backend), nursery=nursery)
    except WorkerError as error:
        if error.exit_code == _STOPPED:  # there was nothing to save
            return _STOPPED
        raise


def _backend(asked: str | None) -> str:
    """Return the backend to measure, after a check that it can be measured."""
    import torch

    from shoal.collectives import is_built
    from shoal.machine.bench.contestants import require_available

    if asked is None:
        return "nccl" if torch.cuda.is_available() else "shoal" if is_built() else "gloo"
    if asked not in _BACKENDS:
        raise ConfigError(
            f"--backend {asked} does not exist{nearest(asked, _BACKENDS)}",
            possible=", ".join(_BACKENDS),
            change="give one of these to --backend",
        )
    require_available(asked)
    return asked


def _local_ranks(asked: int | None, backend: str) -> int:
    import torch

    if asked is None:
        return torch.cuda.device_count() if backend == "nccl" else len(os.sched_getaffinity(0))
    if asked < 1:
        raise ConfigError(
            f"--ranks {asked} is too small", possible="1 or more", change="give a larger --ranks"
        )
    return asked


def _require_writable(path: Path) -> None:
    """Raise an error, before anything is measured, if the file cannot be written."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(
            f"the description cannot be written to {path}",
            possible="a file in a directory that can be written to",
            change="give another FILE to --out",
        )


def _measure(args: argparse.Namespace, backend: str, ranks: Ranks) -> int:
    from shoal.machine.bench.measure import stdout_for_data
    from shoal.machine.bench.settings import joined
    from shoal.machine.probe import QUICK, THOROUGH, Place, measure_files, probe

    def say(text: str) -> None:
        if ranks.rank == 0:
            print(f"measuring {text}", file=sys.stderr)

    effort, files = QUICK if args.quick else THOROUGH, 0.0
    if args.files is not None and ranks.rank == 0:
        say("files")
        files = measure_files(args.files, effort)  # while the other ranks wait
    with stdout_for_data(), joined(ranks):
        place = Place.find(ranks, backend)
        probed = probe(place, args.name or args.out.stem, effort, say)
        if ranks.rank == 0:
            _tell(args, probed, files)
    return 0


def _fit_again(args: argparse.Namespace) -> int:
    """Fit a description to old measurements."""
    from shoal.machine.probe import fitted, read_measurements

    _require_writable(args.out)
    measured, sheet = read_measurements(args.measurements)
    _tell(args, fitted(measured, sheet, args.name or args.out.stem), 0.0)
    return 0


def _tell(args: argparse.Namespace, probed: Probed, files: float) -> None:
    """Write the description, and print it with its errors; `files` are bytes/s, 0 if not measured."""
    cluster = probed.cluster
    if files:
        devices = probed.sheet.devices_per_host
        host = replace(cluster.host, devices=devices, file_bandwidth=files, source=probed.sheet.source)
        cluster = cluster.replace(host=host)
    if args.links:
        cluster = cluster.with_links_of(Cluster.parse(args.links))
    cluster.write(args.out)
    print(as_json(_summary(probed, cluster)) if args.json else _text(probed, cluster))
    for suspicion in probed.suspicions:
        print(f"warning: {suspicion}", file=sys.stderr)
    print(f"description written to {args.out}", file=sys.stderr)


def _summary(probed: Probed, cluster: Cluster) -> dict[str, object]:
    return {
        "cluster": asdict(cluster),
        "sheet": asdict(probed.sheet),
        "errors": [asdict(each) for each in probed.errors],
        "warnings": list(probed.suspicions),
        "measurements": asdict(probed.measurements),
    }


def _text(probed: Probed, cluster: Cluster) -> str:
    device, measured = cluster.device, probed.measurements
    facts = [
        *(
            (f"products, {name}", _flops(device.flops(name) * device.product_share))
            for name in dict.fromkeys(each.precision for each in measured.products)
        ),
        ("half that rate at", f"an inner dimension of {device.product_depth:.3g}"),
        ("passes over memory", f"{device.bandwidth * device.bandwidth_share / 1e9:.3g} GB/s"),
        ("streams", f"{device.bandwidth * device.stream_share / 1e9:.3g} GB/s"),
        *(
            [("passes within a cache", f"{max(warm) / 1e9:.3g} GB/s")]
            if (warm := [each.rate for each in measured.passes if each.is_warm])
            else []
        ),
        ("attention", f"{device.attention_share:.1%} of the peak forward"),
        ("", f"{device.attention_backward_share:.1%} backward"),
        ("an operator's start", f"{device.launch * 1e6:.3g} us, {device.dispatch * 1e6:.3g} us on the host"),
        *([("a compiled graph's call", f"{device.graph * 1e6:.3g} us on the host")] if device.graph else []),
        ("compute beside links", f"slowed by {device.contention:.0%} of their time"),
    ]
    if cluster.devices > 1:
        facts.append(
            ("ranks vary", f"by {cluster.jitter:.1%}, and by {1e3 * cluster.noise:.2g} ms in a second")
        )
    if cluster.host.file_bandwidth:
        facts.append(("files", f"{cluster.host.file_bandwidth / 1e9:.3g} GB/s, written and read by turns"))
    for level in cluster.levels:
        if level.devices > 1:
            facts.append(
                (
                    f"{level.name}, {level.devices} devices",
                    f"{level.bandwidth * level.share / 1e9:.3g} GB/s, {level.latency * 1e6:.3g} us a step",
                )
            )
    width = max(len(name) for name, _ in facts)
    rows = [
        [each.quantity, str(each.measured), f"{each.median:.1%}", f"{each.worst:.1%}"]
        for each in probed.errors
    ]
    return "\n\n".join(
        [
            f"{device.name}, {cluster.devices} {'device' if cluster.devices == 1 else 'devices'}",
            "\n".join(f"{name:<{width}}  {value}" for name, value in facts),
            table_of(["error of the fit", "measured", "median", "worst"], rows),
        ]
    )


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
