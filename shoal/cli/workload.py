"""The model and the batch that commands which predict are asked about."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ModelError

if TYPE_CHECKING:
    from shoal.spec.cluster import Cluster
    from shoal.spec.workload import Workload

MFU = (
    "MFU counts three times the FLOP of the forward's matrix products, with attention over the whole square "
    "of positions; it does not count recomputation."
)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the model and the machines."""
    parser.add_argument(
        "--model", metavar="MODEL", required=True, help="a preset, or a .json file of a traced model"
    )
    parser.add_argument(
        "--cluster", metavar="CLUSTER", required=True, help="a preset, such as dgx-h100:64, or a .toml file"
    )
    parser.add_argument(
        "--sequence", metavar="N", type=int, help="tokens in a sequence (default: the preset's)"
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        default="",
        help="memory of a device that training may take, such as 20GiB (default: all that it has)",
    )


def add_margin(parser: argparse.ArgumentParser) -> None:
    """Add the option for the memory that stays free."""
    parser.add_argument(
        "--margin",
        metavar="SHARE",
        type=float,
        default=0.1,
        help="share of a device's memory to leave free (default 0.1)",
    )


def open_workload(name: str, sequence: int | None, cluster: Cluster) -> Workload:
    """Return the work of a preset on sequences of a length, on a Cluster, or of a traced model.

    Raises:
        ModelError: There is no such preset or file, or the file's sequences have another length.
    """
    from shoal.predict.cost.time import workload_on
    from shoal.spec.workload import from_json, shape

    if not name.endswith(".json"):
        found = shape(name)
        return workload_on(cluster, found if sequence is None else found.replace(seq=sequence))
    if sequence is not None:
        raise ModelError(
            f"--sequence {sequence} was given for {name}, which was traced with sequences of one length",
            possible="--sequence with a preset",
            change="leave out --sequence, or trace the model with such samples",
        )
    try:
        return from_json(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{name} cannot be read: {error.strerror}",
            possible="a .json file of a traced model",
            change="correct the path",
        ) from error
