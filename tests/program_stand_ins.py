"""Programs of their own that a test starts, forked from one that has imported what they need."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from port_stand_ins import free_port
from run_stand_ins import torchrun_environment

from shoal.testing.programs import Programs as ForkedPrograms


class Programs:
    """Starts `python -m MODULE` without its seconds of imports; started itself when first used."""

    def __init__(self) -> None:
        self._programs = ForkedPrograms()
        self.start, self.close = self._programs.start, self._programs.close

    def run(
        self,
        arguments: Sequence[str],
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        module: str = "shoal.cli.main",
        seconds: float = 180.0,
    ) -> subprocess.CompletedProcess[str]:
        """Runs one to its end, as `subprocess.run` with captured output does."""
        (ended,) = self._run(arguments, folder, [environment or {}], module, seconds)
        return ended

    def run_ranks(
        self, arguments: Sequence[str], ranks: int, folder: Path, *, module: str = "shoal.cli.main"
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs one as each of some ranks, with the environment that torchrun gives."""
        port = free_port()
        environments = [torchrun_environment(rank, ranks, port) for rank in range(ranks)]
        return self._run(arguments, folder, environments, module, 180.0)

    def run_each(
        self, arguments: Sequence[str], folder: Path, environments: Sequence[Mapping[str, str]]
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs one several times beside each other, in an environment each."""
        return self._run(arguments, folder, environments, "shoal.cli.main", 180.0)

    def _run(
        self,
        arguments: Sequence[str],
        folder: Path | None,
        environments: Sequence[Mapping[str, str]],
        module: str,
        seconds: float,
    ) -> list[subprocess.CompletedProcess[str]]:
        place = Path.cwd() if folder is None else folder
        deadline = time.monotonic() + seconds
        with ExitStack() as files:
            started = []
            for environment in environments:
                out, err = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
                environ = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
                program = self.start(module, arguments, environ, (out.fileno(), err.fileno()), place)
                started.append((program, out, err))
            while any(program.poll() is None for program, _, _ in started):
                if time.monotonic() > deadline:
                    for program, _, _ in started:
                        if program.poll() is None:
                            os.killpg(program.pid, signal.SIGKILL)
                    raise TimeoutError(f"{module} {' '.join(arguments)} did not end")
                time.sleep(0.01)
            for _, out, err in started:
                out.seek(0)
                err.seek(0)
            return [
                subprocess.CompletedProcess([module, *arguments], program.wait(), out.read(), err.read())
                for program, out, err in started
            ]
