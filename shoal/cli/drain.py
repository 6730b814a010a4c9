"""Asks a rank, or all ranks of a host, to leave a run that goes on. They finish their step with the others,
all save their state in memory, and the others go on without them. The run was started with --nproc
MIN:MAX, or with --nodes; at least MIN must stay.

Exit codes: 0 they have left; 1 they failed before they could; 2 wrong input, or the run does not answer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.errors import RunError
from shoal.spec.run import Run
from shoal.spec.run.writer import is_written

_ANSWER = 30.0  # seconds for the launcher to answer
_LOOK = 0.1  # seconds between looks for the answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("path", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("what", metavar="RANK|HOST", help="a rank's number, or a host's address or name")


def run(args: argparse.Namespace) -> int:
    """Ask, and wait until the ranks have left.

    Raises:
        RunError: The run does not go on, cannot lose ranks, or must keep these.
    """
    from shoal.launch.elastic import ask_to_leave

    found = Run.open(args.path)
    if is_written(found.checkpoints) is False:
        raise RunError(
            f"{args.path} does not go on", possible="a run that trains now", change="give such a run"
        )
    began = time.time()
    number = ask_to_leave(args.path, args.what)
    answer = next((told for told in _events(found, _ANSWER) if told.get("request") == number), None)
    if answer is None:
        raise RunError(
            f"the launcher of {args.path} did not answer within {_ANSWER:g} s",
            possible="a run that was started with --nproc MIN:MAX, or with --nodes",
            change="start the run so, or send SIGTERM to its launcher to save and end all of it",
        )
    if not answer["members"]:
        raise RunError(
            f"{args.what} was asked to leave {args.path}: {answer.get('reason', '')}",
            possible=f"the ranks {', '.join(map(str, answer['present']))}, or a host that has some of them",
            change="name one of these",
        )
    waits = set(answer["members"])
    lost: set[int] = set()
    for told in _events(found, float("inf")):
        if told["time"] >= began and told["event"] in ("left", "lost"):
            lost |= waits.intersection(told["members"]) if told["event"] == "lost" else set()
            waits -= set(told["members"])
        if not waits:
            break
    ranks = ", ".join(map(str, answer["members"]))
    print(f"{args.what} (rank {ranks}) has {'left' if not lost else 'ended, and did not leave'}")
    return int(bool(lost))


def _events(found: Run, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a run's members, as they come, until so many seconds have passed."""
    until, read = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        try:
            lines = found.members_file.read_text(encoding="utf-8").split("\n")[:-1]
        except OSError:
            lines = []
        for line in lines[read:]:
            yield json.loads(line)
        read = len(lines)
        time.sleep(_LOOK)
