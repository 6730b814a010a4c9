"""`shoal train` in processes that have torch already: as the only rank, or as one that a launcher started."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from port_stand_ins import free_port

from shoal.cli.main import main
from shoal.signals import ANSWERED

Ended = tuple[int, str, str]
"""Exit code, stdout and stderr."""


def shoal(arguments: Sequence[str], folder: Path) -> Ended:
    """Runs the program in a folder."""
    out, err = io.StringIO(), io.StringIO()
    before = {number: signal.getsignal(number) for number in ANSWERED}
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    finally:
        for number, action in before.items():
            signal.signal(number, action)
    return code, out.getvalue(), err.getvalue()


def shoal_as_rank(arguments: Sequence[str], folder: Path, port: int) -> Ended:
    """Runs the program as this rank, with the environment that torchrun gives; to be called on ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()  # the program forms its own
    with environment_of(torchrun_environment(rank, ranks, port)):
        return shoal(arguments, folder)


def shoal_in_a_process_that_saw_no_model(arguments: Sequence[str], folder: Path) -> Ended:
    """Runs the program where neither modules nor folders of earlier runs are known."""
    before = sys.path[:]
    sys.path[:] = [entry for entry in before if not entry.startswith(str(folder.parent))]
    for name in [name for name in sys.modules if name.endswith("_at_home")]:
        del sys.modules[name]
    try:
        return shoal(arguments, folder)
    finally:
        sys.path[:] = before


def shoal_on_a_full_disk(arguments: Sequence[str], folder: Path, largest_file: int) -> Ended:
    """Runs the program where no file can grow beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, before[1]))
    try:
        return shoal(arguments, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def environment_of(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def torchrun_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank by its environment, with all ranks on this machine."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in told.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def train(ranks, words, folder, on=1):
    """Run `shoal train` in a folder on so many ranks; all of them have to end well."""
    if on == 1:
        ended = ranks.run(shoal, 1, ["train", *words, "--nproc", "1"], folder)
    else:
        ended = ranks.run(shoal_as_rank, on, ["train", *words], folder, free_port())
    assert [each[0] for each in ended] == [0] * on, ended[0][2]
