"""Real processes: how `shoal train` ends when it is stopped, or when a rank of it fails."""

from __future__ import annotations

import signal

import pytest
from elastic_stand_ins import Program, shoal, steps_made

from shoal.checkpoint import checkpoints, read_manifest, step_of, verify
from shoal.elastic import EXIT_STOPPED
from shoal.run import Run

ENDLESS = ("--nproc", "2", "--run", "run", "--set", "steps=1000000", "--set", "validation.every=0")

MODEL_THAT_FAILS = """
import os
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.calls = nn.Embedding(256, 8), nn.Linear(8, 256), 0

    def forward(self, tokens):
        self.calls += 1
        if self.calls > 3 and os.environ["RANK"] == "1":
            raise ValueError("the fourth batch is too much")
        return self.head(self.embedding(tokens))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory, tiny_run):
    """Several trainings at a time, since each spends most of its time on importing torch."""
    started = {}
    folders = {}
    for name in ("stopped", "rank killed", "rank raises", "launcher killed"):
        folder = folders[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
        words = ["train", *tiny_run, *ENDLESS]
        if name == "rank raises":
            (folder / "failing.py").write_text(MODEL_THAT_FAILS)
            words = [word for word in words if not word.startswith("model_options")]
            words = [*tiny_run_without_model(words), "--set", "model=failing:Model"]
        started[name] = Program(shoal(*words), folder)
    yield lambda name: (started[name], Run(folders[name] / "run"))
    for program in started.values():
        program.kill()
