"""Says why a collective did not complete: which ranks did not come to it, or called something else, and what
they did instead. PATH is a run, whose log/hang/ has the states of all ranks; or a folder of dumps of torch's
flight recorder, as pickles or JSON, which NCCL's watchdog writes (TORCH_NCCL_DEBUG_INFO_TEMP_FILE). Pickles
are read as plain data: a dump that names code is refused.

Exit codes: 0 a cause was found; 1 none was; 2 wrong input.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from shoal.analyze.hang import Cause, RankState, is_dump_folder, judge, read_dumps, read_states
from shoal.cli.table import as_json, paragraph
from shoal.errors import RunError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("path", metavar="PATH", type=Path, help="a run, or a folder of dumps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the verdict.

    Raises:
        RunError: The path has neither states nor dumps, or a dump cannot be read.
    """
    folder, states = _states(args.path)
    verdict = judge(states)
    if args.json:
        print(as_json(asdict(verdict)))
    else:
        print(paragraph(verdict.text))
        print("\n".join(f"  {line}" for line in verdict.lines))
        if any(folder.glob("rank-*.txt")):
            print(f"stacks of the ranks: {folder}/rank-*.txt")
    return int(verdict.cause is Cause.NONE)


def _states(path: Path) -> tuple[Path, list[RankState]]:
    """Return the folder that has the states, and the states."""
    for folder in (path / "log" / "hang", path):
        if states := read_states(folder):
            return folder, states
        if folder.is_dir() and is_dump_folder(folder):
            return folder, read_dumps(folder)
    raise RunError(
        f"{path} has no record of a hang",
        possible="a run whose log/hang/ was written, or a folder of dumps of torch's flight recorder",
        change="give such a folder; dumps are written with TORCH_NCCL_DEBUG_INFO_TEMP_FILE=FOLDER/rank_",
    )
