"""The acceptance run on one GPU: is what Shoal computes there right, how quick is it, and is it as predicted?

    make gpu [PYTHON=python3] [MINUTES=7] [ARGS="--from 12"]

uses the torch of PYTHON as it is, installs nothing, and needs no network. The package runs from this tree;
its native core is compiled first if it is not there.

Each row of `gpu_rows.py` is a process of its own with a budget in seconds: a failure, a hang or a lack of
memory costs that row alone. A row begins only if its whole budget fits into what is left of MINUTES. What
became of it is a line of JSON that is written when it ends, in `data/gpu.jsonl`, and the page `gpu.md` is
written from the lines that are there, the worst finding first.

    --from N         begin with row N, after another call ended before it
    --only NAME,...  run rows, or sections, by their names
    --list           list the rows
    --out FOLDER     folder for gpu.jsonl and gpu.md, in place of the two files above
    --logs FOLDER    folder for what rows print; by default a temporary one
    --page           only write the page, from the lines that are there
    --simulated      try this program without a GPU: rows that fail, hang, and take all memory
    --device cpu     run the rows on the CPU with small shapes, to try them; their figures mean nothing
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_outcome import OUTCOMES, Line, Row, read_lines
from gpu_page import page
from gpu_processes import Processes, available_memory
from gpu_rows import ROWS
from gpu_simulated import SIMULATED

__all__ = ["main"]

_HERE = Path(__file__).resolve().parent
_LINES, _PAGE = _HERE / "data" / "gpu.jsonl", _HERE / "gpu.md"
_REQUIRED = ("torch", "numpy", "pydantic", "safetensors")
_MINUTES = 7.0
_MEMORY_SHARE = 0.8  # of the host's free memory that a row may take
_SIMULATED_MEMORY = 256 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows; return 0 if all went well, 1 if not, and 2 if it cannot run at all."""
    options = _parser().parse_args(arguments)
    rows = SIMULATED if options.simulated else ROWS
    if options.list:
        for number, row in enumerate(rows, 1):
            print(f"{number:3} {row.seconds:4g} s  {row.subject}: {row.name}")
        return 0
    lines_file, page_file = _files(options)
    if not options.page:
        try:
            chosen = _chosen(rows, options)
            _require(options)
        except ValueError as error:
            print(f"gpu: {error}", file=sys.stderr)
            return 2
        asked: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda received, _: asked.append(received))
        made = _run(chosen, options, lines_file, page_file, lambda: bool(asked))
    text = page(read_lines(lines_file))
    _write(page_file, text)
    if options.page:
        return 0
    print(text)
    _say_what_is_left(made)
    return 0 if all(line.outcome == "right" for line in made) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="time for all rows (default 7)")
    parser.add_argument(
        "--from", dest="first", type=int, default=1, metavar="N", help="number of the first row"
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="rows or sections to run")
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for gpu.jsonl and gpu.md")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="folder for what rows print")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--simulated", action="store_true", help="run stand-ins of rows, without a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser


def _files(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the files of lines and of the page; a trial never writes those of a GPU."""
    folder = options.out
    if folder is None and (options.simulated or options.device == "cpu"):
        folder = Path(tempfile.mkdtemp(prefix="shoal-gpu-"))
        print(f"lines and page are in {folder}", file=sys.stderr)
    if folder is None:
        return _LINES, _PAGE
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "gpu.jsonl", folder / "gpu.md"


def _chosen(rows: Sequence[Row], options: argparse.Namespace) -> list[tuple[int, Row]]:
    """Return the rows to run, with their numbers.

    Raises:
        ValueError: There is no such row.
    """
    numbered = list(enumerate(rows, 1))
    if not 1 <= options.first <= len(rows):
        raise ValueError(f"--from {options.first} was given; rows have the numbers 1 to {len(rows)} (--list)")
    if options.minutes <= 0:
        raise ValueError(f"--minutes {options.minutes:g} was given; give a time above 0")
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    known = {row.name for row in rows} | {row.subject for row in rows}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no row or section {', '.join(unknown)}; --list shows them")
    return [
        (number, row)
        for number, row in numbered
        if number >= options.first and (not names or {row.name, row.subject} & set(names))
    ]


def _require(options: argparse.Namespace) -> None:
    """Refuse to begin without a package that every row needs, or without a GPU.

    Raises:
        ValueError: Something is missing.
    """
    if options.simulated:
        return
    if missing := [name for name in _REQUIRED if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"{sys.executable} has no {', '.join(missing)}, which Shoal needs: install it, or name the "
            "folder of an unpacked wheel in PYTHONPATH, or give another Python (make gpu PYTHON=...)"
        )
    if options.device == "cuda" and not _has_gpu():
        raise ValueError("there is no GPU: run this where one is, or try it with --simulated or --device cpu")


def _has_gpu() -> bool:
    """Return whether there is a GPU. This process itself never uses it: rows have all of its memory."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def _run(
    chosen: Sequence[tuple[int, Row]],
    options: argparse.Namespace,
    lines_file: Path,
    page_file: Path,
    is_asked_to_stop: Callable[[], bool],
) -> list[Line]:
    """Run rows until the time is over; return their lines."""
    until = time.monotonic() + options.minutes * 60
    if not options.simulated:
        _compile_core(until - time.monotonic())
    commit, machine, made = _commit(), "", list[Line]()
    memory = _SIMULATED_MEMORY if options.simulated else int(_MEMORY_SHARE * available_memory())
    device = None if options.simulated else options.device
    logs = options.logs or Path(tempfile.mkdtemp(prefix="shoal-gpu-logs-"))
    print(f"what rows print is in {logs}", file=sys.stderr)
    with (
        Processes(logs, lines_file.parent, memory, is_asked_to_stop, is_bare=options.simulated) as processes,
        lines_file.open("a", encoding="utf-8") as file,
    ):
        for place, (number, row) in enumerate(chosen):
            line = _not_begun(number, row, until - time.monotonic(), is_asked_to_stop())
            if line is None:
                print(f"{number:3}  {row.name} ...", end=" ", file=sys.stderr, flush=True)
                line = processes.run(number, row, device, is_last=place == len(chosen) - 1)
                said = f"{line.outcome}, {line.seconds:.0f} s  {line.reason[:200]}"
                print(said.rstrip(), file=sys.stderr, flush=True)
            machine = line.machine or machine
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            made.append(dataclasses.replace(line, commit=commit, machine=machine, date=date))
            file.write(made[-1].json() + "\n")
            file.flush()
            os.fsync(file.fileno())
            if line.outcome != "not run":
                _write(page_file, page(read_lines(lines_file)))
    return made


def _compile_core(seconds: float) -> None:
    """Compile the native core into this tree if it is not there; rows that need it say what is missing."""
    root = _HERE.parent
    if (root / "shoal" / "collectives" / "_core.so").exists():
        return
    print("compiling the native core ...", file=sys.stderr, flush=True)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    try:
        done = subprocess.run(command, cwd=root, timeout=seconds, check=False, stdout=sys.stderr)
        failure = f"it ended with {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        print(f"the native core was not compiled: {failure}", file=sys.stderr, flush=True)


def _not_begun(number: int, row: Row, left: float, is_stopped: bool) -> Line | None:
    """Return the line of a row that cannot begin; None if it can."""
    if is_stopped:
        return _line(number, row, "not run", "stopped by a signal")
    if missing := [name for name in row.needs if importlib.util.find_spec(name) is None]:
        return _line(number, row, "lacking", f"{', '.join(missing)} is not installed")
    if row.seconds > left:
        return _line(number, row, "not run", f"{max(0, left):.0f} s were left of its {row.seconds:g} s")
    return None


def _line(number: int, row: Row, outcome: str, reason: str) -> Line:
    assert outcome in OUTCOMES
    return Line(
        number=number,
        name=row.name,
        subject=row.subject,
        outcome=outcome,
        seconds=0.0,
        budget=row.seconds,
        reason=reason,
    )


def _commit() -> str:
    """Return the commit, and a hash of the sources, which tells also without git what ran."""
    digest = hashlib.sha256()
    for file in sorted([*(_HERE.parent / "shoal").rglob("*.py"), *(_HERE.parent / "csrc").rglob("*.cc")]):
        digest.update(file.read_bytes())
    sources = f"sources {digest.hexdigest()[:12]}"
    given = os.environ.get("COMMIT", "")
    command = ["git", "-C", str(_HERE), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"{given or 'unknown'}, {sources}"
    return f"{given or done.stdout.strip() or 'unknown'}, {sources}"


def _write(file: Path, text: str) -> None:
    """Write a page so that nobody reads half of one."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def _say_what_is_left(made: Sequence[Line]) -> None:
    if left := [line for line in made if line.outcome == "not run"]:
        names = ",".join(line.name for line in left)
        print(f'{len(left)} rows were not run; go on with: make gpu ARGS="--only {names}"', file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
