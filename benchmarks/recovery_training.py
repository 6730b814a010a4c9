"""The training of the peers of recovery.py, as their documentation teaches it: DDP over gloo.

    torchrun --nproc-per-node 2 --max-restarts 3 recovery_training.py ddp        # torchelastic
    torchrun --nproc-per-node 1 --max-restarts 3 recovery_training.py torchft    # each replica group

It imports torch alone, since a rank that is started again imports all that its program needs. The model has
the shape of Shoal's preset. What it has to know is in the environment: `RECOVERY_FOLDER`, `RECOVERY_MODEL`
(see `shape_of` in recovery_contestants.py) and `RECOVERY_EVERY`, steps between two saves; `RECOVERY_TURN`
makes it wait before every so many steps, as recovery_gate.py says.

Each rank appends a line for each step that it has made to `steps-RANK.jsonl`: `step`, `begin` and `end` in
seconds since the epoch, `loss`, `ranks`, and `mark`, a sum of some weights.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from recovery_gate import pass_gate
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(os.environ["RECOVERY_FOLDER"])
SHAPE = json.loads(os.environ["RECOVERY_MODEL"])
EVERY = int(os.environ["RECOVERY_EVERY"])


class Block(nn.Module):
    """Attention and a gated layer, each after a norm and beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        hidden, self.heads, self.kv_heads = SHAPE["hidden"], SHAPE["heads"], SHAPE["kv_heads"]
        self.width = hidden // self.heads
        self.before_attention, self.before_gate = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key_value = nn.Linear(hidden, 2 * self.kv_heads * self.width, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, SHAPE["ffn"], bias=False)
        self.up = nn.Linear(hidden, SHAPE["ffn"], bias=False)
        self.down = nn.Linear(SHAPE["ffn"], hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return hidden states like `x`, [batch, seq, hidden]."""
        normed = self.before_attention(x)
        query = self.query(normed).unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        both = self.key_value(normed).unflatten(-1, (2 * self.kv_heads, self.width)).transpose(1, 2)
        key, value = both.chunk(2, dim=1)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.before_gate(x)
        return x + self.down(silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    """A transformer whose first and last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SHAPE["vocab_size"], SHAPE["hidden"])
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(SHAPE["layers"])))
        self.norm = nn.RMSNorm(SHAPE["hidden"])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens, [batch, seq, vocabulary]."""
        return nn.functional.linear(self.norm(self.blocks(self.embedding(tokens))), self.embedding.weight)


def loss_of(model: nn.Module, step: int, seat: int) -> torch.Tensor:
    """Return the loss of one sequence, which the step and the seat of the rank decide."""
    drawn = torch.Generator().manual_seed(2 * step + seat)
    # Each token is near the one before, so that there is something to learn.
    tokens = torch.randint(4, (1, SHAPE["seq"] + 1), generator=drawn).cumsum(1) % SHAPE["vocab_size"]
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Steps:
    """The file of the steps that this rank has made."""

    def __init__(self, seat: int, model: Model) -> None:
        self._file = open(FOLDER / f"steps-{seat}.jsonl", "ab", buffering=0)  # noqa: SIM115, until the end
        self._weight = model.norm.weight

    def made(self, step: int, begin: float, loss: torch.Tensor, ranks: int) -> None:
        """Append a step."""
        told = {"step": step, "begin": begin, "end": time.time(), "loss": loss.item(), "ranks": ranks}
        self._file.write(json.dumps({**told, "mark": self._weight.double().sum().item()}).encode() + b"\n")


def save(step: int, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Save the state so that a crash leaves the file before."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, FOLDER / "snapshot.tmp")
    os.replace(FOLDER / "snapshot.tmp", FOLDER / "snapshot.pt")


def train_with_ddp() -> None:
    """Train as torchelastic's documentation teaches: load the last snapshot, and save one now and then."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, step = Model(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if (FOLDER / "snapshot.pt").exists():
        state = torch.load(FOLDER / "snapshot.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    parallel, steps = DistributedDataParallel(model, gradient_as_bucket_view=True), Steps(rank, model)
    while True:
        pass_gate(step)
        begin = time.time()
        optimizer.zero_grad()
        loss = loss_of(parallel, step, rank)
        loss.backward()
        optimizer.step()
        step += 1
        steps.made(step, begin, loss, ranks)
        if EVERY and step % EVERY == 0 and rank == 0:
            save(step, model, optimizer)


def train_with_torchft() -> None:
    """Train as torchft's train_ddp.py does, with a replica group of one rank."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    seat = int(os.environ["REPLICA_GROUP_ID"])
    model = Model()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def state_dict() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"recovery_{seat}",
        timeout=timedelta(seconds=30),
    )
    parallel = DistributedDataParallel(manager, model, gradient_as_bucket_view=True)
    optimizer, steps = Optimizer(manager, plain), Steps(seat, model)
    while True:
        step = manager.current_step()
        pass_gate(step)
        begin = time.time()
        optimizer.zero_grad()
        loss = loss_of(parallel, step, seat)
        loss.backward()
        optimizer.step()
        if manager.current_step() == step:
            continue  # the step was given up
        step = manager.current_step()
        steps.made(step, begin, loss, manager.num_participants())
        if EVERY and step % EVERY == 0 and manager.participating_rank() == 0:
            save(step, model, plain)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    {"ddp": train_with_ddp, "torchft": train_with_torchft}[sys.argv[1]]()
