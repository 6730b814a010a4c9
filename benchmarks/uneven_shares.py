"""Training on a slow rank with equal and with uneven numbers of micro-batches: measured beside predicted.

    python benchmarks/uneven_shares.py [--rounds 5] [--pace 0.5]

Four data-parallel ranks train a small model, one process each; the last one is slower than the others. A
rank's loss waits for the time of a micro-batch, as a host waits for its device, so that this machine's cores
are not the limit. The seconds of a micro-batch with all that is beside the wait are measured with one rank.
Ways are measured in turns; prints Markdown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from slow_worker import WIDTH, Data, Waiting
from torch import nn

from shoal.machine.bench.report import describe
from shoal.predict.planner.heterogeneous import in_proportion
from shoal.spec.plan import Plan, Shares
from shoal.train import OptimizerConfig, Trainer

__all__ = ["main"]

RANKS = 4
MICRO_BATCHES = 28  # of all ranks together
SECONDS = 0.02  # of a micro-batch on a rank that is not slow


def work(plan: str, rank: int, batch: int, steps: int, seconds: float, port: int, told: Any) -> None:
    """Train as one rank; tell the rank, the median seconds of a step, and its micro-batches."""
    torch.set_num_threads(1)
    ranks = Plan.parse(plan).ranks
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("shoal", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    loss = Waiting(seconds)
    trainer = Trainer(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        Data(),
        plan,
        batch=batch,
        steps=steps,
        loss=loss,
        optimizer=OptimizerConfig(learning_rate=1e-4, clip=None),
    )
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        trainer.step().loss  # noqa: B018  # waits for the step's end
        taken.append(time.perf_counter() - began)
    told.put((rank, median(taken[2:]), loss.times // steps))
    trainer.close()
    if ranks > 1:
        dist.destroy_process_group()


def measured(plan: str, speeds: Sequence[float], batch: int, steps: int) -> tuple[float, list[int]]:
    """Return the seconds of a step and each rank's micro-batches, on ranks that take this long for one."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        context.Process(target=work, args=(plan, rank, batch, steps, seconds, port, told))
        for rank, seconds in enumerate(speeds)
    ]
    for process in processes:
        process.start()
    ranks = sorted(told.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(30)
    return max(seconds for _, seconds, _ in ranks), [number for _, _, number in ranks]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--pace", type=float, default=0.5, help="rate of the slow rank; default 0.5")
    parser.add_argument("--steps", type=int, default=10, help="steps of a training; default 10")
    options = parser.parse_args(arguments)
    each = MICRO_BATCHES // RANKS
    beside = measured("dp=1,microbatch=1", [SECONDS], each, options.steps)[0] / each - SECONDS
    speeds = [SECONDS] * (RANKS - 1) + [SECONDS / options.pace]
    taken = [seconds + beside for seconds in speeds]
    numbers = in_proportion(taken, MICRO_BATCHES)
    assert numbers is not None
    shares = {"equal": [each] * RANKS, str(Shares.of(numbers)): numbers}
    found: dict[str, list[float]] = {text: [] for text in shares}
    for turn in range(options.rounds):
        for text in shares if turn % 2 == 0 else reversed(shares):
            plan = f"dp={RANKS},microbatch=1,shares={text}"
            found[text].append(measured(plan, speeds, MICRO_BATCHES, options.steps)[0])
    print(
        f"{describe()}\n\nA micro-batch takes {taken[0] * 1e3:.1f} ms on three ranks and "
        f"{taken[-1] * 1e3:.1f} ms on the last; {MICRO_BATCHES} micro-batches a step, {options.steps} steps; "
        f"median and range of {options.rounds} rounds.\n\n| shares | ms a step | predicted | error |\n"
        "| --- | --- | --- | --- |"
    )
    for text, seconds in found.items():
        longest = max(number * one for number, one in zip(shares[text], taken, strict=True))
        ms, low, high = (1e3 * take(seconds) for take in (median, min, max))
        error = longest * 1e3 / ms - 1
        print(f"| {text} | {ms:.0f} ({low:.0f} to {high:.0f}) | {1e3 * longest:.0f} | {error:+.1%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
