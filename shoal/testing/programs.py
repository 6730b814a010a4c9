"""Programs that start without the seconds of imports: forked from one that has imported what they need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from shoal.launch.local.fork_server import ForkedRank, Nursery, connected

_SERVER = """
import socket, sys
import shoal.testing.check, shoal.cli.main, shoal.train
from shoal.launch.local.fork_server import serve
serve(socket.socket(fileno=int(sys.argv[1])))
"""


@final
class Programs:
    """Starts `python -m MODULE` again and again, from one thread. A context manager.

    The process that programs are forked from is started when it is first needed.
    """

    def __init__(self) -> None:
        self._nursery: Nursery | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        outputs: tuple[int, int],
        folder: Path,
    ) -> ForkedRank:
        """Start a program in a session of its own.

        Args:
            module: Name of the module, which may lie in `folder`.
            arguments: Arguments of its command line.
            environment: Its whole environment.
            outputs: Descriptors that become its stdout and stderr.
            folder: Its working directory.
        """
        if self._nursery is None:
            here, there = connected()
            words = [sys.executable, "-c", _SERVER, str(there.fileno())]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            # Else programs that it forks could not be interrupted where the caller cannot.
            self._server = subprocess.Popen(
                words, pass_fds=[there.fileno()], env=environ, restore_signals=True
            )
            there.close()
            self._nursery = Nursery(here, self._server.pid)
        return self._nursery.start(module, arguments, environment, outputs, str(folder))

    def close(self) -> None:
        """End the process that programs are forked from. Programs that still run go on."""
        if self._nursery is not None and self._server is not None:
            self._nursery.close()
            self._server.returncode = 0

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
