"""One rank of a job that `shoal train` started: `python -m shoal.train JOB`, with torchrun's environment."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from shoal.launch import Membership, find_world, run_rank
from shoal.train.elastic import abort, execute_elastic
from shoal.train.execute import execute
from shoal.values import decode

if __name__ == "__main__":
    world = find_world()
    assert world is not None
    job = decode(Path(sys.argv[1]).read_bytes())
    membership = Membership.found(os.environ, abort)
    if membership is None:
        work = partial(execute, lambda: job, world)
    else:
        work = partial(execute_elastic, job, world, membership)
    sys.exit(run_rank(world.rank, work))
