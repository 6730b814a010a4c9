"""Training with state in files or in memory, beside DeepSpeed's offload: seconds a step, memory, losses.

    python benchmarks/tiers_deepspeed.py [--layers 12] [--rounds 5] [--folder DIR] [--only NAME,NAME]

One rank trains the model of `tiers.py` in fp32, from the same weights on the same batches, with AdamW and the
norm of the gradients clipped. Each contestant has a process of its own with one compute thread; in each round
every process makes its steps in turn, every other round in the reverse order.

Memory is the most private resident memory of a process (RssAnon) beyond what it had before the model was
made, in the steps after the first, so that what only the start needs does not count.

DeepSpeed's buffers are as large as they have to be: its defaults are for models of billions of parameters,
and hold this one whole. `zero.Init` gives it the dtype fp32, which `deepspeed.initialize` alone takes for
bf16 on a CPU without fp16. Its NVMe tier needs libaio with its header (Debian: libaio-dev). Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from tiers import BATCH, SEQUENCE, STEPS, Contestant, shape_of, spread

from shoal.data import Loader, as_samples
from shoal.machine.bench import describe
from shoal.models import build, next_token_loss, preset
from shoal.spec.workload import transformer_shape, workload_of
from shoal.train import OptimizerConfig, Runtime, Trainer
from shoal.units import format_bytes

SEED, CLIP = 0, 1.0
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
BLOCK = 4_200_000
"""Elements of a block: how far DeepSpeed reads ahead."""
LARGEST = 1_100_000
"""Elements of the largest parameter, for DeepSpeed's buffers."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant.

    Attributes:
        made: Called in its process with `argument`, layers and the folder; returns the step.
        argument: A Plan's text, or the devices that DeepSpeed keeps state on.
        peer: Name of the entry that it is compared with.
    """

    made: Callable[[Any, Path], Callable[[], float]]
    argument: Any
    peer: str | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """What the entries did, by name.

    Attributes:
        seconds: A step's median of each round.
        memory: Most private bytes in any round.
        processor: Processor seconds of each step, of all threads.
        losses: The loss of each step.
    """

    seconds: dict[str, list[float]]
    memory: dict[str, int]
    processor: dict[str, list[float]]
    losses: dict[str, list[float]]


# -- the step -------------------------------------------------------------------------------------------


def metered(spec: tuple[str, int], folder: Path) -> Callable[[], tuple[float, float]]:
    """Return a step of an entry that returns its loss, and the processor seconds of all threads."""
    name, layers = spec
    step = ENTRIES[name].made((ENTRIES[name].argument, layers), folder)

    def both() -> tuple[float, float]:
        began = time.process_time()
        return step(), time.process_time() - began

    return both


def samples() -> Any:
    tokens = torch.randint(64, (16, SEQUENCE + 1), generator=torch.Generator().manual_seed(SEED))
    return as_samples([(row[:-1], row[1:]) for row in tokens])


def shoal(spec: tuple[str, int], folder: Path) -> Callable[[], float]:
    plan, layers = spec
    trainer = Trainer(
        build("tiny", overrides=shape_of(layers), device="meta"),
        samples(),
        plan,
        batch=BATCH,
        steps=1 << 20,
        optimizer=OptimizerConfig(
            learning_rate=ADAM["lr"],
            betas=ADAM["betas"],
            eps=ADAM["eps"],
            weight_decay=ADAM["weight_decay"],
            clip=CLIP,
            schedule="constant-then-decay",
            warmup=0,
            decay=0.0,
        ),
        seed=SEED,
        runtime=Runtime(offload_folder=folder),
    )
    return lambda: float(trainer.step().loss)


def with_deepspeed(spec: tuple[dict[str, Any], int], folder: Path) -> Callable[[], float]:
    options, layers = spec
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    folder = Path(tempfile.mkdtemp(dir=folder))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": LARGEST,
            "reduce_bucket_size": LARGEST,
            "stage3_prefetch_bucket_size": BLOCK,
            "stage3_max_live_parameters": 2 * BLOCK,
            "stage3_max_reuse_distance": BLOCK,
            **{name: _placed(value, folder) for name, value in options.items()},
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build("tiny", overrides=shape_of(layers))
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            model.initialize_parameter(name, parameter, SEED)
    optimizer = (
        DeepSpeedCPUAdam(model.parameters(), **ADAM)
        if options
        else torch.optim.AdamW(model.parameters(), fused=True, **ADAM)
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batches = Loader(samples(), seed=SEED, batch_size=BATCH).stream(0, 0, 1, BATCH)

    def step() -> float:
        inputs, targets = next(batches)
        loss = next_token_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def _placed(value: Any, folder: Path) -> Any:
    """Return an option of DeepSpeed's ZeRO, with the folder for files if it is a tier."""
    return {**value, "nvme_path": str(folder)} if isinstance(value, dict) else value


CPU = {"device": "cpu", "pin_memory": False}
NVME = {"device": "nvme", "pin_memory": False}
PIPELINED = NVME | {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
NVME_PARAMETERS = NVME | {"max_in_cpu": 0, "buffer_size": LARGEST, "buffer_count": 16}
ALONE = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
"""Without these DeepSpeed's read-ahead of parameters stops with an assertion in the second step."""
FILES = "shard=zero3,offload=optimizer:file+gradients:file+parameters:file"
ENTRIES = {
    "Shoal, all in memory": Entry(shoal, "shard=zero3"),
    "DeepSpeed, all in memory": Entry(with_deepspeed, {}, "Shoal, all in memory"),
    "DeepSpeed, optimizer: cpu": Entry(with_deepspeed, {"offload_optimizer": CPU}, "Shoal, all in memory"),
    "Shoal, optimizer: file": Entry(shoal, "shard=zero3,offload=optimizer:file"),
    "DeepSpeed, optimizer: nvme": Entry(
        with_deepspeed, {"offload_optimizer": NVME}, "Shoal, optimizer: file"
    ),
    "DeepSpeed, optimizer: nvme, pipelined": Entry(
        with_deepspeed, {"offload_optimizer": PIPELINED}, "Shoal, optimizer: file"
    ),
    "Shoal, optimizer, gradients, parameters: file": Entry(shoal, FILES),
    "DeepSpeed, optimizer, parameters: nvme": Entry(
        with_deepspeed,
        {"offload_optimizer": NVME, "offload_param": NVME_PARAMETERS, **ALONE},
        "Shoal, optimizer, gradients, parameters: file",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12, help="layers of 4.2 M parameters; default 12")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--folder", type=Path, help="folder of the files; a temporary one by default")
    parser.add_argument("--only", default="", help="names of entries, between semicolons")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe(), end="\n\n")
    names = [each.strip() for each in options.only.split(";") if each.strip()] or list(ENTRIES)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(names, options.layers, options.rounds, Path(folder))
    report(rows, options.layers)


def measure(names: list[str], layers: int, rounds: int, folder: Path) -> Rows:
    """Return what the entries of these names did, in interleaved rounds."""
    contestants = {name: Contestant(metered, (name, layers), folder) for name in names}
    seconds, processor, losses = ({name: [] for name in names} for _ in range(3))
    rows = Rows(seconds, dict.fromkeys(names, 0), processor, losses)
    for number in range(rounds):
        for name in names[:: -1 if number % 2 else 1]:
            took, most, results = contestants[name].run(STEPS)
            rows.seconds[name].append(median(took))
            rows.memory[name] = max(rows.memory[name], most)
            rows.processor[name] += [processor for _, processor in results]
            rows.losses[name] += [loss for loss, _ in results]
    for each in contestants.values():
        each.close()
    return rows


def report(rows: Rows, layers: int) -> None:
    shape = preset("tiny").model_dump() | shape_of(layers)
    parameters = workload_of(transformer_shape(shape)).parameters
    print(
        f"{parameters / 1e6:.0f} M parameters; {BATCH} x {SEQUENCE} tokens a step; DeepSpeed "
        f"{deepspeed.__version__}; load {os.getloadavg()[1]:.1f}.\n"
    )
    print("| | memory | s a step | step over Shoal's | processor s a step | largest difference of losses |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    reference = rows.losses[min(rows.losses, key=list(ENTRIES).index)]
    for name, seconds in rows.seconds.items():
        peer = rows.seconds.get(ENTRIES[name].peer or "")
        ratio = spread([here / there for here, there in zip(seconds, peer, strict=True)]) if peer else ""
        difference = max(abs(here - there) for here, there in zip(rows.losses[name], reference, strict=True))
        print(
            f"| {name} | {format_bytes(rows.memory[name])} | {spread(seconds)} | {ratio} | "
            f"{spread(rows.processor[name])} | {difference:.0e} |"
        )


if __name__ == "__main__":
    main()
