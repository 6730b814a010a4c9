"""One rank of a job that `shoal train` started: `python -m shoal.train JOB`, with torchrun's environment."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from shoal.launch import find_world, run_rank
from shoal.train.execute import execute
from shoal.values import decode

if __name__ == "__main__":
    world = find_world()
    assert world is not None
    job = decode(Path(sys.argv[1]).read_bytes())
    sys.exit(run_rank(world.rank, partial(execute, lambda: job, world)))
