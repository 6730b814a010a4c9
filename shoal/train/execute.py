"""Execute a job on one rank: build, train step by step, save, report."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint import (
    Coordinator,
    ProcessGroupCoordinator,
    SingleProcess,
    latest,
    read_manifest,
    retain,
    verify,
)
from shoal.data import Corpus, prepare
from shoal.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    DataError,
    ModelError,
    TrainingError,
)
from shoal.launch import EXIT_STOPPED, StopSignal, World, choose_device, join
from shoal.models import Transformer
from shoal.parallel import own_device
from shoal.record import Loggers, MetricsWriter, NullRecorder, Recorder, TensorBoardLogger, open_recorder
from shoal.run import Run
from shoal.train.automatic import PassedOver
from shoal.train.compiling import Compiling
from shoal.train.config import TrainConfig, describe_config
from shoal.train.job import Job, Resume, nothing_left_to_do
from shoal.train.live import LiveLine, summary
from shoal.train.located import build_model
from shoal.train.randomness import compute_deterministically, nondeterministic_operator
from shoal.train.rate_change import rate_change_of
from shoal.train.result import StepResult
from shoal.train.run_record import describe_device, describe_versions
from shoal.train.trainer import Trainer
from shoal.units import format_count

__all__ = ["execute"]


def execute(choose: Callable[[], Job], world: World, stop: StopSignal) -> int:
    """Train, as one rank of `world`.

    Args:
        choose: Returns the job. Only rank 0's result is used; the other ranks receive it.
        world: The ranks.
        stop: Says whether this process was asked to stop.

    Returns:
        The exit code: 0, or `EXIT_STOPPED` if a signal stopped the run and its state is saved.
    """
    first_choice = choose()
    device = own_device(choose_device(first_choice.config.device, world.local_rank))
    if first_choice.config.deterministic:
        compute_deterministically()
    join(world, device, timeout=first_choice.config.timeout)
    coordinator: Coordinator = ProcessGroupCoordinator() if dist.is_initialized() else SingleProcess()
    try:
        job: Job = coordinator.all_gather_object(first_choice)[0]
        done: str = coordinator.all_gather_object(nothing_left_to_do(job) if world.rank == 0 else "")[0]
        if done:
            if world.rank == 0:
                print(done, file=sys.stderr)
            return 0
        return _Execution(job, world, device, coordinator).run(stop)
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()


@final
class _Execution:
    """The execution of a job on one rank, from its first step here to its last."""

    def __init__(self, job: Job, world: World, device: torch.device, coordinator: Coordinator) -> None:
        self._job = job
        self._config = job.config
        self._world = world
        self._device = device
        self._coordinator = coordinator
        self._is_first = world.rank == 0
        self._is_stopped = False  # whether a rank asked to stop
        self._is_savable = False  # as far as known: an optimizer has no state before its first step
        self._live = LiveLine(self._config.steps, self._config.record.live)

        corpus = self._prepare_data()
        model = _build_model(self._config, device)
        loss_unit = "nats a byte" if corpus.tokenizer.name == "bytes" else "nats a token"
        self._described = _describe(job, world, model, device, loss_unit)
        if self._is_first and not job.goes_on:
            Run.create(job.path, self._described)
        self._meet()
        self._run = Run.open(job.path)
        recorder = self._open_recorder(device)
        self._recorder = recorder
        self._trainer = Trainer(
            model,
            corpus.samples("train", self._config.sequence),
            job.plan,
            batch=self._config.batch,
            steps=self._config.steps,
            optimizer=self._config.optimizer,
            seed=self._config.seed,
            device=device,
            recorder=recorder,
            sequence=self._config.sequence,
            on_step=self._take_result,
        )
        self._validation = corpus.samples("validation", self._config.sequence)
        # These must stay unchanged when the run goes on, so that each sample is seen once an epoch.
        self._data = {
            "fingerprint": corpus.fingerprint,
            "sequence": self._config.sequence,
            "seed": self._config.seed,
        }
        self._loggers = self._open_loggers()
        self._compiling = Compiling(self._say)

    def run(self, stop: StopSignal) -> int:
        """Train to the last step, or until stopped; return the exit code."""
        try:
            self._take_up()
            stop.heed()
            self._say(self._opening())
            while self._trainer.step_count < self._config.steps:
                self._step(stop)
                if self._is_stopped and self._trainer.step_count < self._config.steps:
                    path = self._save()
                    self._say(f"stopped by a signal; saved {path}; go on with --resume {self._run.path}")
                    return EXIT_STOPPED
                self._do_what_is_due()
            self._trainer.settle()
            self._recorder.close()  # the summary reads the timelines of all ranks
            self._trainer.close()
            self._meet()
            if self._is_first:
                self._live.say("")
                with contextlib.suppress(
                    OSError
                ):  # all is saved: if the reader of the output is gone, only the summary is lost
                    print(summary(self._run), flush=True)
            return 0
        finally:
            self._trainer.close()
            self._recorder.close()
            self._loggers.close()
            self._compiling.close()

    def _step(self, stop: StopSignal) -> None:
        """Make a step. If too many were skipped, save the state after them: a resume goes on there."""
        self._compiling.begin_step()
        try:
            self._trainer.step(stop=stop.received is not None)
            self._compiling.stepped(self._trainer.step_count)
        except TrainingError:
            with contextlib.suppress(CheckpointError):
                self._trainer.save(self._run.checkpoints, {"data": self._data})
            raise
        except RuntimeError as error:
            if self._config.deterministic and (operator := nondeterministic_operator(error)):
                raise ConfigError(
                    f"deterministic=true was given, and {operator} has no deterministic form on "
                    f"{self._device.type}",
                    possible="operators that are deterministic there, or deterministic=false",
                    change="leave out deterministic=true, or use another operator in the model",
                ) from error
            raise

    def _take_result(self, result: StepResult) -> None:
        """Take note of a step's result; on a GPU it comes while the next step runs."""
        self._is_stopped |= result.stop
        if not (self._is_savable or result.skipped):
            self._trainer.require_savable()
            self._is_savable = True
        if not self._is_first:
            return
        self._loggers.log(result.step, result.values())
        if result.skipped:
            self._say(f"step {result.step} is skipped: it has {result.skipped}")
        self._live.show(result)

    def _do_what_is_due(self) -> None:
        step, last = self._trainer.step_count, self._config.steps
        if step == last or _is_due(step, self._config.validation.every):
            loss = self._trainer.validate(self._validation, self._config.validation.samples)
            self._loggers.log(step, {"validation_loss": loss})
            self._say(f"step {step}/{last}  validation loss {loss:.3f}")
        if step == last:
            self._save()
        elif _is_due(step, self._config.checkpoint.every):
            try:
                self._save()
            except CheckpointError as error:
                self._say(f"warning: step {step} was not saved, training goes on: {error}")

    def _save(self) -> Path:
        path = self._trainer.save(self._run.checkpoints, {"data": self._data})
        retain(self._run.checkpoints, self._config.checkpoint.keep, self._coordinator, self._say)
        return path

    def _take_up(self) -> None:
        """Load the state that the job resumes from, if any, and describe the run as it is now."""
        resume = self._job.resume
        if resume is not None:
            self._load_newest(resume)
        # Only now, so that a configuration that does not fit the run leaves it unchanged.
        if self._is_first:
            self._run.describe(self._resolved())

    def _resolved(self) -> dict[str, Any]:
        """Return the run's description, with the stages that the model was cut into."""
        now = {**self._described, "plan": str(self._trainer.parallel.plan)}
        if not self._job.goes_on:
            return now
        before = self._run.description
        since = _since_step(before, now, self._trainer.step_count + 1)
        return {**now, "created": before["created"], "since_step": since}

    def _load_newest(self, resume: Resume) -> None:
        """Load the named checkpoint, or the newest sound one."""
        path = resume.checkpoint
        if path is None:
            path = latest(resume.run.checkpoints, self._coordinator, self._say)
        else:
            verify(path, self._coordinator)
        if path is None:
            self._say("there is no sound checkpoint: training starts from the beginning")
        else:
            self._require_same_data(path)
            self._load(path)
            self._say(f"goes on from {path}")
            if self._is_first and (
                text := rate_change_of(resume.run, self._config, self._trainer.step_count)
            ):
                self._say(text)

    def _load(self, path: Path) -> None:
        try:
            self._trainer.load(path)
        except CorruptCheckpointError:
            raise
        except CheckpointError as error:
            raise ModelError(
                f"the model does not fit the state that is resumed: {error}",
                possible="the model and model_options of the run that saved it",
                change="give the model of that run, or start a new run",
            ) from error

    def _require_same_data(self, path: Path) -> None:
        saved: Mapping[str, Any] = read_manifest(path).state["data"]
        for name, value in self._data.items():
            if saved[name] != value:
                raise DataError(
                    f"the run to resume has {name}={saved[name]} for its data, and now {name}={value}",
                    possible="the same data, sequence and seed, so that no sample is skipped or repeated",
                    change="give the data of that run, or start a new run",
                )

    def _opening(self) -> str:
        model, device = self._described["model"], self._described["device"]
        plan = self._trainer.parallel.plan
        return (
            f"run {self._run.path}: {model['name']} with "
            f"{format_count(model['parameters'])} parameters on {self._world.ranks} "
            f"{device['type']} rank{'s' if self._world.ranks > 1 else ''}, Plan {plan}\n"
            f"{describe_config(self._config)}{_passed_over_text(self._job.passed_over)}"
        )

    def _prepare_data(self) -> Corpus:
        """Tokenize once per host: the first rank there does it, the others find it done."""
        if self._world.local_rank == 0:
            prepare(self._config.data)
        self._meet()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first call has given them already
            return prepare(self._config.data)

    def _open_recorder(self, device: torch.device) -> Recorder:
        if not self._config.record.timeline:
            return NullRecorder()
        rank = self._world.rank
        return open_recorder(self._run.timeline_file(rank), rank, device, say=self._live.say)

    def _open_loggers(self) -> Loggers:
        if not self._is_first:
            return Loggers([])
        writers = [MetricsWriter(self._run.metrics_file, say=self._live.say)]
        if self._config.record.tensorboard:
            return Loggers([*writers, TensorBoardLogger(self._run.log / "tensorboard")], say=self._live.say)
        return Loggers(writers, say=self._live.say)

    def _meet(self) -> None:
        """Return once all ranks have come here."""
        self._coordinator.all_gather_object(None)

    def _say(self, text: str) -> None:
        if self._is_first:
            self._live.say(text)


def _since_step(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> int | None:
    """Return the first step under the present layout, from which a report counts; None for all steps."""
    settings = ("plan", "world_size", "tokens_per_step", "device")
    is_same = all(before.get(name) == now[name] for name in settings)
    since: int | None = before.get("since_step")
    return since if is_same else step


def _passed_over_text(passed_over: Sequence[PassedOver]) -> str:
    """Return the Plans that plan = "auto" passed over, each reason once."""
    first = {each.reason: each for each in reversed(passed_over)}
    lines = [f"\nnot used, though predicted to be faster: {each}" for each in reversed(first.values())]
    if len(passed_over) > len(first):
        lines.append(f"\n{len(passed_over) - len(first)} others for the same reasons; run.json has all")
    return "".join(lines)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _build_model(config: TrainConfig, device: torch.device) -> nn.Module:
    """Build the model: presets without memory, which `parallelize` fills; others as their makers do."""
    if ":" in config.model:
        torch.manual_seed(config.seed)
        return build_model(config, device)
    return build_model(config, "meta")


def _describe(
    job: Job, world: World, model: nn.Module, device: torch.device, loss_unit: str
) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if isinstance(model, Transformer):
        flops = model.config.flops_per_token(job.config.sequence)
    else:
        flops = 6.0 * parameters
    return {
        "name": job.path.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": str(job.plan),
        "passed_over": [{"plan": str(each.plan), "reason": each.reason} for each in job.passed_over],
        "cluster": None if job.cluster is None else asdict(job.cluster),
        "world_size": world.ranks,
        "seed": job.config.seed,
        "config": job.config.model_dump(mode="json"),
        "model": {"name": job.config.model, "parameters": parameters, "flops_per_token": flops},
        "device": describe_device(device, job.plan),
        "tokens_per_step": job.config.batch * job.config.sequence,
        "loss_unit": loss_unit,
        "versions": describe_versions(),
    }
