"""One rank of a job that `compare_locally` started: `python -m shoal.testing.check JOB`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from shoal.launch.local import find_world, run_rank
from shoal.testing.check.runner import serve

if __name__ == "__main__":
    world = find_world()
    assert world is not None
    sys.exit(run_rank(world.rank, partial(serve, Path(sys.argv[1]), world)))
