"""What trains over slow links: Shoal with each way of exchange, and its peers, as their users write them.

All train the same model from the same weights on the same samples, with fused AdamW and the gradient's norm
clipped to 1, in fp32. All methods of one rank live in one process, one after another at work: a turn is a few
steps, and for local updates whole rounds.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.utils import clip_grad_norm_

import shoal
from shoal.data import DataConfig, Loader, TokenSamples, prepare
from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel.exchange.server import Servers
from shoal.spec.plan import Plan, SettledPlan
from shoal.train import OptimizerConfig, Runtime

__all__ = [
    "ALONE",
    "DENSE",
    "MODEL",
    "NEVER",
    "SEQUENCES",
    "TOKEN",
    "Method",
    "Seat",
    "Step",
    "make_trainer",
    "methods",
    "plan_of",
    "why_absent",
]

Step = Callable[[], object]
"""Makes one optimizer step on this rank."""

MODEL = TransformerConfig(
    vocab_size=256, layers=4, hidden=256, heads=4, kv_heads=4, ffn=704, seq=64, tie_embeddings=True
)
"""3.3 million parameters: gradients of 13.1 MB, and 27 ms of a core for a sequence."""

SEQUENCES = 1  # of a worker in a step, unless something else is asked for
_ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "fused": True,
}
_CLIP = 1.0
_ONE_BUCKET = 1000.0  # MiB
_LIGHTHOUSE_PORT, _STORE_PORT = 29510, 29511  # of torchft

ALONE = "no exchange"
"""Workers that have nothing to do with each other: what a step costs at least."""

NEVER = "exchange=local,every=100000"
"""The Plan of such workers: they never come to a merge."""

DENSE = "bucketed"
"""Shoal's exchange of whole gradients in every step."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a method runs.

    Attributes:
        rank, workers: This rank, and the number of ranks; each is a worker.
        address, first_address: The IP addresses of this rank's host, and of the first rank's.
        servers: Addresses and ports of the method's parameter servers.
    """

    rank: int
    workers: int
    address: str = "127.0.0.1"
    first_address: str = "127.0.0.1"
    servers: tuple[tuple[str, int], ...] = ()

    @property
    def batch(self) -> int:
        """Sequences in a step, over all workers."""
        return SEQUENCES * self.workers


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train.

    Attributes:
        name: Name in the table.
        build: Makes the step of a rank; all ranks call it together.
        round: Steps that belong together: a turn has a multiple of them.
        exchange: For Shoal's methods, the Plan's text without `dp`.
        package: Name of the package to install for it, beside torch and Shoal.
    """

    name: str
    build: Callable[[Seat], Step]
    round: int = 1
    exchange: str | None = None
    package: str | None = None

    @property
    def servers(self) -> int:
        """Number of parameter servers, each on a host of its own."""
        return 0 if self.exchange is None else plan_of(self.exchange, 2).exchanged.processes


def plan_of(exchange: str, workers: int) -> SettledPlan:
    """Return the Plan of one of Shoal's methods."""
    return SettledPlan.of(
        Plan.parse(",".join(filter(None, (f"dp={workers}", exchange)))), SEQUENCES * workers
    )


def methods(torchft: bool) -> list[Method]:
    """Return what is measured, in the order of the table.

    Args:
        torchft: Whether torchft's DiLoCo is among it.
    """
    return [
        _shoal(ALONE, NEVER, round=1),
        Method("torch DDP, gloo", partial(_ddp, hook=None)),
        Method("torch DDP, PowerSGD rank 2", partial(_ddp, hook=2)),
        *([Method("torchft DiLoCo, every=20", _torchft, round=20, package="torchft")] if torchft else []),
        _shoal(DENSE, ""),
        *(_shoal(f"compress={each}", f"compress={each}") for each in COMPRESSIONS),
        *(_shoal(text, text) for text in (*LOCAL, *SERVED)),
    ]


COMPRESSIONS = ("int8", "int4", "fp8", "sign", "topk:64", "topk:64:2bit", "random:64", "threshold:3")
COMPRESSIONS += ("powersgd:2",)
"""What is sent in place of gradients."""

LOCAL = (
    "exchange=local,every=20",
    "exchange=local,every=20,compress=int8",
    "exchange=local,every=20,compress=topk:8:2bit",
    "exchange=local,every=30,compress=topk:64:2bit,feedback=0.95",
)
"""Local updates."""

SERVED = (
    "exchange=server,servers=2",
    "exchange=server,servers=2,compress=int8",
    "exchange=local,every=20,servers=2",
)
"""Parameter servers, on hosts beside those of the workers."""

TOKEN = "slow links"  # that connections to servers begin with


def why_absent(package: str) -> str:
    """Return why a package cannot be measured; empty if it can."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return ""


# -- Shoal ----------------------------------------------------------------------------------------------


def make_trainer(exchange: str, seat: Seat) -> shoal.Trainer:
    """Return a Trainer that does what the peers' loops do, in the default process group if there is one."""
    servers = Servers(seat.servers, TOKEN) if seat.servers else None
    return shoal.Trainer(
        _model(),
        samples(),
        plan_of(exchange, seat.workers),
        batch=seat.batch,
        steps=1_000_000,  # more than are made, so that the learning rate stays as it is
        optimizer=OptimizerConfig(
            learning_rate=_ADAMW["lr"],
            betas=_ADAMW["betas"],
            eps=_ADAMW["eps"],
            weight_decay=_ADAMW["weight_decay"],
            clip=_CLIP,
            schedule="constant-then-decay",
            warmup=0,
            decay=0.0,
        ),
        runtime=Runtime(servers=servers),
    )


def samples() -> TokenSamples:
    """Return the source of Python's standard library, as bytes."""
    return prepare(DataConfig()).samples("train", MODEL.seq)


def _shoal(name: str, exchange: str, round: int | None = None) -> Method:
    plan = plan_of(exchange, 2)
    own = plan.every if plan.exchanged.merges else 1
    return Method(name, partial(_train, exchange), own if round is None else round, exchange)


def _train(exchange: str, seat: Seat) -> Step:
    return make_trainer(exchange, seat).step


# -- peers ----------------------------------------------------------------------------------------------


def _model() -> Transformer:
    model = Transformer(MODEL)
    model.initialize(0)
    return model


def _loop(seat: Seat, forward: Callable[[torch.Tensor], torch.Tensor], model: Any, optimizer: Any) -> Step:
    loader = Loader(samples(), seed=0, batch_size=seat.batch)
    batches: Iterator[Any] = loader.stream(0, seat.rank, seat.workers, SEQUENCES)
    parameters = list(model.parameters())

    def step() -> float:
        inputs, targets = next(batches)
        loss = next_token_loss(forward(inputs), targets)
        loss.backward()
        clip_grad_norm_(parameters, _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _ddp(seat: Seat, hook: int | None) -> Step:
    """DDP over gloo; `hook` is the rank of PowerSGD's factors.

    With PowerSGD there is one bucket: its hook starts collectives when others end, and with several buckets
    the order of these differs between ranks, which gloo does not survive.
    """
    group = dist.new_group(backend="gloo")
    model = torch.nn.parallel.DistributedDataParallel(
        _model(),
        process_group=group,
        gradient_as_bucket_view=True,
        bucket_cap_mb=None if hook is None else _ONE_BUCKET,
    )
    if hook is not None:
        state = powerSGD_hook.PowerSGDState(
            process_group=group, matrix_approximation_rank=hook, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _loop(seat, model, model, torch.optim.AdamW(model.parameters(), **_ADAMW))


def _torchft(seat: Seat) -> Step:
    """DiLoCo of torchft: each worker is a replica group with a store; the first has the lighthouse."""
    socket.gethostname = lambda: seat.address  # torchft tells others this name, and hosts share theirs
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    lighthouse = None
    if seat.rank == 0:
        lighthouse = LighthouseServer(bind=f"[::]:{_LIGHTHOUSE_PORT}", min_replicas=seat.workers)
    dist.barrier()
    store = dist.TCPStore(seat.address, _STORE_PORT, is_master=True, wait_for_workers=False)
    model = _model()
    inner = torch.optim.AdamW(model.parameters(), **_ADAMW)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=seat.workers,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=seat.address,
        store_port=_STORE_PORT,
        lighthouse_addr=f"http://{seat.first_address}:{_LIGHTHOUSE_PORT}",
        replica_id=f"worker_{seat.rank}",
        hostname=seat.address,
        init_sync=False,
    )
    diloco = DiLoCo(manager, [model], inner, outer, sync_every=20, backup_device=torch.device("cpu"))
    diloco.__enter__()
    step = _loop(seat, model, model, inner)
    step.__dict__["held"] = (lighthouse, store, manager, diloco)  # they live as long as the step
    return step
