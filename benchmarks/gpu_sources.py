"""What the acceptance run runs: the commit and the sources of this tree, and its native core."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["CORE_FAILURE", "commit", "compile_core"]

CORE_FAILURE = "GPU_CORE"
"""Environment variable: why the native core is not there; absent if it is."""

_ROOT = Path(__file__).resolve().parent.parent
_CORE = _ROOT / "shoal" / "collectives" / "_core.so"
_TOLD = ("shoal", "csrc", "benchmarks", "setup.py", "pyproject.toml")
_LOOK = 0.1  # seconds between two looks at the compiler


def commit() -> str:
    """Return the commit, "with changes" if the sources differ from it, and a hash of them, as without git."""
    digest = hashlib.sha256()
    for file in sorted(each for name in ("shoal", "csrc") for each in (_ROOT / name).rglob("*")):
        if file.suffix in (".py", ".toml", ".cc", ".h"):
            digest.update(file.read_bytes())
    sources = f"sources {digest.hexdigest()[:12]}"
    if given := os.environ.get("COMMIT", ""):
        return f"{given}, {sources}"
    if _git("rev-parse", "--show-toplevel") != str(
        _ROOT
    ):  # there is none, or one of something around this tree
        return f"unknown, {sources}"
    outputs = [f":(exclude)benchmarks/{name}" for name in ("gpu.md", "data")]
    is_changed = _git("status", "--porcelain", "--untracked-files=no", "--", *_TOLD, *outputs)
    return f"{_git('rev-parse', '--short', 'HEAD')}{' with changes' if is_changed else ''}, {sources}"


def compile_core(seconds: float, is_asked_to_stop: Callable[[], bool]) -> str:
    """Compile the native core of these sources if it is not there; return why it is not, "" if it is.

    Args:
        seconds: Time for the compiler.
        is_asked_to_stop: Whether to end before.
    """
    if _is_current():
        return ""
    print("compiling the native core ...", file=sys.stderr, flush=True)
    _CORE.unlink(missing_ok=True)  # one of other sources would be taken for this one
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    log = _ROOT / "build" / "gpu-core.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=_ROOT, start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        )
        until = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < until and not is_asked_to_stop():
            time.sleep(_LOOK)
        is_late = process.poll() is None
        if is_late:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        told = [line.strip() for line in output if line.strip()]
    if _is_current():
        return ""
    if is_late:
        return f"the native core was not compiled within {seconds:.0f} s"
    why = "; ".join(told[-2:])[:300]
    return f"the native core was not compiled, for which setup.py needs g++ and setuptools>=77: {why}"


def _is_current() -> bool:
    """Return whether the core was compiled from these sources, whose hash setup.py compiles into it."""
    folders = ("csrc", "csrc/common", "csrc/codecs", "csrc/transport", "csrc/algorithms")
    files = [f"{folder}/{file.name}" for folder in folders for file in (_ROOT / folder).iterdir()]
    digest = hashlib.sha256()
    for suffix in (".cc", ".h"):
        for file in sorted(each for each in files if each.endswith(suffix)):
            digest.update(hashlib.sha256((_ROOT / file).read_bytes()).digest())
    return _CORE.is_file() and digest.hexdigest()[:12].encode() in _CORE.read_bytes()


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *words], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
