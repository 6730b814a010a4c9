"""`shoal checkpoint`: list the checkpoints of a run, and find out whether they are still what was written.

Exit codes: 0, all are sound; 1, one is corrupt, or there is none; 2, the path does not exist.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shoal.errors import CorruptCheckpointError, RunError, nearest
from shoal.units import format_bytes

__all__ = ["add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its subcommands to the program."""
    parser = commands.add_parser(
        "checkpoint",
        help="list checkpoints, and verify them",
        description="Lists the checkpoints of a run, newest first, and verifies them.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, path_help, text in (
        (
            "ls",
            "a run, a directory of checkpoints, or one checkpoint",
            "Lists checkpoints, newest first. Reads manifests and file sizes only, so that it is fast; "
            "exit code 1 if these show one to be corrupt.",
        ),
        (
            "verify",
            "one checkpoint, a directory of checkpoints, or a run",
            "Reads checkpoints in full and compares every file with its hash; exit code 1 if one is corrupt.",
        ),
    ):
        action_parser = actions.add_parser(action, help=text.partition(".")[0], description=text)
        action_parser.add_argument("path", metavar="PATH", type=Path, help=path_help)
        action_parser.add_argument("--json", action="store_true", help="print a JSON array")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Row:
    """One checkpoint, as both subcommands print it; facts that a corrupt one does not have are None."""

    step: int
    path: str
    files: int | None
    tensors: int | None
    bytes: int | None
    problem: str | None


def run(args: argparse.Namespace) -> int:
    """Print one row for each checkpoint that the path means; return 1 if one of them is corrupt.

    Raises:
        RunError: The path does not exist.
        CheckpointError: The path holds no checkpoint.
    """
    if not args.path.exists():
        beside = [each.name for each in args.path.parent.glob("*")]
        raise RunError(
            f"{args.path} does not exist{nearest(args.path.name, beside)}",
            possible="a run, a directory of checkpoints, or one checkpoint: a step-N directory",
            change="correct the path",
        )
    # Imported here because it brings torch, which `--help` should not wait for.
    from shoal.checkpoint import check_sizes, resolve, verify

    check = verify if args.action == "verify" else check_sizes
    rows = [_row(path, check) for path in resolve(args.path)]
    print(json.dumps([asdict(row) for row in rows], indent=2) if args.json else _table(rows))
    if args.action == "verify" and not args.json:
        print(f"\n{_verdict(rows)}")
    return 1 if any(row.problem for row in rows) else 0


def _row(path: Path, check: Callable[[Path], object]) -> _Row:
    from shoal.checkpoint import read_manifest, step_of

    step = step_of(path)
    try:
        manifest = read_manifest(path)
    except CorruptCheckpointError as error:
        return _Row(step, str(path), None, None, None, str(error))
    row = _Row(step, str(path), len(manifest.files), len(manifest.tensors), manifest.size, None)
    try:
        check(path)
    except CorruptCheckpointError as error:
        return replace(row, problem=str(error))
    return row


def _verdict(rows: list[_Row]) -> str:
    """Return a line that says whether all are sound, or else which can still be used."""
    corrupt = [row.step for row in rows if row.problem]
    sound = [row for row in rows if not row.problem]
    if not corrupt:
        size = format_bytes(sum(row.bytes or 0 for row in sound))
        files = sum(row.files or 0 for row in sound)
        what = f"the checkpoint of step {rows[0].step}" if len(rows) == 1 else f"all {len(rows)} checkpoints"
        return f"SOUND: {what}, {size} in {files} files, every byte as it was written"
    steps = f"step{'s' if len(corrupt) > 1 else ''} {', '.join(map(str, corrupt))}"
    left = f"the newest sound one is that of step {sound[0].step}" if sound else "none is sound"
    return f"CORRUPT: {len(corrupt)} of {len(rows)} checkpoints, {steps}; {left}"


def _table(rows: list[_Row]) -> str:
    lines = [f"{'step':>10}  {'size':>9}  {'files':>5}  {'tensors':>7}  checkpoint"]
    for row in rows:
        size = "-" if row.bytes is None else format_bytes(row.bytes)
        files, tensors = ("-" if count is None else count for count in (row.files, row.tensors))
        lines.append(f"{row.step:>10}  {size:>9}  {files:>5}  {tensors:>7}  {row.path}")
        if row.problem:
            lines.append(f"{'':>10}  corrupt: {row.problem}")
    return "\n".join(lines)
