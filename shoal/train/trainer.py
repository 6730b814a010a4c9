"""The Trainer: one optimizer step after another, under a Plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint import (
    Exchange,
    Piece,
    ProcessGroupExchange,
    SingleProcess,
    load,
    read_manifest,
    save,
)
from shoal.collectives import keep_freed_memory
from shoal.data import Loader, Prefetcher, Samples
from shoal.errors import TrainingError
from shoal.models import next_token_loss
from shoal.parallel import Batch, Parallel, parallelize
from shoal.plan import Plan
from shoal.record import NullRecorder, Recorder
from shoal.timeline import Kind
from shoal.train.config import OptimizerConfig
from shoal.train.randomness import random_state, set_random_state
from shoal.train.schedule import learning_rate
from shoal.train.state import make_optimizer_state, pieces_to_load, pieces_to_save

__all__ = ["StepResult", "Trainer"]

Pair = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        step: Its number, from 1.
        loss: Mean over the batch, before the step.
        gradient_norm: Of the whole gradient, before clipping.
        learning_rate: That the step was made with.
        tokens: Elements of the inputs, over all ranks.
        seconds: Wall time.
        stop: Whether a rank asked to stop.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    stop: bool


@final
class Trainer:
    """Trains a model on data under a Plan. All ranks make one and call its methods together.

    On a CPU the process keeps the memory that tensors free, and so stays as large as its largest step was:
    see `shoal.collectives.keep_freed_memory`.

    Args:
        model: As `shoal.parallelize` takes it.
        data: Pairs of inputs and targets.
        plan: A Plan or its text form.
        batch: Samples in one optimizer step, over all ranks.
        steps: Optimizer steps in all, which the learning rate's course needs to know.
        loss: From the model's output and the targets to the mean loss of a micro-batch.
        optimizer: AdamW and its learning rate.
        seed: Fixes the order of samples, and the first weights of a model on the meta device.
        device: What this rank computes on.
        recorder: Where spans go.
        sequence: Tokens of a sample; with it, pipeline stages are cut so that activations fit the devices.

    Attributes:
        parallel: The model as it is laid over the ranks.
        optimizer: AdamW over what this rank owns.
        step_count: Optimizer steps made.
        position: Samples consumed, over all ranks; the state of the data.

    Raises:
        PlanError: The Plan does not fit the ranks or the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Samples[Pair],
        plan: Plan | str,
        *,
        batch: int,
        steps: int,
        loss: Loss = next_token_loss,
        optimizer: OptimizerConfig | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        recorder: Recorder | None = None,
        sequence: int | None = None,
    ) -> None:
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        self.plan = plan.with_microbatch_for(batch)
        self.config = optimizer if optimizer is not None else OptimizerConfig()
        self.steps = steps
        self.step_count = 0
        self.position = 0
        self._device = torch.device(device)
        if self._device.type == "cpu":
            keep_freed_memory()
        self._recorder = recorder if recorder is not None else NullRecorder()
        self._loss = loss
        self._seed = seed
        self._loader = Loader(data, seed=seed, batch_size=batch)
        self.parallel: Parallel = parallelize(
            model,
            self.plan,
            batch=None if sequence is None else Batch(batch, sequence),
            seed=seed,
            device=self._device,
            recorder=self._recorder,
        )
        self.optimizer = _make_optimizer(self.parallel, self.config)
        dp = self.parallel.axes.dp
        assert self.plan.microbatch is not None
        self._accumulation = self._loader.accumulation(dp.size, self.plan.microbatch)
        self.parallel.set_micro_batches(self._accumulation)
        self._stream: Prefetcher[Pair] | None = None
        # What a model of the user draws from torch differs between ranks with other data.
        torch.manual_seed(seed * 1_000_003 + self.parallel.axes.data.index)

    @property
    def exchange(self) -> Exchange:
        """All ranks, as checkpoints see them."""
        return ProcessGroupExchange() if dist.is_initialized() else SingleProcess()

    def step(self, *, stop: bool = False) -> StepResult:
        """Makes one optimizer step.

        Args:
            stop: That this rank was asked to stop; all ranks learn of it in the result.

        Raises:
            TrainingError: The loss or the gradient is not finite. The weights are those of the step before.
        """
        began = time.perf_counter()
        rate = learning_rate(
            self.config, step=self.step_count, steps=self.steps, batch=self._loader.batch_size
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self._recorder.step(self.step_count + 1):
            loss, stopping, tokens = self._forward_and_backward(stop)
            with self._recorder.span(Kind.OPTIMIZER):
                norm = self.parallel.clip_gradients(self.config.clip)
                self._require_finite(loss, norm)
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.step_count += 1
        self.position += self._loader.batch_size
        return StepResult(
            step=self.step_count,
            loss=loss,
            gradient_norm=norm,
            learning_rate=rate,
            tokens=tokens * self.parallel.axes.data.size,
            seconds=time.perf_counter() - began,
            stop=stopping,
        )

    def validate(self, samples: Samples[Pair], count: int) -> float:
        """The mean loss over the first `count` samples; dropout is off."""
        count = min(count, len(samples))
        dp, micro = self.parallel.axes.dp, self.plan.microbatch
        assert micro is not None
        total = torch.zeros(2, dtype=torch.float64)
        was_training = self.parallel.module.training
        self.parallel.module.eval()
        with self._recorder.span(Kind.VALIDATION), torch.no_grad():
            # Every rank runs as many forwards, since sharded weights are gathered in each of them.
            for start in range(0, count, dp.size * micro):
                first = start + dp.index * micro
                held = max(0, min(count - first, micro))
                indices = np.arange(first, first + held) if held else np.arange(1)
                inputs, targets = self._to_device(samples.batch(indices))
                output = self.parallel.evaluate(inputs)
                if output is not None:
                    loss = self._loss(output, targets)
                    total += torch.tensor([held * loss.item(), held], dtype=torch.float64)
        self.parallel.module.train(was_training)
        total = total.to(self._device)
        self.parallel.axes.world.all_reduce(total, "validation").wait()
        return float(total[0] / total[1])

    def save(self, directory: Path, extra: Mapping[str, Any]) -> Path:
        """Saves a checkpoint of the state into a directory of checkpoints.

        Args:
            directory: On a file system that all ranks see.
            extra: A JSON object to keep with it.

        Raises:
            CheckpointError: It could not be written; training can go on.
        """
        exchange = self.exchange
        make_optimizer_state(self.optimizer)
        pieces = pieces_to_save(self.parallel, self.optimizer)
        pieces += [
            Piece.whole(f"rank/{exchange.rank}/random.{name}", tensor)
            for name, tensor in random_state().items()
        ]
        state = {
            **extra,
            "step": self.step_count,
            "position": self.position,
            "plan": str(self.plan),
            "ranks": exchange.size,
        }
        with self._recorder.span(Kind.CHECKPOINT):
            return save(directory, self.step_count, pieces, state, exchange)

    def load(self, checkpoint: Path) -> Mapping[str, Any]:
        """Takes up the state of a checkpoint, which any number of ranks under any Plan may have saved.

        With the same ranks, training goes on bitwise as it would have; with others, torch's random
        generators, which Shoal's own models do not use, begin anew.

        Returns:
            What was kept with it.
        """
        exchange = self.exchange
        make_optimizer_state(self.optimizer)
        self.parallel.zero_grad()
        state = load(checkpoint, pieces_to_load(self.parallel, self.optimizer), exchange)
        self.parallel.changed()
        self.step_count, self.position = state["step"], state["position"]
        self.close()
        if state["ranks"] == exchange.size:
            random = random_state()
            wanted = [
                Piece.whole(f"rank/{exchange.rank}/random.{name}", tensor) for name, tensor in random.items()
            ]
            saved = read_manifest(checkpoint).tensors  # it may be from a machine without CUDA
            load(checkpoint, [piece for piece in wanted if piece.name in saved], exchange)
            set_random_state(random)
        return state

    def close(self) -> None:
        """Ends the thread that prepares data; the next step starts another."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _forward_and_backward(self, stop: bool) -> tuple[float, bool, int]:
        """Accumulates the gradient of a batch: its mean loss, whether any rank stops, this rank's tokens."""
        if self._stream is None:
            self._stream = self._open_stream()
        if self.plan.pp > 1:
            return self._run_pipeline(self._stream, stop)
        world = self.parallel.axes.world
        report = torch.zeros(2, device=self._device)
        report[1] = float(stop)
        tokens = 0
        for remaining in reversed(range(self._accumulation)):
            with self._recorder.span(Kind.DATA_WAIT):
                inputs, targets = self._to_device(next(self._stream))
            tokens += inputs.numel()
            with self._recorder.span(Kind.FORWARD):
                self._set_dropout(self._accumulation - 1 - remaining, inputs)
                loss = self._loss(self.parallel(inputs), targets) / self._accumulation
                report[0] += loss.detach()
            if remaining:
                with self._recorder.span(Kind.BACKWARD), self.parallel.accumulate():
                    loss.backward()
        # The report travels behind the last backward, and is there when that ends.
        sent = world.all_reduce(report, "report")
        with self._recorder.span(Kind.BACKWARD):
            loss.backward()
        sent.wait()
        total, stopping = report.tolist()
        return total / world.size, stopping > 0, tokens

    def _run_pipeline(self, stream: Iterator[Pair], stop: bool) -> tuple[float, bool, int]:
        """The same by the Plan's schedule."""
        tokens = 0

        def taken() -> Iterator[Pair]:
            nonlocal tokens
            while True:
                with self._recorder.span(Kind.DATA_WAIT):
                    pair = self._to_device(next(stream))
                tokens += pair[0].numel()
                yield pair

        loss = self.parallel.forward_backward(taken(), self._accumulation, self._loss, self._set_dropout)
        world = self.parallel.axes.world
        report = torch.stack([loss, torch.tensor(float(stop), device=self._device)])
        world.all_reduce(report, "report").wait()
        total, stopping = report.tolist()
        return total * self.plan.pp / world.size, stopping > 0, tokens

    def _set_dropout(self, index: int, inputs: torch.Tensor) -> None:
        """Fixes dropout's masks by the place of the samples of micro-batch `index` in all data."""
        dp = self.parallel.axes.dp
        first = self.position + (index * dp.size + dp.index) * len(inputs)
        samples = torch.arange(first, first + len(inputs), device=self._device)
        self.parallel.set_dropout(self._seed, samples, inputs)

    def _open_stream(self) -> Prefetcher[Pair]:
        dp = self.parallel.axes.dp
        assert self.plan.microbatch is not None
        return Prefetcher(self._loader.stream(self.position, dp.index, dp.size, self.plan.microbatch))

    def _to_device(self, pair: Pair) -> Pair:
        inputs, targets = (self.parallel.local_sequence(tensor) for tensor in pair)
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)

    def _require_finite(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.parallel.zero_grad()
            self.close()
            raise TrainingError(
                f"step {self.step_count + 1} has a loss of {loss} and a gradient norm of {norm}; "
                "a lower optimizer.learning_rate or a longer optimizer.warmup may help"
            )


def _make_optimizer(parallel: Parallel, config: OptimizerConfig) -> torch.optim.AdamW:
    matrices = [owned.parameter for owned in parallel.owned if len(owned.shape) >= 2]
    vectors = [owned.parameter for owned in parallel.owned if len(owned.shape) < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
