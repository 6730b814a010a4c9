"""How fast Plans are chosen: `python benchmarks/planner.py`.

For each case: the legal Plans, those that had to be timed, the processor seconds of one core for the five
best degrees and for the best alone, legal Plans a second, and Plans a second where each one is timed and its
memory looked at in full, with nothing decided by a bound. As in `shoal plan` nothing looks for garbage.
"""

from __future__ import annotations

import gc
import sys
import time

from shoal.cli.table import table_of
from shoal.cluster import Cluster
from shoal.planner import Search
from shoal.planner.shared import Shared
from shoal.workload import ModelShape, Workload, shape, workload_of

CASES = {
    "125m on 8 A100": ("125m", "dgx-a100:8", 64),
    "llama3-8b on 64 H100": ("llama3-8b", "dgx-h100:64", 256),
    "llama3-70b on 256 H100": ("llama3-70b", "dgx-h100:256", 512),
    "mixtral-8x7b on 128 H100": ("mixtral-8x7b", "dgx-h100:128", 512),
    "a trillion parameters on 4,096 H100": ("trillion", "dgx-h100:4096", 3072),
}
TRILLION = ModelShape(
    name="trillion",
    layers=128,
    hidden=25600,
    ffn=102400,
    heads=160,
    vocab=51200,
    seq=2048,
    gated=False,
    rotary=False,
    biases=True,
)
"""The largest row of Narayanan et al. 2021 (arXiv:2104.04473, table 1)."""

SAMPLE = 2000  # Plans that are looked at in full


def main() -> None:
    gc.disable()
    rows = []
    for name, (model, machine, batch) in CASES.items():
        workload = workload_of(TRILLION if model == "trillion" else shape(model))
        cluster = Cluster.parse(machine)
        five = _timed(workload, cluster, batch, 5)
        alone = _timed(workload, cluster, batch, 1)
        rows.append(
            [
                name,
                f"{five[1]:,}",
                f"{five[2]:,}",
                f"{five[0]:.2f} s",
                f"{alone[0]:.2f} s",
                f"{five[1] / five[0]:,.0f}",
                f"{_in_full(workload, cluster, batch):,.0f}",
            ]
        )
        print(name, file=sys.stderr)
    print(table_of(["case", "legal", "played", "five best", "best", "legal/s", "in full/s"], rows))


def _timed(workload: Workload, cluster: Cluster, batch: int, limit: int) -> tuple[float, int, int]:
    before = time.process_time()
    ranking = Search(workload, cluster, batch).best(limit)
    return time.process_time() - before, ranking.legal, ranking.played


def _in_full(workload: Workload, cluster: Cluster, batch: int) -> float:
    """Plans a second, each bounded, and its memory looked at."""
    shared = Shared(workload, cluster, batch)
    space = shared.space
    before, count = time.process_time(), 0
    every = (variant for degrees in space.degrees() for variant in space.variants(degrees))
    for variant in every:
        counts = shared.split(variant)
        for sharding in space.shardings(variant.degrees):
            plan = shared.plan(variant, sharding, counts)
            shared.costs.least(plan, batch)
            shared.memories.fullest(plan, batch)
            count += 1
        if count >= SAMPLE:
            break
    return count / (time.process_time() - before)


if __name__ == "__main__":
    main()
