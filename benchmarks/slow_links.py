"""Training over slow links with every way of exchange: tokens/s, bytes, predictions; and the loss.

    python benchmarks/slow_links.py --only speed [--networks 4@0.1,4@1] [--rounds 5]
    python benchmarks/slow_links.py --only loss [--seeds 0,1,2] [--speeds FILE]
    python benchmarks/slow_links.py --only time [--networks 4@0.1,4@1,4@10] [--seeds 0,1,2] [--seconds 45]

A network `4@0.1` is 4 hosts with one worker each, on links of 0.1 Gbit/s each way: network namespaces
(shoal.testing.hosts), which take root. All workers share this machine's cores. All commands print Markdown.
`speed` is in `slow_links_speed.py`, `loss` in `slow_links_loss.py`, `time` in `slow_links_time.py`, and what
trains in `slow_links_methods.py` and `slow_links_small.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slow_links_loss import STEPS, measure_loss
from slow_links_speed import NETWORKS, measure_speed
from slow_links_time import measure_time

from shoal.errors import UserError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("speed", "loss", "time"), required=True, help="what to measure")
    parser.add_argument("--networks", default=NETWORKS, help=f"default {NETWORKS}")
    parser.add_argument(
        "--methods", default="", metavar="TEXT,...", help="with one of these texts; of time, at their ends"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--seeds", default="0,1,2", help="of the losses; default 0,1,2")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of the losses; default {STEPS}")
    parser.add_argument(
        "--speeds", type=Path, help="what --only speed --json wrote, for losses in equal time"
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="of each training in time; default 45")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args(arguments)
    only = options.methods.split(",")
    try:
        networks, seeds = options.networks.split(","), [int(each) for each in options.seeds.split(",")]
        if options.only == "speed":
            measure_speed(networks, only, options.rounds, options.json)
        elif options.only == "time":
            measure_time(networks, seeds, options.seconds, only, options.json)
        else:
            measure_loss(seeds, options.steps, only, options.speeds, options.json)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
