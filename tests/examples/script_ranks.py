"""Runs an example as torchrun would, but on two ranks that the tests share, so that torch loads once."""

import contextlib
import io
import os
import runpy
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from port_stand_ins import free_port
from run_stand_ins import torchrun_environment

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def run_on_ranks(pool, name, *arguments):
    """Runs `python EXAMPLES/NAME ARGUMENTS` as each of two ranks of a RankPool; what all print."""
    return "".join(pool.run(_as_rank, 2, EXAMPLES / name, [str(each) for each in arguments], free_port()))


def _as_rank(file, arguments, port):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # the file forms a group of its own
    environment = torchrun_environment(rank, ranks, port) | {"DS_ACCELERATOR": "cpu"}
    sys.path.insert(0, str(file.parent))  # the pool puts the path back
    before = set(sys.modules)
    printed = io.StringIO()
    with (
        patch.dict(os.environ, environment),
        patch("sys.argv", [file.name, *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        names = runpy.run_path(str(file), run_name="__main__")
        # Gloo's thread needs the interpreter's lock to drop its last work. DDP's reducer would wait for that
        # thread with the lock held, if it were the last to hold the group.
        time.sleep(0.2)
        del names
    if "accelerate" in sys.modules:  # it remembers the environment for as long as a process lives
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    for each in set(sys.modules) - before:
        if Path(getattr(sys.modules[each], "__file__", None) or "/").parent == file.parent:
            del sys.modules[each]
    return printed.getvalue()
