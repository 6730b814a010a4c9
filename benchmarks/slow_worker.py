"""Training with a worker that is slower than the others, or absent for a while: measured beside predicted.

    python benchmarks/slow_worker.py [--rounds 5] [--slower 3] [--absent 3]

Four workers train a small model, one process each. A worker's loss waits for the time of a share, as a host
waits for its device, so that this machine's cores are not the limit. Measured first: the seconds of a share
with one worker, and of an exchange and of an average with four. From these `shoal.predict.simulate.course_of`
predicts the shares a second of every way of exchange. All are measured in turns; prints Markdown.

Then all workers are equally fast, and one is lost: it is killed, and begins anew after some seconds. Servers
go on with the others. Without servers all need it: there it is stopped for these seconds, which is less than
what a restart from a checkpoint takes.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.machine.bench.report import describe
from shoal.parallel.exchange.server import Server, Servers
from shoal.predict.simulate import Meeting, course_of
from shoal.spec.plan import Plan
from shoal.train import OptimizerConfig, Runtime, Trainer

__all__ = ["main"]

WORKERS = 4
SHARE = 0.04  # seconds of a share of a worker that is not slow
WIDTH = 256
EVERY = 10
LOST = 1.0  # seconds after the beginning, at which a worker is lost

WAYS = {
    "in each step": "dp=4",
    "merges": f"dp=4,exchange=local,every={EVERY}",
    "servers, in rounds": "dp=4,exchange=server",
    "servers, staleness=4": "dp=4,exchange=server,staleness=4",
    "servers, staleness=inf": "dp=4,exchange=server,staleness=inf",
    "servers, merges, quorum=3": f"dp=4,exchange=local,every={EVERY},servers=1,quorum=3,grace=0.05",
}


class Data(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random samples."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = torch.full((WIDTH,), 0.01 * index)
        return sample, sample


class Waiting:
    """A loss that takes a time, as if a device computed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.times = 0  # that it was called

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.times += 1
        time.sleep(self._seconds)
        return nn.functional.mse_loss(output, targets)


def work(
    plan: str, number: int, steps: int, seconds: float, address: Any, port: int, ready: Any, told: Any
) -> None:
    """Train as one worker; tell when it ended."""
    torch.set_num_threads(1)
    workers = Plan.parse(plan).dp
    if address is None and workers > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        dist.init_process_group("shoal", rank=number, world_size=workers)
    servers = None if address is None else Servers([address], "word")
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
        Data(),
        plan,
        batch=2 * workers,
        steps=steps,
        loss=Waiting(seconds),
        optimizer=OptimizerConfig(learning_rate=1e-4, clip=None),
        runtime=Runtime(servers=servers),
    )
    ready.wait()
    while trainer.step_count < steps:
        trainer.step()
    told.put(time.time())
    trainer.exchange.leave()
    trainer.close()


def serve(told: Any) -> None:
    """Serve as the parameter server."""
    server = Server(0, "word")
    told.put(server.address)
    server.run()


def measured(plan: str, speeds: Sequence[float], steps: int, absent: float = 0.0) -> float:
    """Return the shares a second of workers that take these seconds for a share.

    Args:
        plan: The Plan.
        speeds: Seconds of a share, by worker.
        steps: Steps of the training.
        absent: Seconds for which worker 0 is absent.
    """
    context = multiprocessing.get_context("fork")
    told, addresses = context.Queue(), context.Queue()
    ready = context.Barrier(len(speeds) + 1)
    processes, address = [], None
    if Plan.parse(plan).exchanged.is_served:
        processes.append(context.Process(target=serve, args=(addresses,)))
        processes[0].start()
        address = addresses.get()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for number, each in enumerate(speeds):
        arguments = (plan, number, steps, each, address, port, ready, told)
        processes.append(context.Process(target=work, args=arguments))
        processes[-1].start()
    ready.wait()
    began = time.time()
    if absent:
        first = processes[-len(speeds)]
        time.sleep(LOST)
        os.kill(first.pid, signal.SIGSTOP if address is None else signal.SIGKILL)
        time.sleep(absent)
        if address is None:
            os.kill(first.pid, signal.SIGCONT)
        else:
            arguments = (plan, 0, steps, speeds[0], address, port, context.Barrier(1), told)
            processes.append(context.Process(target=work, args=arguments))
            processes[-1].start()
    ends: list[float] = [told.get(timeout=300) for _ in speeds]
    for process in processes:
        process.join(30)
    return steps * len(speeds) / (max(ends) - began)


def meeting_under(plan: str, exchange: float, average: float) -> Meeting:
    """Return how workers meet, with the measured seconds of an exchange with a server and of an average."""
    exchanged = Plan.parse(plan).exchanged
    every = exchanged.every if exchanged.merges else 1
    if not exchanged.is_served:
        return Meeting(every=every, alone=average / 2)
    return Meeting(
        every=every,
        staleness=exchanged.staleness,
        quorum=exchanged.quorum,
        grace=exchanged.grace,
        alone=exchange / 2,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--slower", type=float, default=3.0, help="factor of worker 0; default 3")
    parser.add_argument("--steps", type=int, default=60, help="steps of a training; default 60")
    parser.add_argument("--absent", type=float, default=3.0, help="seconds that worker 0 is lost; default 3")
    options = parser.parse_args(arguments)
    slow, equal = [SHARE * options.slower, *[SHARE] * (WORKERS - 1)], [SHARE] * WORKERS
    # The others must not have ended when the lost worker comes back, and starting should tell little.
    longer = max(options.steps, math.ceil(2 * (LOST + options.absent) / SHARE))
    costs: list[tuple[float, float, float]] = []
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    lost: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.rounds):
        own = 1 / measured("dp=1", [SHARE], longer)
        served, together = (
            WORKERS / measured(plan, equal, longer) for plan in ("dp=4,exchange=server", "dp=4")
        )
        costs.append((own, served - own, together - own))
        for way in WAYS if turn % 2 == 0 else reversed(WAYS):
            found[way].append(measured(WAYS[way], slow, options.steps))
            lost[way].append(measured(WAYS[way], equal, longer, options.absent))
    share, exchange, average = (median(each) for each in zip(*costs, strict=True))
    extra = share - SHARE
    print(
        f"{describe()}\n\nA share takes {share * 1e3:.1f} ms, an exchange with a server "
        f"{exchange * 1e3:.1f} ms, an average {average * 1e3:.1f} ms. {WORKERS} workers, one of which takes "
        f"{options.slower:g} times as long for what is waited for in a share; {options.steps} steps, "
        f"{longer} where one is lost; "
        f"median and range of {options.rounds} rounds."
    )

    def predicted(way: str, seconds: Sequence[float], steps: int, absent: float = 0.0) -> float:
        meeting, each = meeting_under(WAYS[way], exchange, average), [one + extra for one in seconds]
        shares, is_served = WORKERS * steps, Plan.parse(WAYS[way]).exchanged.is_served
        if is_served and absent:
            return course_of(meeting, each, shares, {0: (LOST, LOST + absent)}).rate
        return shares / (course_of(meeting, each, shares).seconds + absent)

    print(table("One slow worker", found, {way: predicted(way, slow, options.steps) for way in WAYS}))
    lost_for = f"One worker lost for {options.absent:g} s, and back"
    print(table(lost_for, lost, {way: predicted(way, equal, longer, options.absent) for way in WAYS}))
    return 0


def table(title: str, found: Mapping[str, Sequence[float]], predicted: Mapping[str, float]) -> str:
    """Return a section in Markdown: shares a second, by way of exchange, beside those predicted."""
    first = next(iter(found))
    base = median(found[first]), predicted[first]
    lines = [
        f"\n## {title}\n",
        "| way | shares/s | predicted | error | against each step, measured | predicted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for way, rates in found.items():
        rate, expected = median(rates), predicted[way]
        lines.append(
            f"| {way} | {rate:.1f} ({min(rates):.1f} to {max(rates):.1f}) | {expected:.1f} | "
            f"{expected / rate - 1:+.1%} | {rate / base[0]:.2f} | {expected / base[1]:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
