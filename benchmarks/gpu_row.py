"""One row of the acceptance run, as a process: `python gpu_row.py RESULTS`, with the row on standard input.

It imports what rows need while the row before it still runs, and begins once the row comes: what a row takes
counts from there. RESULTS gets one JSON object a line, flushed as it comes: that it is ready, the machine,
each finding, and how the row ended. Whoever reads them sees what was found before a row hung.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import platform
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_outcome import Found, Lacking, Short

_PR_SET_PDEATHSIG = 1
_DEEPEST = 3  # frames of a traceback that a reason names


def main(results: Path) -> int:
    """Wait for the row, run it, and write what it found."""
    with contextlib.suppress(OSError):  # if memory runs out, the system ends this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # whoever limits it is gone
    _import_early()
    with results.open("a", encoding="utf-8") as file:

        def report(**content: Any) -> None:
            file.write(json.dumps(content) + "\n")
            file.flush()

        report(ready=True)
        row = json.loads(sys.stdin.readline() or "null")
        if row is None:  # there was no row left
            return 0
        report(**_ended(row, report))
    with contextlib.suppress(OSError):  # whoever reads is gone
        sys.stdout.flush()
    os._exit(0)  # a device that does not answer cannot delay the end


def _import_early() -> None:
    """Import what nearly every row needs, and touch no device."""
    if "--bare" in sys.argv:
        return
    for module in ("torch", "shoal.train"):
        with contextlib.suppress(Exception):  # the row names it
            importlib.import_module(module)


def _ended(row: dict[str, Any], report: Any) -> dict[str, str]:
    """Run a row, and return how it ended."""
    try:
        device = row["device"]
        if device is not None:
            device = _device(device)
            report(machine=machine_of(device))
        module, _, name = row["function"].partition(":")
        for found in _findings(getattr(importlib.import_module(module), name)(device, **row["arguments"])):
            report(text=found.text, figures=dict(found.figures))
    except Short as error:
        return {"outcome": "short", "reason": str(error)}
    except Lacking as error:
        return {"outcome": "lacking", "reason": str(error)}
    except AssertionError as error:
        return {"outcome": "wrong", "reason": _reason(error)}
    except MemoryError as error:
        return {"outcome": "no memory", "reason": _reason(error)}
    except BaseException as error:
        traceback.print_exc()
        is_memory = type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)
        return {"outcome": "no memory" if is_memory else "failed", "reason": _reason(error)}
    return {"outcome": "right", "reason": ""}


def _findings(result: Any) -> Iterator[Found]:
    if result is None:
        return
    for each in [result] if isinstance(result, str | Found) else result:
        yield Found(each) if isinstance(each, str) else each


def _reason(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-_DEEPEST:]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    text = " ".join(str(error).split()) or "no message"
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return f"{kind}{text[:600]} ({where})"


def _device(name: str) -> Any:
    import torch

    device = torch.device(name, 0) if name == "cuda" else torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.ones((), device=device)
    return device


def machine_of(device: Any) -> str:
    """The device, torch, and the host in words."""
    import torch

    cores = len(os.sched_getaffinity(0))
    software = f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores"
    if device.type == "cpu":
        return f"CPU, {software}: a trial of the program, no measurement"
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name}, {facts.total_memory / 2**30:.1f} GiB, CUDA {torch.version.cuda}, {software}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
