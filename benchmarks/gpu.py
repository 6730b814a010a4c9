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

Where there is no git, COMMIT in the environment names the commit; each line has a hash of the sources too.
Exit codes: 0 the rows that were run are right; 1 not all of them, or a signal came; 2 it cannot run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import importlib.util
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from gpu_outcome import NOT_BEGUN, STOPPED, Line, Row, read_lines
from gpu_page import page
from gpu_processes import Processes, available_memory
from gpu_rows import ROWS
from gpu_simulated import SIMULATED
from gpu_sources import CORE_FAILURE, commit, compile_core

__all__ = ["main"]

_HERE = Path(__file__).resolve().parent
_LINES, _PAGE = _HERE / "data" / "gpu.jsonl", _HERE / "gpu.md"
_PYTHON = (3, 11)
_REQUIRED = ("torch", "numpy", "pydantic", "safetensors")
_MINUTES = 7.0
_MEMORY_SHARE = 0.8  # of the host's free memory that a row may take
_SIMULATED_MEMORY = 256 << 20
_ASKS = 120.0  # seconds in which torch is imported, and says whether there is a GPU


class RefusedError(Exception):
    """What was given cannot work; the message says what to change."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows, and write their lines and the page."""
    options = _parser().parse_args(arguments)
    rows = SIMULATED if options.simulated else ROWS
    try:
        if options.list:
            for number, row in enumerate(rows, 1):
                print(f"{number:3} {row.seconds:4g} s  {row.subject}: {row.name}")
            return 0
        chosen = [] if options.page else _chosen(rows, options)
        if not options.page:
            _require(options)
        lines_file, page_file = _files(options)
        with _lines_of_its_own(lines_file) as file:
            if options.page:
                _write(page_file, page(read_lines(lines_file)))
                return 0
            made = _run(chosen, options, file, page_file, _signals_noted())
    except RefusedError as error:
        _say(f"gpu: {error}")
        return 2
    text = page(read_lines(lines_file))
    with contextlib.suppress(OSError):  # whoever reads is gone; the page is on disk
        print(text, flush=True)
    _say_what_is_left(made, options)
    is_stopped = any(line.reason == STOPPED for line in made)
    return 0 if all(line.outcome in ("right", *NOT_BEGUN) for line in made) and not is_stopped else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="time for all rows (default 7)")
    parser.add_argument("--from", dest="first", type=int, default=1, metavar="N", help="first row's number")
    parser.add_argument("--only", metavar="NAME,...", help="rows or sections to run")
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for gpu.jsonl and gpu.md")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="folder for what rows print")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--simulated", action="store_true", help="run stand-ins of rows, without a GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser


def _chosen(rows: Sequence[Row], options: argparse.Namespace) -> list[tuple[int, Row]]:
    """Return the rows to run, with their numbers.

    Raises:
        RefusedError: There is no such row, or no time.
    """
    if not 1 <= options.first <= len(rows):
        raise RefusedError(
            f"--from {options.first} was given; rows have the numbers 1 to {len(rows)} (--list)"
        )
    if not (options.minutes > 0 and math.isfinite(options.minutes)):
        raise RefusedError(f"--minutes {options.minutes:g} was given; give a time above 0")
    numbered = list(enumerate(rows, 1))[options.first - 1 :]
    if options.only is None:
        return numbered
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    known = {row.name for row in rows} | {row.subject for row in rows}
    if unknown := [name for name in names if name not in known]:
        raise RefusedError(f"there is no row or section {', '.join(unknown)}; --list shows them")
    found = [(number, row) for number, row in numbered if {row.name, row.subject} & set(names)]
    if not found:
        raise RefusedError(f"--only {options.only!r} names no row from number {options.first} on (--list)")
    return found


def _require(options: argparse.Namespace) -> None:
    """Refuse to begin without what every row needs.

    Raises:
        RefusedError: Something is missing.
    """
    if sys.version_info < _PYTHON:
        raise RefusedError(f"{sys.executable} is Python {sys.version.split()[0]}; Shoal needs 3.11 or newer")
    if options.simulated:
        return
    if missing := [name for name in _REQUIRED if importlib.util.find_spec(name) is None]:
        raise RefusedError(
            f"{sys.executable} has no {', '.join(missing)}, which Shoal needs: install it, or name the "
            "folder of an unpacked wheel in PYTHONPATH, or give another Python (make gpu PYTHON=...)"
        )
    if options.device == "cpu":
        return
    # Asked in another process: rows have all memory of the device.
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=_ASKS
        )
    except subprocess.TimeoutExpired:
        raise RefusedError(f"torch does not say within {_ASKS:g} s whether there is a GPU") from None
    if done.returncode:
        raise RefusedError(f"torch cannot be imported: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    version, cuda, has_gpu = done.stdout.split()
    if has_gpu != "True":
        built = "is built without CUDA" if cuda == "None" else "finds no GPU"
        raise RefusedError(
            f"there is no GPU: torch {version} {built}; run this where one is, with a torch that uses it "
            "(make gpu PYTHON=...), or try it with --simulated or --device cpu"
        )


def _files(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the files of lines and of the page; a trial never writes those of a GPU."""
    folder = options.out
    if folder is None and (options.simulated or options.device == "cpu"):
        folder = Path(tempfile.mkdtemp(prefix="shoal-gpu-"))
        _say(f"lines and page are in {folder}")
    if folder is None:
        return _LINES, _PAGE
    return folder / "gpu.jsonl", folder / "gpu.md"


@contextmanager
def _lines_of_its_own(file: Path) -> Iterator[IO[str]]:
    """Open a file of lines to append to; its last line is whole, and no other run writes it.

    Raises:
        RefusedError: It cannot be written, or another run writes it.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a+", encoding="utf-8", errors="replace") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RefusedError(f"another run writes {file}: wait for it, or give --out FOLDER") from None
            content = file.read_bytes()
            if content and not content.endswith(b"\n"):  # the machine was taken away while a line was written
                opened.write("\n")
                opened.flush()
            yield opened
    except OSError as error:
        raise RefusedError(f"{file} cannot be written ({error.strerror}): give --out FOLDER") from error


def _signals_noted() -> Callable[[], bool]:
    """Return whether a signal has asked to stop, as a function; ignored ones stay so, as under nohup."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda received, _: asked.append(received))
    return lambda: bool(asked)


def _run(
    chosen: Sequence[tuple[int, Row]],
    options: argparse.Namespace,
    file: IO[str],
    page_file: Path,
    is_asked_to_stop: Callable[[], bool],
) -> list[Line]:
    """Run rows until the time is over; return their lines."""
    until = time.monotonic() + options.minutes * 60
    if not options.simulated and (failure := compile_core(until - time.monotonic(), is_asked_to_stop)):
        os.environ[CORE_FAILURE] = failure
        _say(failure)
    source, made = commit(), list[Line]()
    machine = "a simulated GPU" if options.simulated else ""
    memory = _SIMULATED_MEMORY if options.simulated else int(_MEMORY_SHARE * available_memory())
    device = None if options.simulated else options.device
    logs = options.logs or Path(tempfile.mkdtemp(prefix="shoal-gpu-logs-"))
    _say(f"what rows print is in {logs}")
    with Processes(
        logs, Path(file.name).parent, memory, is_asked_to_stop, is_bare=options.simulated
    ) as processes:
        for place, (number, row) in enumerate(chosen):
            line = _not_begun(number, row, until - time.monotonic(), is_asked_to_stop())
            if line is None:
                is_last = place == len(chosen) - 1
                try:
                    line = processes.run(number, row, device, is_last=is_last)
                except Exception as error:  # such as a disk that is full: the rows after it may go well
                    reason = f"it could not be run: {type(error).__name__}: {error}"
                    line = Line.of(number, row, "failed", reason)
            machine = line.machine or machine
            date = datetime.now(timezone.utc).isoformat(timespec="seconds")  # noqa: UP017
            made.append(dataclasses.replace(line, commit=source, machine=machine, date=date))
            _keep(made[-1], file, page_file)
            _say(
                f"{number:3}  {row.name}: {line.outcome}, {line.seconds:.0f} s  {line.reason[:200]}".rstrip()
            )
    return made


def _keep(line: Line, file: IO[str], page_file: Path) -> None:
    """Write a line, and the page with it; if the disk is full, show it at least."""
    try:
        file.write(line.json() + "\n")
        file.flush()
        os.fsync(file.fileno())
        _write(page_file, page(read_lines(Path(file.name))))
    except OSError as error:
        _say(f"gpu: {error}; the line is: {line.json()}")


def _not_begun(number: int, row: Row, left: float, is_stopped: bool) -> Line | None:
    """Return the line of a row that cannot begin; None if it can."""
    if is_stopped:
        return Line.of(number, row, "not run", STOPPED)
    if missing := [name for name in row.needs if importlib.util.find_spec(name) is None]:
        return Line.of(number, row, "lacking", f"not installed: {', '.join(missing)}")
    if row.seconds > left:
        return Line.of(number, row, "not run", f"{max(0, left):.0f} s were left of its {row.seconds:g} s")
    return None


def _write(file: Path, text: str) -> None:
    """Write a page so that nobody reads half of one."""
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8", errors="replace")
    new.replace(file)


def _say(text: str) -> None:
    """Tell whoever runs this, if somebody reads: a closed terminal ends no row."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def _say_what_is_left(made: Sequence[Line], options: argparse.Namespace) -> None:
    """Tell which rows were not run, and the command that runs them."""
    left = [line.name for line in made if line.outcome == "not run"]
    if not left:
        return
    words = ["--only", ",".join(left)]
    words += ["--simulated"] * options.simulated + ["--device", "cpu"] * (options.device == "cpu")
    words += [] if options.out is None else ["--out", str(options.out)]
    rows = "1 row was" if len(left) == 1 else f"{len(left)} rows were"
    command = f"make gpu PYTHON={shlex.quote(sys.executable)} ARGS={shlex.quote(shlex.join(words))}"
    _say(f"{rows} not run; go on with:\n  {command}")


if __name__ == "__main__":
    sys.exit(main())
