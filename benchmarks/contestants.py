"""One optimizer step of the same training through Shoal, torch and others, each as its users write it.

All of them train the same model from the same weights on the same micro-batches, with the same AdamW (fused)
and the gradient's norm clipped to 1, in fp32. What a framework offers for its part of that is used: wrapping,
backward, clipping, the optimizer's step. DDP is told to keep gradients in its buckets, which saves it a copy;
all else is as each framework has it by default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rounds import Step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils import clip_grad_norm_

import shoal
from shoal.collectives import keep_freed_memory, share_buffers
from shoal.data import DataConfig, Loader, TokenSamples, prepare
from shoal.models import Transformer, next_token_loss, preset
from shoal.record import Recorder, SpanRecorder
from shoal.train import OptimizerConfig, Runtime

__all__ = ["ADAMW", "CLIP", "CONTESTANTS", "REFERENCE", "Contestant", "Task", "make_trainer"]

_SEED = 0
CLIP = 1.0
ADAMW: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.0,  # so that nobody needs parameter groups
    "fused": True,
}


@dataclass(frozen=True, slots=True)
class Task:
    """What every contestant trains.

    Attributes:
        preset: Name of the model.
        sequence: Tokens in a sequence.
        microbatch: Sequences in a rank's part of the batch, which is one forward.
        ranks: Number of ranks.
        folder: Where timelines go.
    """

    preset: str
    sequence: int
    microbatch: int
    ranks: int
    folder: Path

    @property
    def batch(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        return self.microbatch * self.ranks

    def model(self) -> Transformer:
        """The model with its first weights, the same on every rank."""
        model = Transformer(preset(self.preset))
        model.initialize(_SEED)
        return model

    def samples(self) -> TokenSamples:
        """The source of Python's standard library, as bytes."""
        return prepare(DataConfig()).samples("train", self.sequence)

    def batches(self, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A rank's inputs and targets, step after step; the Trainer deals out the same."""
        loader = Loader(self.samples(), seed=_SEED, batch_size=self.batch)
        return loader.stream(0, rank, self.ranks, self.microbatch)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to make the step.

    Attributes:
        name: As the table has it.
        build: From the Task and the rank to the step.
        peer: The name of the contestant that it is compared with.
        package: What has to be installed for it, beside torch and Shoal.
        communicates: Whether its ranks train one model; else only the first loss can be that of the others.
        alone: Whether it is one rank by itself, whatever the number of ranks.
    """

    name: str
    build: Callable[[Task, int], Step]
    peer: str | None = None
    package: str | None = None
    communicates: bool = True
    alone: bool = False


def _loop(
    task: Task,
    rank: int,
    *,
    forward: Callable[[torch.Tensor], torch.Tensor],
    update: Callable[[], None],
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
) -> Step:
    """The loop that all but the Trainer have in common."""
    batches = task.batches(rank)

    def step() -> float:
        inputs, targets = next(batches)
        loss = next_token_loss(forward(inputs), targets)
        backward(loss)
        update()
        return loss.item()

    return step


def _update(optimizer: torch.optim.Optimizer, clip: Callable[[], object]) -> Callable[[], None]:
    def update() -> None:
        clip()
        optimizer.step()
        optimizer.zero_grad()

    return update


def _torch_loop(task: Task, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    clip = partial(clip_grad_norm_, list(model.parameters()), CLIP)
    return _loop(task, rank, forward=model, update=_update(optimizer, clip))


def _no_communication(task: Task, rank: int) -> Step:
    model = task.model()
    return _torch_loop(task, rank, model, torch.optim.AdamW(model.parameters(), **ADAMW))


# -- Shoal ----------------------------------------------------------------------------------------------


def _shoal(shard: str, task: Task, rank: int) -> Step:
    dist.init_process_group("shoal")
    model = shoal.parallelize(task.model(), f"dp={task.ranks},shard={shard}")
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return _loop(task, rank, forward=model, update=_update(optimizer, partial(model.clip_gradients, CLIP)))


def make_trainer(task: Task, shard: str, recorder: Recorder) -> shoal.Trainer:
    """Forms the default process group, and in it a Trainer that does what the loops do."""
    dist.init_process_group("shoal")
    return shoal.Trainer(
        task.model(),
        task.samples(),
        f"dp={task.ranks},shard={shard}",
        batch=task.batch,
        steps=1_000_000,  # more than any benchmark makes, so that the rate stays constant
        optimizer=OptimizerConfig(
            learning_rate=ADAMW["lr"],
            betas=ADAMW["betas"],
            eps=ADAMW["eps"],
            weight_decay=ADAMW["weight_decay"],
            clip=CLIP,
            schedule="constant-then-decay",
            warmup=0,
            decay=0.0,
        ),
        seed=_SEED,
        runtime=Runtime(recorder=recorder),
    )


def _shoal_train(task: Task, rank: int) -> Step:
    trainer = make_trainer(task, "none", SpanRecorder(task.folder / f"rank-{rank}.jsonl", rank))
    return lambda: trainer.step().loss


# -- torch ----------------------------------------------------------------------------------------------


def _ddp_model(task: Task, backend: str) -> nn.Module:
    dist.init_process_group(backend)
    return nn.parallel.DistributedDataParallel(task.model(), gradient_as_bucket_view=True)


def _ddp(backend: str, task: Task, rank: int) -> Step:
    model = _ddp_model(task, backend)
    return _torch_loop(task, rank, model, torch.optim.AdamW(model.parameters(), **ADAMW))


def _ddp_zero_redundancy(task: Task, rank: int) -> Step:
    model = _ddp_model(task, "gloo")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    return _torch_loop(task, rank, model, optimizer)


def _shard_fully(model: Transformer, mesh: Any, *, reshard: bool) -> Transformer:
    """FSDP2 as torch's tutorial applies it: each block, then the root, which stays whole after forward."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    return model


def _fsdp2_model(task: Task, backend: str, *, reshard: bool) -> Transformer:
    dist.init_process_group(backend)
    return _shard_fully(task.model(), init_device_mesh("cpu", (task.ranks,)), reshard=reshard)


def _fsdp2(backend: str, reshard: bool, task: Task, rank: int) -> Step:
    model = _fsdp2_model(task, backend, reshard=reshard)
    return _torch_loop(task, rank, model, torch.optim.AdamW(model.parameters(), **ADAMW))


def _fsdp2_sharing_buffers(task: Task, rank: int) -> Step:
    model = _fsdp2_model(task, "shoal", reshard=True)
    share_buffers(model)
    keep_freed_memory()
    return _torch_loop(task, rank, model, torch.optim.AdamW(model.parameters(), **ADAMW))


# -- Hugging Face Accelerate ----------------------------------------------------------------------------
# DDP only: Accelerator(cpu=True) ignores an FSDP plugin without a word, and runs DDP in its place.


def _accelerate_ddp(task: Task, rank: int) -> Step:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    kwargs = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    model = task.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW))
    clip = partial(accelerator.clip_grad_norm_, list(model.parameters()), CLIP)
    return _loop(task, rank, forward=model, update=_update(optimizer, clip), backward=accelerator.backward)


# -- Lightning Fabric -----------------------------------------------------------------------------------


def _fabric(strategy: Any, task: Task, rank: int) -> Step:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    fabric = Fabric(
        accelerator="cpu", devices=task.ranks, strategy=strategy, plugins=[TorchElasticEnvironment()]
    )
    fabric.launch()
    model = fabric.setup_module(task.model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), **ADAMW))
    clip = partial(fabric.clip_gradients, model, optimizer, max_norm=CLIP)
    return _loop(task, rank, forward=model, update=_update(optimizer, clip), backward=fabric.backward)


def _fabric_ddp(task: Task, rank: int) -> Step:
    from lightning_fabric.strategies import DDPStrategy

    return _fabric(DDPStrategy(gradient_as_bucket_view=True), task, rank)


def _fabric_fsdp2(task: Task, rank: int) -> Step:
    from lightning_fabric.strategies import ModelParallelStrategy

    def shard(model: Transformer, mesh: Any) -> Transformer:
        return _shard_fully(model, mesh["data_parallel"], reshard=True)

    strategy = ModelParallelStrategy(shard, data_parallel_size=task.ranks, tensor_parallel_size=1)
    return _fabric(strategy, task, rank)


# -- DeepSpeed ------------------------------------------------------------------------------------------


def _deepspeed(stage: int, task: Task, rank: int) -> Step:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = task.model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
        config={
            "train_micro_batch_size_per_gpu": task.microbatch,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1_000_000,
        },
    )
    return _loop(task, rank, forward=engine, update=engine.step, backward=engine.backward)


REFERENCE = "torch DDP"
"""The contestant whose losses the others have to have."""

_ALONE = "no communication"
"""The contestant whose ranks have nothing to do with each other: what the step costs at least."""

CONTESTANTS = (
    Contestant(_ALONE, _no_communication, communicates=False),
    Contestant("torch DDP over shoal", partial(_ddp, "shoal"), _ALONE),
    Contestant(REFERENCE, partial(_ddp, "gloo"), _ALONE),
    Contestant("shoal none", partial(_shoal, "none"), REFERENCE),
    Contestant("shoal train", _shoal_train, REFERENCE),
    Contestant("Accelerate DDP", _accelerate_ddp, REFERENCE, "accelerate"),
    Contestant("Fabric DDP", _fabric_ddp, REFERENCE, "lightning_fabric"),
    Contestant("torch DDP + ZeroRedundancyOptimizer", _ddp_zero_redundancy),
    Contestant("shoal zero1", partial(_shoal, "zero1"), "torch DDP + ZeroRedundancyOptimizer"),
    Contestant(
        "DeepSpeed ZeRO-1", partial(_deepspeed, 1), "torch DDP + ZeroRedundancyOptimizer", "deepspeed"
    ),
    Contestant("torch FSDP2 without reshard", partial(_fsdp2, "gloo", False)),
    Contestant("shoal zero2", partial(_shoal, "zero2"), "torch FSDP2 without reshard"),
    Contestant("torch FSDP2 over shoal", partial(_fsdp2, "shoal", True), _ALONE),
    Contestant("torch FSDP2 over shoal in shared buffers", _fsdp2_sharing_buffers, _ALONE),
    Contestant("torch FSDP2", partial(_fsdp2, "gloo", True), _ALONE),
    Contestant("shoal zero3", partial(_shoal, "zero3"), "torch FSDP2"),
    Contestant("Fabric FSDP2", _fabric_fsdp2, "torch FSDP2", "lightning_fabric"),
    Contestant("DeepSpeed ZeRO-3", partial(_deepspeed, 3), "torch FSDP2", "deepspeed"),
)
"""Each stands beside its peer, so that the two run one after the other."""
