"""One rank of a job that `shoal train` started: `python -m shoal.train JOB`, with torchrun's environment."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch.distributed as dist

from shoal.launch.elastic import Membership
from shoal.launch.local import find_world, reports_failures, run_rank
from shoal.launch.submit import EXIT_STOPPED
from shoal.train.elastic import abort, execute_elastic, group_failure
from shoal.train.entry import execute
from shoal.values import decode

if __name__ == "__main__":
    world = find_world()
    assert world is not None
    job = decode(Path(sys.argv[1]).read_bytes())
    membership = Membership.found(os.environ, abort, group_failure)
    if membership is None:
        work = partial(execute, lambda: job, world)
    else:
        work = partial(execute_elastic, job, world, membership)
    code = run_rank(world.rank, work, early=EXIT_STOPPED)
    if dist.is_initialized() and not reports_failures(dist.get_backend_config()):
        # The group of a rank that failed is left as it is: its end may wait for ranks that wait for this.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
