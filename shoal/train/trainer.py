"""The Trainer: one optimizer step after another, under a Plan."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from shoal.checkpoint import Coordinator, all_ranks
from shoal.collectives import keep_freed_memory
from shoal.data import Loader, are_packed, as_samples
from shoal.errors import ConfigError
from shoal.models import Transformer
from shoal.parallel import Batch, Parallel, Replicas, own_device, parallelize, plan_of
from shoal.parallel.compiled import compiled, uncompiled
from shoal.parallel.device import limit_logits
from shoal.parallel.exchange.server import Servers
from shoal.parallel.exchange.worker_exchange import exchange_of
from shoal.record import NullRecorder, Recorder
from shoal.spec.plan import Plan, SettledPlan
from shoal.spec.run import Decision
from shoal.train.arguments import require_arguments
from shoal.train.checkpointer import Begun, Checkpointer, Told
from shoal.train.compiling import with_compile
from shoal.train.config import OptimizerConfig
from shoal.train.evaluate import Evaluation, Evaluator, HeldOut, accuracy, values_on
from shoal.train.exchange_tuner import guide_of
from shoal.train.forward_backward import Asked, Passes
from shoal.train.learning_rate import RateCourse
from shoal.train.micro_batch import Loss, Reader, TrainingData, require_divided_loss
from shoal.train.optimizer import Optimization, build_optimizer
from shoal.train.optimizer_step import Explainer, Skips, Unsettled, Update
from shoal.train.result import Callbacks, StepResult
from shoal.train.run_writer import RunWriter, writer_of_trainer
from shoal.train.server_worker import Curvature, plan_of_ranks, serve_optimizer, stale_guard_of
from shoal.train.snapshot import ChangingBuffers, begin_anew
from shoal.train.step import Stepping
from shoal.train.training_state import TrainingState


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """What a Plan runs with, beside its text.

    Attributes:
        servers: The parameter servers of the Plan. The ranks are then those of one worker.
        offload_folder: Folder for the files of a Plan with `offload`; by default that of the Run.
        held_out: With exchange=auto, what trials compare on. By default the loss of the samples that come
            next, and for Shoal's own models next-token accuracy.
        compare_replicas: Steps between comparisons of replicas' bits (`shoal.parallel.replica_check`); 0 for
        none. synchronise_buffers: Whether buffers that steps change are averaged over the ranks after each.
        recorder: Recorder of spans, if they do not go into a Run.
    """

    servers: Servers | None = None
    offload_folder: Path | str | None = None
    held_out: HeldOut | None = None
    compare_replicas: int = 100
    synchronise_buffers: bool = False
    recorder: Recorder | None = None


@final
class Trainer:
    """Train a model on data under a Plan. All ranks make a Trainer and call its methods together.

    On a CPU the process keeps the memory that tensors free: see `shoal.collectives.keep_freed_memory`.

    A step whose loss or gradient is not finite is left out: weights, the optimizer's state and buffers stay
    unchanged, and the next step takes the next batch. `optimizer.skip` limits how many in a row.

    Buffers that follow a rank's own data, such as BatchNorm's statistics, differ between ranks. A checkpoint
    keeps each rank's buffers and restores them under the same Plan; under another Plan all ranks begin with
    those of one rank. `synchronise_buffers` gives all ranks their mean after each step.

    Args:
        model: A model that `shoal.parallelize` takes.
        data: Samples, or a map-style dataset; or `TrainingData`, which says how they are read.
            `shoal.train.micro_batch` says what a batch may be.
        plan: A Plan or its text form.
        batch: Samples in one optimizer step, over all ranks.
        steps: Total number of optimizer steps, which the learning rate's course depends on.
        loss: A function from the model's output and the targets to the mean loss of a micro-batch. By default
            the loss in the output if batches are mappings, otherwise `shoal.models.next_token_loss`.
        optimizer: The optimizer, its learning rate, clipping, and the number of steps that may be skipped; or
            `Optimization`, with an optimizer and a schedule of the user's own.
        seed: Determines the order of samples, the random numbers of data and model, and the first weights of
            a model on the meta device.
        device: Device on which this rank computes. The model is moved there; a GPU becomes the current one.
        run: A directory for a Run that `shoal report` explains; a recorder of its own comes with it. Or the
            writer of a Run, which the caller closes.
        callbacks: Functions that are told of steps, validations, checkpoints and decisions.
        runtime: What the Plan runs with, beside its text.

    Attributes:
        parallel: The model as it is laid over the ranks.
        optimizer: The optimizer of this rank's parameters.
        step_count: Number of optimizer steps made, including skipped ones.
        position: Samples consumed, over all ranks: the state of the data.
        skips: Counts of skipped steps, in total and in a row.
        exchange: How this rank's worker and the others become equal.
        state, checkpointer: What its checkpoints hold; what saves them.

    Raises:
        PlanError: The Plan does not fit the ranks or the batch.
        ConfigError: The optimizer cannot be made.
        DataError, RunError: The data cannot be read by number; the directory of the Run holds something else.
        ModelError: The model, or the loss, computes something else under the Plan.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        plan: Plan | str,
        *,
        batch: int,
        steps: int,
        loss: Loss | None = None,
        optimizer: OptimizerConfig | Optimization | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        run: Path | str | RunWriter | None = None,
        callbacks: Callbacks | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        chosen = optimizer if isinstance(optimizer, Optimization) else Optimization(optimizer)
        require_arguments(model, steps, loss, chosen.config)
        model = uncompiled(model)
        data = data if isinstance(data, TrainingData) else TrainingData(data)
        runtime = Runtime() if runtime is None else runtime
        samples, plan = as_samples(data.samples), plan_of(plan)
        sequence, servers = data.sequence, runtime.servers
        self._device = own_device(device)
        whole, of_all = SettledPlan.of(plan, batch), batch
        own, batch = plan_of_ranks(whole, batch, servers)
        self.plan = with_compile(own, model, sequence, self._device)
        self.config = OptimizerConfig() if chosen.config is None else chosen.config
        self.steps, self.step_count, self.position = steps, 0, 0
        self.skips = Skips(self.config.skip)
        if self._device.type == "cpu":
            keep_freed_memory()
        settings = {"plan": str(self.plan), "seed": seed, "tokens_per_step": sequence and batch * sequence}
        recorder, ranks = runtime.recorder, self.coordinator
        if run is None or isinstance(run, RunWriter):
            writer = run
        else:
            writer = writer_of_trainer(Path(run), ranks, self._device, model, settings, recorder)
        self._run, self._closes_run = writer, writer is not run
        self._callbacks = callbacks or Callbacks()
        self._recorder = (recorder if writer is None else writer.recorder) or NullRecorder()
        names = [name for name, _ in model.named_parameters()]
        self._reader = Reader(model, loss, data.counted, packed=are_packed(samples), sequence=sequence)
        self._loader = Loader(samples, seed=seed, batch_size=batch)
        self.parallel: Parallel = parallelize(
            model,
            self.plan,
            batch=None if sequence is None else Batch(batch, sequence),
            seed=seed,
            device=self._device,
            recorder=self._recorder,
            offload_folder=runtime.offload_folder or (None if writer is None else writer.run.path),
        )
        if self.parallel.plan.compile == "blocks":
            self._reader.compile_loss(compiled)
        if is_own := isinstance(model, Transformer) and self._reader.is_default_loss:
            limit_logits(model, self.plan, self._device)
        require_divided_loss(self.parallel, self._reader, samples, seed)
        self.optimizer = build_optimizer(self.parallel, self.config, of_all, chosen.make)
        if servers is not None:
            self.optimizer = serve_optimizer(
                self.parallel,
                self.optimizer,
                self.config,
                whole,
                steps,
                servers,
                self.coordinator,
                self._recorder,
            )
        self.exchange = exchange_of(self.optimizer, self.parallel)
        if writer is not None:
            writer.laid_out(self.parallel.plan if servers is None else whole, self.exchange)
        microbatch = self.plan.microbatch
        replicas = Replicas(self.parallel, runtime.compare_replicas)
        self.state = TrainingState(
            self.parallel,
            self.optimizer,
            self.coordinator,
            replicas,
            plan=str(self.plan if servers is None else whole),
            seed=seed,
        )
        self.checkpointer = Checkpointer(
            self.state, self._callbacks.on_save, self._recorder, self.coordinator
        )
        self._passes = Passes(
            self.parallel,
            self._loader,
            self._reader,
            self._recorder,
            microbatch=microbatch,
            workers=data.workers,
            device=self._device,
        )
        update = Update(self.parallel, self.optimizer, self.config.clip)
        self._stepping = Stepping(
            self.parallel,
            self._loader,
            self._passes,
            update,
            self.exchange,
            RateCourse(self.optimizer, self.config, steps=steps, batch=of_all, schedule=chosen.schedule),
            ChangingBuffers(self.parallel.module),
            self._recorder,
            replicas,
            runtime.synchronise_buffers,
            steps,
        )
        self._explainer = Explainer(self.parallel, self._loader, names, microbatch)
        self._evaluator = Evaluator(self.parallel, self._reader, self._recorder, seed, microbatch)
        tasks = {"accuracy": accuracy} if is_own else {}
        self._guide = guide_of(
            self.optimizer,
            self._stepping,
            self.plan,
            steps=steps,
            batch=batch,
            coordinator=self.coordinator,
            evaluate=values_on(runtime.held_out, self._evaluator, self._loader, tasks),
            decided=self._decided,
        )
        curvature = Curvature(self.parallel, self._loader, self._reader, microbatch)
        self._stale_guard = stale_guard_of(
            self.optimizer, whole, self.config, curvature, batch, self._decided
        )
        self._defers = self._device.type != "cpu" and update.is_on_device
        self._unsettled: Unsettled | None = None
        begin_anew(seed, 0, self.parallel.axes.data.index)

    @property
    def coordinator(self) -> Coordinator:
        """All ranks, as checkpoints need them."""
        return all_ranks()

    def step(self, *, stop: Asked = False) -> StepResult:
        """Make one optimizer step, or skip it if its loss or its gradient is not finite.

        On a GPU it returns while the device computes: the values of the step before are read meanwhile, and
        reported to `on_step` and to the Run. `settle` waits for the last step's. On a CPU, and with an
        optimizer that cannot skip a step on the device, a step's own values are read before it returns.

        Args:
            stop: Whether this rank was asked to stop, or a function that returns it; the result tells all.

        Raises:
            TrainingError: More steps in a row were skipped than `optimizer.skip` allows. The step counts as
                skipped nevertheless: a state saved now goes on after it.
            ReplicaError: Replicas hold different bits.
            RunError: The directory of the Run holds a run, and no checkpoint of it was loaded.
        """
        run = self._run
        with nullcontext() if run is None else run.step(lambda: self.step_count):
            self.checkpointer.poll()
            began = time.perf_counter()
            number = self.step_count + 1
            with nullcontext() if run is None else run.measured(self.parallel, self.optimizer, number):
                made = self._stepping.make(self.step_count, self.position, stop=stop)
            turn, passed = made.turn, made.passed
            result = StepResult(
                turn.step + 1,
                passed.loss,
                self.exchange.norm_of_workers(made.norm.whole),
                passed.stop,
                learning_rate=made.rate,
                tokens=round(passed.tokens * self.parallel.axes.data.size * made.progress.shares),
                seconds=made.seconds,
            )
            unsettled = Unsettled(result, turn.position, passed.losses, made.norm)
            before, self._unsettled = self._unsettled, unsettled
            self.step_count, self.position = made.progress.steps, made.progress.position
            if self._defers:
                self.optimizer.zero_grad()
                if before is not None:
                    self._report(before)
                result.seconds = time.perf_counter() - began
            else:
                self.settle()
            self.skips.require_progress()
            if self._guide is not None and not result.stop:
                self._guide.advance(made)
            if self._stale_guard is not None:
                self._stale_guard.advance(made)
            return result

    def settle(self) -> None:
        """Wait for the last step, and report its result, unless that is done; all ranks call it together."""
        last, self._unsettled = self._unsettled, None
        if last is not None:
            self._report(last)

    def validate(self, samples: Any, count: int) -> float:
        """Return the mean loss over the first `count` samples; dropout is off."""
        return self.evaluate(samples, count)["loss"]

    def evaluate(
        self,
        samples: Any,
        count: int,
        functions: Mapping[str, Evaluation] | None = None,
        *,
        stop: Callable[[], bool] | None = None,
    ) -> dict[str, float]:
        """Return the mean `loss` over the first `count` samples, and the means of functions; dropout is off.

        Args:
            samples: Samples, or a map-style dataset.
            count: Number of samples to use; all if there are fewer.
            functions: Functions by name, from the model's output and the targets to a mean over the elements
                that count. If a batch is a mapping that holds its loss, they get the mapping in place of the
                targets.
            stop: Returns whether this rank is asked to stop. If a rank is, all return nothing, between two
                batches. All ranks give one, or none does.
        """
        self.settle()
        with self._part("validation"):
            values = self._evaluator(as_samples(samples), count, functions or {}, stop)
        if values and self._run is not None:
            logged = {"validation_loss" if name == "loss" else name: each for name, each in values.items()}
            self._run.log(self.step_count, logged)
        if values:
            self._callbacks.on_validation(self.step_count, values)
        return values

    def save(self, directory: Path | str | None = None, extra: Mapping[str, Any] | None = None) -> Path:
        """Save a checkpoint of the state into a directory of checkpoints.

        Args:
            directory: A directory on a file system that all ranks see; by default the Run's.
            extra: A JSON object to keep with the checkpoint.

        Raises:
            CheckpointError: It could not be written; training can go on.
            ConfigError: There is neither a directory nor a Run.
        """
        with self._part("save"):
            return self.checkpointer.save(*self.to_save(directory, extra))

    def save_in_background(
        self,
        directory: Path | str | None = None,
        extra: Mapping[str, Any] | None = None,
        *,
        keep: int = 0,
        told: Told = None,
    ) -> Begun:
        """Begin to save a checkpoint like `save`, and return once the state is copied.

        A later step, or `finish_saving`, calls `on_save` and `told` at its end, or warns of its failure.

        Args:
            directory, extra: As in `save`, with the same errors.
            keep: Number of newest checkpoints in the directory that stay; 0 keeps all.
            told: Called with the end of the save, in place of a warning if it failed.
        """
        with self._part("save"):
            return self.checkpointer.begin(*self.to_save(directory, extra), keep=keep, told=told)

    def finish_saving(self) -> None:
        """Wait until the save in the background has ended, if there is one."""
        self.checkpointer.finish()

    def to_save(
        self, directory: Path | str | None, extra: Mapping[str, Any] | None
    ) -> tuple[Path, int, dict[str, Any]]:
        """Return the arguments of the checkpointer, after the last step."""
        self.settle()
        state = {
            **(extra or {}),
            "step": self.step_count,
            **self._loader.state(self.position),
            "skipped": [self.skips.total, self.skips.in_a_row],
        }
        if self._guide is not None:
            state["exchange"] = self._guide.kept()
        if directory is None and self._run is not None:
            directory = self._run.run.checkpoints
        if directory is None:
            raise ConfigError(
                "save() of a Trainer without a Run was called without a directory",
                possible="a directory of checkpoints, or a Trainer with run=",
                change="give save() a directory",
            )
        return Path(directory), self.step_count, state

    def load(self, checkpoint: Path | str) -> Mapping[str, Any]:
        """Load the state of a checkpoint, which any number of ranks under any Plan may have saved.

        Under the same Plan training goes on bitwise as it would have. Under another Plan, torch's, numpy's
        and Python's generators, which Shoal's own models do not use, are seeded anew from the run's seed and
        the step; buffers that differed between ranks begin with those of one rank.

        Returns:
            The `extra` that was saved with it.

        Raises:
            CheckpointError: It does not fit the model or the optimizer. Both are then as before.
            CorruptCheckpointError: It is not what was saved. Model and optimizer are as before.
        """
        self.settle()
        self.finish_saving()
        state = self.state.load(Path(checkpoint))
        self.step_count, self.position = state["step"], state["position"]
        self._loader.take(state)
        self.skips.total, self.skips.in_a_row = state["skipped"]
        if self._guide is not None:
            self._guide.restart(self.step_count, self.position, state.get("exchange", {}))
        if self._run is not None:
            self._run.loaded(self.step_count)
        return state

    def close(self) -> None:
        """Wait for the last save, end processes that prepare data (a step restarts them), close the Run."""
        error = sys.exc_info()[1]
        self.checkpointer.close(error)
        if self._unsettled is not None and self._unsettled.result.is_finite:
            self.settle()  # otherwise ranks would look for the reason together, and one may be gone
        self._passes.close()
        if self._run is not None and self._closes_run:
            if error is not None:
                self._run.failed(error)
            self._run.close("the Trainer was closed")

    def _part(self, name: str) -> AbstractContextManager[None]:
        """Return a context for work beside the steps, whose time the Run notes."""
        return nullcontext() if self._run is None else self._run.part(name)

    def _decided(self, decision: Decision) -> None:
        """Report a decision about the exchange."""
        if self._run is not None:
            self._run.decided(decision)
        self._callbacks.on_decision(decision)

    def _report(self, step: Unsettled) -> None:
        """Read the values of a step, find the reason if it was left out, and report it."""
        result = step.result
        if result.is_finite:
            result.explain("")
            if not self._defers:
                self.optimizer.zero_grad()
        else:
            result.explain(self._explainer.reason(step, has_gradients=not self._defers))
        self.skips.note(result.step, result.skipped)
        if self._run is not None:
            self._run.log(result.step, result.values())
        self._callbacks.on_step(result)
