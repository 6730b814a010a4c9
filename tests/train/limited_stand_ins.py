"""A training in a process of its own, below a limit: `python limited_stand_ins.py PLAN LIMIT FOLDER`.

LIMIT is in MiB, 0 for none. Private memory counts: tensors, the interpreter, libraries and stacks of threads,
but not the page cache. Prints an object for JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from pathlib import Path

import torch

from shoal.data import as_samples
from shoal.models import build
from shoal.train import OptimizerConfig, Runtime, Trainer, TrainingData

STEPS, BATCH, SEQUENCE = 3, 2, 32
SHAPE = {
    "vocab_size": 64, "layers": 30, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 2048, "seq": SEQUENCE,
}  # fmt: skip


def private_bytes() -> int:
    """Resident bytes of this process that are no file's."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def main(plan: str, limit: str, folder: str) -> None:
    if int(limit):
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit) << 20,) * 2)
    tokens = torch.randint(64, (16, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    data = as_samples([(row[:-1], row[1:]) for row in tokens])
    model = build("tiny", overrides=SHAPE, device="meta")
    before, most, stop = private_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.002):
            most = max(most, private_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        trainer = Trainer(
            model,
            TrainingData(data, sequence=SEQUENCE),
            plan,
            batch=BATCH,
            steps=STEPS,
            optimizer=OptimizerConfig(warmup=1),
            runtime=Runtime(offload_folder=folder),
        )
        losses = [trainer.step().loss for _ in range(STEPS)]
        trainer.close()
    finally:
        stop.set()
        watching.join()
    print(json.dumps({"losses": losses, "private_bytes": most - before, "plan": str(trainer.plan)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
