"""Lists the checkpoints of a run, newest first, verifies and compares them, copies them to an object store
and back, and converts them.

Exit codes: 0 all are sound, or both are equal; 1 one is corrupt, or there is none, or two differ; 2 a path
does not exist, or is there already.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.table import as_json
from shoal.errors import ConfigError, CorruptCheckpointError, RunError, nearest
from shoal.units import format_bytes

if TYPE_CHECKING:
    from shoal.checkpoint import Difference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
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
        action_parser.set_defaults(run=run)
    diff_parser = actions.add_parser(
        "diff",
        help="Name the tensors in which two checkpoints differ",
        description="Names the tensors in which two checkpoints differ, those that differ most first. Any "
        "numbers of ranks under any Plans may have saved them. A run means its newest checkpoint. Exit code "
        "1 if they differ.",
    )
    for name in ("first", "second"):
        diff_parser.add_argument(name, metavar=name.upper(), type=Path, help="a checkpoint, or a run")
    diff_parser.add_argument("--weights", action="store_true", help="leave out the optimizer's state")
    diff_parser.add_argument("--json", action="store_true", help="print a JSON array")
    diff_parser.set_defaults(run=run_diff)
    copy_parser = actions.add_parser(
        "copy",
        help="Copy a run's newest checkpoint to an object store, or from it",
        description="Copies a checkpoint to an object store, or a store's newest one to a run's directory. "
        "Compares every byte with its hash on the way. The run's run.json goes with it, so that the run goes "
        "on elsewhere: shoal train --resume DIR. One of both is a URL, such as s3://bucket/runs/one.",
    )
    copy_parser.add_argument("source", metavar="SOURCE", help="a run, a checkpoint, or a URL")
    copy_parser.add_argument("target", metavar="TARGET", help="a URL, or the directory of a run")
    copy_parser.set_defaults(run=run_copy)
    convert_parser = actions.add_parser(
        "convert",
        help="Convert to and from torch.distributed.checkpoint",
        description="Writes a checkpoint in the format of torch.distributed.checkpoint (DCP), or one of DCP "
        "as a checkpoint. There and back it is equal. To read DCP's metadata, which is a pickle, runs no "
        "code unless --trust is given.",
    )
    convert_parser.add_argument(
        "path", metavar="CHECKPOINT", type=Path, help="a checkpoint, or a run; with --to shoal, DCP's folder"
    )
    convert_parser.add_argument(
        "out", metavar="DIR", type=Path, help="a new folder; with --to shoal, a directory of checkpoints"
    )
    convert_parser.add_argument("--to", choices=["dcp", "shoal"], required=True, help="the format to write")
    convert_parser.add_argument(
        "--trust",
        action="store_true",
        help="UNSAFE: let DCP's metadata name any class, which may run any code",
    )
    convert_parser.set_defaults(run=run_convert)


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
    _require_path(args.path)
    # Imported here because it brings torch, which `--help` should not wait for.
    from shoal.checkpoint import check_sizes, resolve, verify

    check = verify if args.action == "verify" else check_sizes
    rows = [_row(path, check) for path in resolve(args.path)]
    print(as_json([asdict(row) for row in rows]) if args.json else _table(rows))
    if args.action == "verify" and not args.json:
        print(f"\n{_verdict(rows)}")
    return 1 if any(row.problem for row in rows) else 0


def run_diff(args: argparse.Namespace) -> int:
    """Print the tensors in which two checkpoints differ; return 1 if there are any.

    Raises:
        RunError: A path does not exist.
        CheckpointError: A path holds no checkpoint, or one that cannot be read.
    """
    from shoal.checkpoint import compare, read_manifest, resolve

    for path in (args.first, args.second):
        _require_path(path)
    first, second = (resolve(path)[0] for path in (args.first, args.second))
    found = [each for each in compare(first, second) if not (args.weights and _is_of_optimizer(each.name))]
    found.sort(key=lambda each: (not each.problem, -each.largest, each.name))
    if args.json:
        rows = [asdict(each) for each in found]
        print(as_json(rows))
        return 1 if found else 0
    names = read_manifest(first).tensors.keys() | read_manifest(second).tensors.keys()
    compared = [name for name in names if not (args.weights and _is_of_optimizer(name))]
    number = sum(not name.startswith("rank/") for name in compared)
    if found:
        print(_differences(found), end="\n\n")
    verdict = f"{len(found)} of {number} tensors differ" if found else f"EQUAL: all {number} tensors"
    print(f"{verdict}, between {first} and {second}")
    return 1 if found else 0


def run_copy(args: argparse.Namespace) -> int:
    """Copy a checkpoint to an object store or from it.

    Raises:
        ConfigError: None of both is a URL, or both are; or the URL is of no kind that is known.
        RunError: The path does not exist.
        CheckpointError: There is no checkpoint, or one that is not sound, or the store or the disk fails.
    """
    from shoal.checkpoint import Store, is_url, resolve

    if is_url(args.source) == is_url(args.target):
        raise ConfigError(
            f"a checkpoint cannot be copied from {args.source} to {args.target}",
            possible="a run or a checkpoint, and a URL such as s3://bucket/runs/one, in either order",
            change="give one URL and one path",
        )
    if is_url(args.source):
        print(Store(args.source).get(Path(args.target)))
        return 0
    path = Path(args.source)
    _require_path(path)
    newest = resolve(path)[0]
    Store(args.target).put(newest)
    print(f"{args.target.rstrip('/')}/checkpoints/{newest.name}")
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Convert a checkpoint, and print where it is now.

    Raises:
        RunError: The path does not exist, or the folder to write holds something.
        CheckpointError: There is no checkpoint, or it cannot be read or stored.
    """
    from shoal.checkpoint import resolve
    from shoal.checkpoint.dcp import from_dcp, to_dcp

    _require_path(args.path)
    if args.to == "dcp":
        checkpoint = resolve(args.path)[0]
        print(f"wrote {to_dcp(checkpoint, args.out)} tensors of {checkpoint} to {args.out}")
        return 0
    path, left_out = from_dcp(args.path, args.out, trusted=args.trust)
    print(f"wrote {path}")
    if left_out:
        print(f"left out {len(left_out)} keys: {', '.join(left_out)}")
    return 0


def _require_path(path: Path) -> None:
    if not path.exists():
        beside = [each.name for each in path.parent.glob("*")]
        raise RunError(
            f"{path} does not exist{nearest(path.name, beside)}",
            possible="a run, a directory of checkpoints, or one checkpoint: a step-N directory",
            change="correct the path",
        )


def _is_of_optimizer(name: str) -> bool:
    return name.startswith("optimizer")


def _differences(found: Sequence[Difference]) -> str:
    width = max(len("tensor"), *(len(each.name) for each in found))
    lines = [f"{'tensor':<{width}}  {'differ':>11} {'of':>11}  {'largest difference':>18}  largest value"]
    for each in found:
        if each.problem:
            lines.append(f"{each.name:<{width}}  {each.problem}")
        else:
            lines.append(
                f"{each.name:<{width}}  {each.differing:>11,} {each.elements:>11,}  {each.largest:>18.3g}  "
                f"{each.magnitude:.3g}"
            )
    return "\n".join(lines)


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
