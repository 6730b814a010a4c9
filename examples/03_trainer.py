"""shoal.Trainer with a model and data of one's own: a Run with metrics, a checkpoint and a Timeline.

python examples/03_trainer.py FOLDER, or torchrun --nproc-per-node 2 examples/03_trainer.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from shoal import Plan, Trainer
from shoal.launch.local import World, find_world, join
from shoal.spec.timeline import Timeline, explain
from shoal.train import OptimizerConfig

STEPS = 60


def main(folder: Path) -> None:
    world = find_world() or World(rank=0, ranks=1, local_rank=0, master=("", 0))
    join(world, torch.device("cpu"), timeout=600)

    torch.manual_seed(0)
    inputs = torch.randn(1024, 8)
    data = TensorDataset(inputs, inputs.sort().values)  # pairs of inputs and targets
    trainer = Trainer(
        nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)),
        data,
        Plan(dp=world.ranks, shard="zero2"),
        batch=32,
        steps=STEPS,
        loss=F.mse_loss,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup=10),
        run=folder,
    )
    while trainer.step_count < STEPS:
        result = trainer.step()
        if world.rank == 0 and result.step % 20 == 0:
            print(f"step {result.step}  loss {result.loss:.3f}")
    checkpoint = trainer.save()
    trainer.load(checkpoint)  # as a run that goes on would
    loss = trainer.validate(data, 256)
    trainer.close()

    if world.rank == 0:
        parts = explain(Timeline(Timeline.read(folder / "timeline").of(0))).parts
        print(f"saved {checkpoint}, loss {loss:.3f}")
        print(f"a step takes {parts.wall * 1e3:.2f} ms, of which {parts.compute / parts.wall:.0%} is compute")
        print(f"shoal report {folder} tells more")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
