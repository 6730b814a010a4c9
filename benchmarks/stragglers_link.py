"""Does the verdict name a slow cable among hosts that are one group, where no other group can be compared?

    python benchmarks/stragglers_link.py [--hosts 4] [--ranks 1] [--rate 1] [--slow 0.5] [--rounds 2]

Ranks on emulated hosts (network namespaces, which take root) train a small model under dp. In turn nothing is
slow; the cable of one host sends at a lower rate; it receives at a lower rate; both. The verdict has the
timeline alone, without any predicted time. With several ranks on each host, which share its cable, the ring
is one of hosts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import TensorDataset

from shoal.analyze.diagnosis import Cause, Verdict, verdict
from shoal.predict.simulate import measured_timeline
from shoal.spec.run import Run
from shoal.spec.timeline import Timeline
from shoal.testing.hosts import Hosts, enter_host
from shoal.train import OptimizerConfig, Trainer

_PORT = 29500
_WAYS = {"nothing": (False, False), "sends": (True, False), "receives": (False, True), "both": (True, True)}


def train(
    connection: Connection, rank: int, ranks: int, name: str, host: int, address: str, steps: int
) -> None:
    """Train as a rank on a host, each time that a folder is given."""
    try:
        enter_host(host)
        os.environ |= {"MASTER_ADDR": address, "SHOAL_HOST_ID": name}
        torch.set_num_threads(1)
        store = TCPStore(address, _PORT, ranks, is_master=rank == 0)
        dist.init_process_group("shoal", store=store, rank=rank, world_size=ranks)
        data = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
        while (folder := connection.recv()) is not None:
            torch.manual_seed(0)
            layers = [nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64)]
            trainer = Trainer(
                nn.Sequential(*layers),
                TensorDataset(data, data.sort().values),
                f"dp={ranks}",
                batch=32 * ranks,
                steps=steps,
                loss=F.mse_loss,
                optimizer=OptimizerConfig(warmup=1),
                run=folder,
            )
            for _ in range(steps):
                trainer.step()
            trainer.close()
            connection.send("")
    except EOFError:
        return
    except BaseException:
        connection.send(traceback.format_exc())


def judged(members: list[Connection], folder: Path) -> tuple[Verdict, Timeline]:
    """Return the verdict on a run, and its timeline."""
    for connection in members:
        connection.send(folder)
    for connection in members:
        if failure := connection.recv():
            raise RuntimeError(failure)
    timeline = measured_timeline(Run.open(folder))
    return verdict(timeline), timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each host (default 1)")
    parser.add_argument("--rate", type=float, default=1.0, help="Gbit/s of every cable (default 1)")
    parser.add_argument("--slow", type=float, default=0.5, help="share of it that a slow cable has")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=62)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    randomness, context = random.Random(args.seed), multiprocessing.get_context("spawn")
    rate, right, named, slow, alarms = args.rate * 1e9, 0, 0, 0, 0
    print("| slow | host | step | verdict |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as temporary, Hosts(args.hosts, rate) as hosts:
        members = []
        for rank in range(args.hosts * args.ranks):
            ours, theirs = context.Pipe()
            host = rank // args.ranks
            place = f"host {host}", hosts.process(host), hosts.addresses[0]
            given = theirs, rank, args.hosts * args.ranks, *place, args.steps
            context.Process(target=train, args=given, daemon=True).start()
            members.append(ours)
        for round_ in range(args.rounds):
            for way, (sends, receives) in _WAYS.items():
                late = randomness.randrange(args.hosts)
                hosts.limit(late, args.slow * rate, sends=sends, receives=receives)
                folder = (args.keep or Path(temporary)) / f"{round_}-{way}"
                found, timeline = judged(members, folder)
                hosts.limit(late, rate)
                walls = [span.duration for step in timeline.steps()[2:] if (span := timeline.step(0, step))]
                links = [each for each in found.stragglers if each.cause == Cause.LINK]
                others = len(found.stragglers) - len(links)
                words = "; ".join(f"ranks {each.ranks}, {each.share:.0%}" for each in links) or "nothing"
                words += f", and {others} other causes" if others else ""
                if way == "nothing":
                    alarms += bool(found.stragglers)
                else:
                    slow, named = slow + 1, named + len(found.stragglers)
                    right += any(late * args.ranks in each.ranks for each in links)
                print(f"| {way} | {late} | {1e3 * median(walls):.1f} ms | {words} |", flush=True)
        for connection in members:
            connection.send(None)
    print(
        f"\n{args.hosts} hosts of {args.ranks} ranks, cables of {args.rate:g} Gbit/s, a slow one of "
        f"{args.slow * args.rate:g}: {right} of {slow} slow cables found, {named} named; {alarms} of "
        f"{args.rounds} runs without a slow cable had a straggler"
    )


if __name__ == "__main__":
    main()
