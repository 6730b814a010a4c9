"""The Trainer: one optimizer step after another, under a Plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint import Coordinator, ProcessGroupCoordinator, SingleProcess
from shoal.collectives import keep_freed_memory
from shoal.data import Loader, as_samples
from shoal.parallel import Batch, Parallel, parallelize
from shoal.plan import Plan, SettledPlan
from shoal.record import NullRecorder, Recorder
from shoal.timeline import Kind
from shoal.train.buffers import ChangingBuffers
from shoal.train.config import OptimizerConfig
from shoal.train.evaluate import Evaluation, evaluate
from shoal.train.learning_rate import RateCourse, Schedule
from shoal.train.listeners import Listeners
from shoal.train.micro_batch import Counted, Loss, Reader
from shoal.train.not_finite import Skips, explain_not_finite
from shoal.train.optimizer import OptimizerFactory, build_optimizer
from shoal.train.passes import Passed, Passes
from shoal.train.randomness import begin_anew
from shoal.train.result import StepResult
from shoal.train.run_record import RunRecord
from shoal.train.saved import SavedTraining

__all__ = ["Trainer"]


@final
class Trainer:
    """Trains a model on data under a Plan. All ranks make one and call its methods together.

    On a CPU the process keeps the memory that tensors free: see `shoal.collectives.keep_freed_memory`.

    A step whose loss or gradient is not finite is left out: weights, the optimizer's state and buffers stay
    as they were, and the next step takes the next batch. `optimizer.skip` says how many in a row.

    Buffers that follow a rank's own data, as BatchNorm's statistics do, differ between ranks. A checkpoint
    keeps each rank's and restores them under the same Plan; under another all ranks begin with those of one.
    `synchronise_buffers` gives all ranks their mean after each step.

    Args:
        model: As `shoal.parallelize` takes it.
        data: Samples, or a map-style dataset. `shoal.train.micro_batch` says what a batch may be.
        plan: A Plan or its text form.
        batch: Samples in one optimizer step, over all ranks.
        steps: Optimizer steps in all, which the learning rate's course needs to know.
        loss: From the model's output and the targets to the mean loss of a micro-batch. By default the loss
            in the output if batches are mappings, else `shoal.models.next_token_loss`.
        optimizer: The optimizer, its learning rate, clipping, and how many steps may be skipped.
        make_optimizer: In place of the optimizer that `optimizer` names; called as `torch.optim.SGD` is, with
            groups of named parameters, `lr`, and `optimizer.options`.
        schedule: In place of the schedule that `optimizer` names: from the number of a step, from 0, to the
            share of the highest learning rate.
        counted: From the targets of a micro-batch, or from the micro-batch if it is a mapping, to how many
            elements its mean loss is over. By default integers count that are not -100, others one a sample.
        seed: Fixes the order of samples, what they and the model draw at random, and the first weights of a
            model on the meta device.
        device: What this rank computes on.
        recorder: Where spans go.
        sequence: Tokens of a sample; with it, pipeline stages are cut so that activations fit the devices.
        workers: Processes that prepare data on this rank; see `shoal.data.open_feed`.
        synchronise_buffers: Whether buffers that steps change are averaged over the ranks after each.
        run: A directory for a Run that `shoal report` explains; a recorder of its own comes with it.
        on_step: Called with each step's result; `on_validation` with the steps made and the values of each
            validation, `on_save` with the path of each checkpoint.

    Attributes:
        parallel: The model as it is laid over the ranks.
        optimizer: Over what this rank owns.
        step_count: Optimizer steps made, those that were skipped included.
        position: Samples consumed, over all ranks; the state of the data.
        skips: How many steps were skipped.

    Raises:
        PlanError: The Plan does not fit the ranks or the batch.
        ConfigError: The optimizer cannot be made.
        DataError: The data cannot be read by number.
        RunError: The directory of the Run holds something else.
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
        optimizer: OptimizerConfig | None = None,
        make_optimizer: OptimizerFactory | None = None,
        schedule: Schedule | None = None,
        counted: Counted | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        recorder: Recorder | None = None,
        sequence: int | None = None,
        workers: int = 0,
        synchronise_buffers: bool = False,
        run: Path | str | None = None,
        on_step: Callable[[StepResult], object] | None = None,
        on_validation: Callable[[int, Mapping[str, float]], object] | None = None,
        on_save: Callable[[Path], object] | None = None,
    ) -> None:
        samples = as_samples(data)
        plan = Plan.parse(plan) if isinstance(plan, str) else plan
        self.plan = SettledPlan.of(plan, batch)
        self.config = optimizer if optimizer is not None else OptimizerConfig()
        self.steps = steps
        self.step_count = 0
        self.position = 0
        self.skips = Skips(self.config.skip)
        self._seed = seed
        self._synchronise_buffers = synchronise_buffers
        self._device = torch.device(device)
        if self._device.type == "cpu":
            keep_freed_memory()
        record = None
        if run is not None:
            settings: dict[str, Any] = {"plan": str(self.plan), "seed": seed}
            settings["tokens_per_step"] = None if sequence is None else batch * sequence
            record = RunRecord(Path(run), self.coordinator, model, self._device, settings, recorder)
            recorder = record.recorder
        self._listeners = Listeners(record, on_step, on_validation, on_save)
        self._recorder = recorder if recorder is not None else NullRecorder()
        self._names = [name for name, _ in model.named_parameters()]
        self._reader = Reader(model, loss, counted)
        self._loader = Loader(samples, seed=seed, batch_size=batch)
        self.parallel: Parallel = parallelize(
            model,
            self.plan,
            batch=None if sequence is None else Batch(batch, sequence),
            seed=seed,
            device=self._device,
            recorder=self._recorder,
        )
        if record is not None:
            record.settle(self.parallel.plan)
        self.optimizer = build_optimizer(self.parallel, self.config, batch, make_optimizer)
        self._saved = SavedTraining(
            self.parallel, self.optimizer, plan=str(self.plan), seed=seed, coordinator=self.coordinator
        )
        self._rates = RateCourse(self.optimizer, self.config, steps=steps, batch=batch, schedule=schedule)
        self._buffers = ChangingBuffers(self.parallel.module)
        self._passes = Passes(
            self.parallel,
            self._loader,
            self._reader,
            self._recorder,
            microbatch=self.plan.microbatch,
            workers=workers,
            device=self._device,
        )
        begin_anew(seed, 0, self.parallel.axes.data.index)

    @property
    def coordinator(self) -> Coordinator:
        """All ranks, as checkpoints see them."""
        return ProcessGroupCoordinator() if dist.is_initialized() else SingleProcess()

    def step(self, *, stop: bool = False) -> StepResult:
        """Makes one optimizer step, or skips it if its loss or its gradient is not finite.

        Args:
            stop: That this rank was asked to stop; all ranks learn of it in the result.

        Raises:
            TrainingError: More steps in a row were skipped than `optimizer.skip` allows. The step counts as
                skipped all the same: a state that is saved now goes on behind it.
            RunError: The directory of the Run holds a run, of which no checkpoint was loaded.
        """
        self._listeners.begin_step()
        began = time.perf_counter()
        rate = self._rates.set(self.step_count)
        self._buffers.begin_step()
        with self._recorder.step(self.step_count + 1):
            passed = self._passes.run(self.position, stop=stop)
            with self._recorder.span(Kind.OPTIMIZER):
                norm, is_finite = self._update(passed)
            reason = "" if is_finite else self._leave_out(passed, norm)
            self._buffers.end_step()
            if self._synchronise_buffers and is_finite:
                self._buffers.average(self.parallel.axes.data)
        self.step_count += 1
        self.position += self._loader.batch_size
        self.skips.note(reason)
        result = StepResult(
            step=self.step_count,
            loss=passed.loss,
            gradient_norm=norm,
            learning_rate=rate,
            tokens=passed.tokens * self.parallel.axes.data.size,
            seconds=time.perf_counter() - began,
            stop=passed.stop,
            skipped=reason,
        )
        self._listeners.stepped(result)
        self.skips.require_progress(self.step_count, reason)
        return result

    def validate(self, samples: Any, count: int) -> float:
        """The mean loss over the first `count` samples; dropout is off."""
        return self.evaluate(samples, count)["loss"]

    def evaluate(
        self, samples: Any, count: int, functions: Mapping[str, Evaluation] | None = None
    ) -> dict[str, float]:
        """The mean `loss` over the first `count` samples, and the means of functions; dropout is off.

        Args:
            samples: Samples, or a map-style dataset.
            count: How many; all if there are fewer.
            functions: By name, from the model's output and the targets to a mean over the elements that
                count. A batch that is a mapping and gives the loss itself takes the targets' place.
        """
        with self._recorder.span(Kind.VALIDATION):
            values = evaluate(
                self.parallel,
                as_samples(samples),
                count,
                reader=self._reader,
                functions=functions or {},
                seed=self._seed,
                microbatch=self.plan.microbatch,
                device=self._device,
            )
        self._listeners.validated(self.step_count, values)
        return values

    def save(self, directory: Path | None = None, extra: Mapping[str, Any] | None = None) -> Path:
        """Saves a checkpoint of the state into a directory of checkpoints.

        Args:
            directory: On a file system that all ranks see; by default that of the Run.
            extra: A JSON object to keep with it.

        Raises:
            CheckpointError: It could not be written; training can go on.
            ConfigError: There is neither a directory nor a Run.
        """
        if directory is None:
            directory = self._listeners.checkpoints
        state = {
            **(extra or {}),
            "step": self.step_count,
            "position": self.position,
            "skipped": [self.skips.total, self.skips.in_a_row],
        }
        with self._recorder.span(Kind.CHECKPOINT):
            path = self._saved.save(directory, self.step_count, state)
        self._listeners.saved(path)
        return path

    def require_savable(self) -> None:
        """To be called after a step, so that no save later on fails for what the optimizer is.

        Raises:
            CheckpointError: The optimizer keeps what a checkpoint cannot hold.
        """
        self._saved.require_savable()

    def load(self, checkpoint: Path) -> Mapping[str, Any]:
        """Takes up the state of a checkpoint, which any number of ranks under any Plan may have saved.

        Under the same Plan training goes on bitwise as it would have. Under another, torch's, numpy's and
        Python's generators, which Shoal's own models do not use, begin anew from the run's seed and the step;
        and buffers that differed between ranks begin with those of one.

        Returns:
            What was kept with it.

        Raises:
            CheckpointError: It does not fit the model or the optimizer.
        """
        state = self._saved.load(checkpoint)
        self.step_count, self.position = state["step"], state["position"]
        self.skips.total, self.skips.in_a_row = state["skipped"]
        self._passes.close()
        self._listeners.loaded(self.step_count)
        return state

    def close(self) -> None:
        """Ends what prepares data, which another step would begin anew, and the record of the Run."""
        self._passes.close()
        self._listeners.close()

    def _update(self, passed: Passed) -> tuple[float, bool]:
        """Steps the optimizer if all is finite; gives the gradient's norm, and whether it was."""
        clip = self.config.clip
        norm = self.parallel.gradient_norm() if clip is None else self.parallel.clip_gradients(clip)
        is_finite = math.isfinite(passed.loss) and math.isfinite(norm)
        if is_finite:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return norm, is_finite

    def _leave_out(self, passed: Passed, norm: float) -> str:
        """Undoes what the step did; gives the reason."""
        reason = explain_not_finite(
            self.parallel,
            passed,
            norm,
            self._loader,
            self.position,
            self._names,
            self.plan.microbatch,
            self.coordinator,
        )
        self.parallel.zero_grad()
        self._buffers.put_back()
        return reason
