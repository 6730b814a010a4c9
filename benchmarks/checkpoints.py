"""Saving and loading checkpoints, beside the disk itself and torch.distributed.checkpoint, in turns.

    python benchmarks/checkpoints.py FOLDER [--parameters 128] [--rounds 5]

Two ranks hold a model under `shard=zero3` and AdamW's two moments, as training makes them. In a round each
way saves or loads the same tensors once, every other round in the reverse order. The disk's own rate is that
of two `dd` at once, of blocks of 8 MiB, with fsync at the end when they write. Before each read the system's
cache is emptied, which needs root. Ways that save beside the training stop it for the seconds under "stall";
their buffers are there from a save before. Prints Markdown; FOLDER is on the file system to measure, and has
room for three states.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rounds import Spread
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from shoal.checkpoint import (
    Piece,
    ProcessGroupCoordinator,
    Saver,
    checkpoints,
    load,
    load_verified,
    read_together,
    verify,
)
from shoal.machine.bench.report import describe
from shoal.parallel import Replicas, parallelize
from shoal.record import NullRecorder
from shoal.testing import RankPool
from shoal.train.checkpointer import Checkpointer
from shoal.train.training_state import TrainingState

__all__ = ["main"]

RANKS = 2
WIDTH = 2048
_TIMEOUT = 3600.0  # seconds
DISK, SAVE, BEHIND = "disk (dd, fsync)", "shoal", "shoal, beside the training"
BUFFERED = "shoal, without memory for a copy"
DCP, DCP_ASYNC, DCP_KEPT = "DCP save", "DCP async_save", "DCP async_save, one stager"
DISK_READ, LOAD, VERIFY, DCP_LOAD = "disk (dd)", "shoal load", "shoal verify", "DCP load"
VERIFIED, TWICE = "shoal load, verified", "shoal verify, then load"


class Took(NamedTuple):
    """Seconds of one save or load, from first rank to last.

    Attributes:
        stall: Seconds until the training could go on.
        seconds: Seconds until all was done.
        processor: Seconds of the processor that all ranks took together.
    """

    stall: float
    seconds: float
    processor: float


class State:
    """A model and its optimizer on one rank, with what each way needs to save them."""

    def __init__(self, folder: Path, parameters: int) -> None:
        layers = max(1, parameters // WIDTH**2)
        self.folder, self.step = folder, 0
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.parallel = parallelize(model, f"dp={RANKS},shard=zero3")
        optimizer = torch.optim.AdamW(self.parallel.parameters(), lr=1e-3)
        for each in self.parallel.parameters():
            each.grad = torch.randn_like(each)
        optimizer.step()
        self.parallel.zero_grad()
        held = [state for state in optimizer.state.values() for state in state.values()]
        self.bytes = RANKS * sum(local(each).nbytes for each in (*self.parallel.parameters(), *held))
        self.ranks = ProcessGroupCoordinator()
        replicas = Replicas(self.parallel, 0)
        self.state = TrainingState(self.parallel, optimizer, self.ranks, replicas, plan="benchmark", seed=0)
        self.checkpointer = Checkpointer(self.state, lambda path: None, NullRecorder(), self.ranks)
        self.saver = Saver()
        names = {parameter: name for name, parameter in self.parallel.named_parameters()}
        self.tensors: dict[str, Any] = {"model": dict(self.parallel.named_parameters())}
        for key in ("exp_avg", "exp_avg_sq"):
            self.tensors[key] = {names[each]: state[key] for each, state in optimizer.state.items()}
        self.wanted: list[Piece] = []
        self.stager = DefaultStager(StagingOptions(False, False, False, False))  # the rest needs a GPU

    def write(self, way: str, *, alone: bool = True) -> Took:
        """Save once, in one way, into a folder that is empty if it is to be alone there."""
        self.step += 1
        if alone:
            empty(self.folder, keep="random")
        return timed(lambda began: getattr(self, WRITES[way])(began))

    def read(self, way: str) -> Took:
        """Load once, in one way, with an empty cache."""
        self.wanted = self.state.pieces()
        forget_cache()
        return timed(lambda began: getattr(self, READS[way])(began))

    def disk(self, began: float) -> float:
        dd(self.folder, f"if={self.folder}/random", f"of={self.folder}/disk", self.bytes, "conv=fsync")
        return time.perf_counter() - began

    def disk_read(self, began: float) -> float:
        dd(self.folder, f"if={self.folder}/disk", "of=/dev/null", self.bytes)
        return time.perf_counter() - began

    def save(self, began: float) -> float:
        self.checkpointer.save(self.folder, self.step, {})
        return time.perf_counter() - began

    def save_buffered(self, began: float) -> float:
        pieces, kept = self.state.to_save(self.folder, self.step, {})
        self.saver.save(self.folder, self.step, pieces, kept, self.ranks)
        return time.perf_counter() - began

    def save_behind(self, began: float) -> float:
        begun = self.checkpointer.begin(self.folder, self.step, {})
        assert not begun.in_step, begun.in_step
        stall = time.perf_counter() - began
        self.checkpointer.finish()
        return stall

    def dcp_save(self, began: float) -> float:
        dcp.save(self.tensors, checkpoint_id=self.folder / "dcp")
        return time.perf_counter() - began

    def dcp_async(self, began: float, stager: DefaultStager | None = None) -> float:
        future = dcp.async_save(self.tensors, checkpoint_id=self.folder / "dcp", async_stager=stager)
        stall = time.perf_counter() - began
        future.result()
        return stall

    def dcp_kept(self, began: float) -> float:
        return self.dcp_async(began, self.stager)

    def load(self, began: float) -> float:
        load(checkpoints(self.folder)[0], self.wanted, self.ranks)
        return time.perf_counter() - began

    def verify(self, began: float) -> float:
        verify(checkpoints(self.folder)[0], self.ranks)
        return time.perf_counter() - began

    def load_verified(self, began: float) -> float:
        path = checkpoints(self.folder)[0]
        in_use = [piece for piece in self.wanted if piece.name.startswith("model/")]
        fresh = [piece for piece in self.wanted if not piece.name.startswith("model/")]
        load_verified(path, read_together(path, self.ranks), self.ranks, fresh=fresh, in_use=in_use)
        return time.perf_counter() - began

    def verify_then_load(self, began: float) -> float:
        self.verify(began)
        return self.load(began)

    def dcp_load(self, began: float) -> float:
        dcp.load(self.tensors, checkpoint_id=self.folder / "dcp")
        return time.perf_counter() - began


WRITES = {
    DISK: "disk",
    SAVE: "save",
    BEHIND: "save_behind",
    BUFFERED: "save_buffered",
    DCP: "dcp_save",
    DCP_ASYNC: "dcp_async",
    DCP_KEPT: "dcp_kept",
}
READS = {
    DISK_READ: "disk_read",
    LOAD: "load",
    VERIFY: "verify",
    VERIFIED: "load_verified",
    TWICE: "verify_then_load",
    DCP_LOAD: "dcp_load",
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def timed(work: Callable[[float], float]) -> Took:
    dist.barrier()
    began, before = time.perf_counter(), sum(os.times()[:4])
    stall = torch.tensor([work(began)])
    processor = torch.tensor([sum(os.times()[:4]) - before])
    dist.barrier()
    seconds = time.perf_counter() - began
    dist.all_reduce(stall, dist.ReduceOp.MAX)
    dist.all_reduce(processor)
    return Took(stall.item(), seconds, processor.item())


def dd(folder: Path, source: str, target: str, size: int, *more: str) -> None:
    """Copy this rank's part of `size` bytes."""
    own = f"-{dist.get_rank()}"
    source, target = (each + own if each.endswith(("random", "disk")) else each for each in (source, target))
    blocks = size // RANKS // (8 << 20)
    command = ["dd", source, target, "bs=8M", f"count={blocks}", "status=none", *more]
    subprocess.run(command, check=True, cwd=folder)


def empty(folder: Path, keep: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif keep not in path.name:
                path.unlink()
        os.sync()
    dist.barrier()


def forget_cache() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    dist.barrier()


def work(folder: Path, parameters: int, rounds: int) -> tuple[int, dict[str, list[Took]]]:
    """Measure as one rank; return the bytes of the state and what each way took."""
    torch.set_num_threads(1)
    state = State(folder, parameters)
    # What dd copies: random, and in memory, so that only writing costs.
    memory = Path(f"/dev/shm/shoal-checkpoints-{dist.get_rank()}")
    memory.write_bytes(os.urandom(1 << 20) * (state.bytes // RANKS >> 20))
    link = folder / f"random-{dist.get_rank()}"
    link.unlink(missing_ok=True)
    link.symlink_to(memory)
    found: dict[str, list[Took]] = {way: [] for way in (*WRITES, *READS)}
    try:
        state.write(BUFFERED)
        state.write(BEHIND)  # its buffers are there from now on, as in all saves of a run but the first
        state.write(DCP_KEPT)
        for turn in range(rounds):
            for way in list(WRITES) if turn % 2 == 0 else reversed(WRITES):
                found[way].append(state.write(way))
            for way in (DISK, SAVE, DCP):
                state.write(way, alone=way == DISK)
            for way in list(READS) if turn % 2 == 0 else reversed(READS):
                found[way].append(state.read(way))
            if dist.get_rank() == 0:
                print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    finally:
        memory.unlink()
    return state.bytes, found


def table(size: int, found: dict[str, list[Took]], ways: Sequence[str], disk: str) -> str:
    lines = ["| | GB/s | range | over the disk's | range | stall, ms | range | processor, s/GB |"]
    lines.append("| --- | ---: | --- | ---: | --- | ---: | --- | ---: |")
    for way in ways:
        rate = Spread.of([size / took.seconds / 1e9 for took in found[way]])
        pairs = zip(found[disk], found[way], strict=True)
        share = Spread.of([own.seconds / took.seconds for own, took in pairs])
        stall = Spread.of([1e3 * took.stall for took in found[way]])
        cells = [f"{each.median:.2f} | {each.low:.2f} to {each.high:.2f}" for each in (rate, share)]
        cells.append(f"{stall.median:.0f} | {stall.low:.0f} to {stall.high:.0f}")
        cells.append(f"{median(took.processor for took in found[way]) / size * 1e9:.2f}")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="an empty or absent folder on the disk to measure")
    parser.add_argument("--parameters", type=float, default=128, help="millions of parameters; default 128")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    parameters = int(options.parameters * 1e6)
    with RankPool("gloo") as pool:
        told = pool.run(work, RANKS, options.folder.resolve(), parameters, options.rounds, timeout=_TIMEOUT)
    size, found = told[0]
    print(
        f"{describe()}\n\nA state of {size / 1e9:.2f} GB, {options.parameters:g} M parameters with Adam's "
        f"two moments in fp32, on {RANKS} ranks; median and range of {options.rounds} rounds.\n\n"
        f"{table(size, found, list(WRITES), DISK)}\n\n{table(size, found, list(READS), DISK_READ)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
