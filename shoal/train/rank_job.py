"""The execution of a job on one rank: build, train step by step, save, report.

Profiles of some steps with torch.profiler: of those that were asked for, and after a signal.

Each rank writes `RUN/profile/rank-00000-steps-100-105.json.gz`, a trace for Perfetto, chrome://tracing or
Holistic Trace Analysis, in which the spans of the Timeline are marked. On a GPU the history of its memory can
be kept too, for https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.checkpoint import Coordinator
from shoal.data import AnyCorpus
from shoal.errors import CheckpointError, ConfigError, TrainingError
from shoal.launch.elastic import Membership
from shoal.launch.local import StopSignal, World
from shoal.launch.submit import EXIT_STOPPED
from shoal.models import Transformer, new_parameters
from shoal.record import Marks
from shoal.spec.plan import Plan
from shoal.spec.run import Run, shown
from shoal.train.absolute_paths import first_model
from shoal.train.agreement import are_all_asked, look_at_host
from shoal.train.auto_plan import PassedOver
from shoal.train.classes import for_model, prepared
from shoal.train.compiling import Compiling
from shoal.train.config import describe_config
from shoal.train.evaluate import HeldOut, accuracy
from shoal.train.init_from import begin_from
from shoal.train.job import Job, offload_folder
from shoal.train.learning_rate import rate_change_of
from shoal.train.micro_batch import TrainingData
from shoal.train.out_of_memory import does_not_fit, is_out_of_memory
from shoal.train.result import Callbacks, LiveLine, StepResult, summary
from shoal.train.run_writer import RunWriter, WritingRank, describe_device, describe_run
from shoal.train.save_policy import SavePolicy, is_due
from shoal.train.server_roles import Role
from shoal.train.snapshot import nondeterministic_operator
from shoal.train.trainer import Runtime, Trainer
from shoal.units import format_count, parse_steps


def opening(job: Job, described: Mapping[str, Any], plan: Plan) -> str:
    """Return the first lines of a training.

    Args:
        job: The job.
        described: The description of its run.
        plan: Its Plan, with the stages that the model was cut into.
    """
    model, device = described["model"], described["device"]
    ranks = f"{job.plan.ranks} {device['type']} rank{'s' if job.plan.ranks > 1 else ''}"
    return (
        f"run {shown(job.path)}: {model['name']} with {format_count(model['parameters'])} parameters "
        f"on {ranks}, Plan {plan}\n{describe_config(job.config)}{_passed_over_text(job.passed_over)}"
        f"{'' if job.goes_on else _new_parameters_text(described)}"
    )


def _passed_over_text(passed_over: Sequence[PassedOver]) -> str:
    """Return the Plans that plan = "auto" passed over, each reason once."""
    first = {each.reason: each for each in reversed(passed_over)}
    lines = [f"\nnot used, though predicted to be faster: {each}" for each in reversed(first.values())]
    if len(passed_over) > len(first):
        lines.append(f"\n{len(passed_over) - len(first)} others for the same reasons; run.json has all")
    return "".join(lines)


def _new_parameters_text(described: Mapping[str, Any]) -> str:
    """Return a line on the parameters that the model's folder lacks; empty if it lacks none."""
    names = described["new_parameters"]
    if not names:
        return ""
    return (
        f"\nnew values for {', '.join(names)}: the weights of {described['config']['model']} do not have them"
    )


def describe(job: Job, model: nn.Module, device: torch.device, loss_unit: str) -> dict[str, Any]:
    """Return the description of a run.

    Args:
        job: The job.
        model: The whole model.
        device: The device of a rank.
        loss_unit: Unit of the loss, such as "nats a token".
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if isinstance(model, Transformer):
        flops = model.config.flops_per_token(job.config.sequence)
    else:
        flops = 6.0 * parameters
    return {
        **describe_run(job.path, job.plan.ranks, job.config.model, parameters, flops),
        "plan": str(job.plan),
        "passed_over": [{"plan": str(each.plan), "reason": each.reason} for each in job.passed_over],
        "cluster": None if job.cluster is None else asdict(job.cluster),
        "seed": job.config.seed,
        "config": job.config.model_dump(mode="json"),
        "device": describe_device(device, job.plan),
        "tokens_per_step": job.config.batch * job.config.sequence,
        "loss_unit": loss_unit,
        "new_parameters": list(new_parameters(model)),
    }


_STEPS = 5
"""Steps that a signal asks for."""
_EVENTS = 1_000_000
"""Most changes of memory that are kept."""


@final
class Profiling:
    """Profile steps of a rank. A failure costs the profile, not the training.

    SIGUSR2 asks for the next five steps, until `close`.

    Args:
        steps: The first and the last step to profile; None for none.
        folder: Folder for the traces.
        rank: The global rank.
        device: Device on which this rank computes.
        marks: The marks of the rank's recorder.
        memory: Whether the history of a GPU's memory is kept too.
        say: Called with one line about each profile.
    """

    def __init__(
        self,
        steps: tuple[int, int] | None,
        folder: Path,
        rank: int,
        device: torch.device,
        marks: Marks,
        *,
        memory: bool,
        say: Callable[[str], object],
    ) -> None:
        self._steps = steps
        self._folder = folder
        self._rank = rank
        self._device = device
        self._marks = marks
        self._keeps_memory = memory and device.type == "cuda"
        self._say = say
        self._is_asked = False
        self._running: profile | None = None
        self._first = self._last = self._made = 0
        self._marks_before = marks.new
        self._handler_before = None
        self._heeds = threading.current_thread() is threading.main_thread()
        if self._heeds:
            self._handler_before = signal.signal(signal.SIGUSR2, self._ask)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Return the context of a step, from 1; it is profiled if it was asked for."""
        self._begin_if_asked(number)
        if self._running is None:
            yield
            return
        self._made = number
        with record_function(f"step {number}"):
            yield
        if number >= self._last:
            self._end()

    def close(self) -> None:
        """End a profile that is still running, and give the signal back."""
        if self._running is not None:
            self._end()
        if self._heeds:
            self._heeds = False
            signal.signal(signal.SIGUSR2, self._handler_before or signal.SIG_IGN)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def _begin_if_asked(self, number: int) -> None:
        if self._running is not None:
            return
        if self._steps is not None and self._steps[0] <= number <= self._steps[1]:
            self._last = self._steps[1]
        elif self._is_asked:
            self._last = number + _STEPS - 1
        else:
            return
        self._is_asked, self._first = False, number
        with self._failing_quietly():
            is_cuda = self._device.type == "cuda"
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
            running = profile(activities=activities, record_shapes=True)
            running.start()
            self._running = running
            self._marks_before, self._marks.new = self._marks.new, record_function
            if self._keeps_memory:
                torch.cuda.memory._record_memory_history(max_entries=_EVENTS)

    def _end(self) -> None:
        running, self._running = self._running, None
        self._marks.new = self._marks_before
        assert running is not None
        with self._failing_quietly():
            running.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            stem = f"rank-{self._rank:05d}-steps-{self._first}-{self._made}"
            running.export_chrome_trace(str(self._folder / f"{stem}.json.gz"))
            if self._keeps_memory:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"{stem}-memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            self._say(f"steps {self._first} to {self._made} are profiled in {self._folder}")

    @contextlib.contextmanager
    def _failing_quietly(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._steps = None
            self._say(f"the profile of steps {self._first} to {self._last} failed: {error}")


class Regroup(Exception):  # noqa: N818, it tells of no error
    """The members of the training change: its state is saved, and another group of ranks goes on from it."""


@final
class Execution:
    """The execution of a job on one rank, from its first step here to its last."""

    def __init__(
        self,
        job: Job,
        world: World,
        device: torch.device,
        coordinator: Coordinator,
        role: Role | None = None,
        membership: Membership | None = None,
    ) -> None:
        self._job = job
        self._config = job.config
        self._world = world
        self._role = role
        self._membership = membership
        self._servers = None if role is None else role.servers()
        self._looked_at = 0  # the step after which was last looked what is due
        self._device = device
        self._coordinator = coordinator
        self._is_stopped = False  # whether a rank asked to stop
        self._live = LiveLine(self._config.steps, self._config.record.live)

        corpus = self._prepare_data()
        model = first_model(self._config, device, goes_on=job.resume is not None and role is None)
        corpus = for_model(corpus, model)
        unit = "text" if corpus.labels else "byte" if corpus.tokenizer.name == "bytes" else "token"
        self._described = describe(job, model, device, f"nats a {unit}")
        first = 0 if role is None else role.first_rank
        begins = world.rank == 0 if role is None else role.is_first
        if begins and not job.goes_on:
            Run.create(job.path, self._described)
        if role is not None:
            role.wait_for_run()
        self._run = Run.open(job.path) if begins else Run(job.path)
        say, meet_at = self._live.say, world.master[0]
        self._rank = WritingRank(coordinator, device, begins, say, first=first, towards=meet_at)
        record = self._config.record
        self._writer = RunWriter(self._run, self._described, self._rank, record, goes_on=job.goes_on)
        self._say = self._writer.say
        look_at_host(self._run, world, unit=first, replaces_ranks=membership is not None)
        self._time = self._writer.begin(
            job.launched, job.processes, lambda step: self._compiling.stepped(step)
        )
        self._profiling = Profiling(
            parse_steps(record.profile) if record.profile else None,
            self._run.path / "profile",
            self._rank.number,
            device,
            self._writer.marks,
            memory=record.profile_memory,
            say=self._say,
        )
        self._held_out = corpus.samples("validation", self._config.sequence)
        self._trainer = Trainer(
            model,
            TrainingData(corpus.samples("train", self._config.sequence), sequence=self._config.sequence),
            job.plan,
            batch=self._config.batch,
            steps=self._config.steps,
            optimizer=self._config.optimizer,
            seed=self._config.seed,
            device=device,
            run=self._writer,
            callbacks=Callbacks(
                on_step=self._take_result,
                on_save=self._upload,
                on_decision=lambda decision: self._say(str(decision)),
            ),
            runtime=Runtime(
                servers=self._servers,
                offload_folder=offload_folder(self._config, job.path),
                held_out=HeldOut(self._held_out, functions={"accuracy": accuracy}),
                compare_replicas=self._config.compare_replicas,
            ),
        )
        self._saving = SavePolicy(
            self._trainer,
            self._config.checkpoint,
            self._run.checkpoints,
            {
                "fingerprint": corpus.fingerprint,
                "sequence": self._config.sequence,
                "seed": self._config.seed,
            },
            self._coordinator,
            self._say,
            lambda: self._time.account,
            membership,
        )
        self._compiling = Compiling(self._say)

    def run(self, stop: StopSignal) -> int:
        """Train to the last step, or until stopped; return the exit code."""
        try:
            with self._time.part("load"):
                self._take_up()
            self._time.loaded(self._trainer.step_count)
            self._looked_at = self._trainer.step_count
            stop.heed()
            self._say(opening(self._job, self._described, self._plan))
            if self._trainer.step_count == self._config.steps:  # all that is left is the last validation
                self._do_what_is_due(stop)
            while not self._is_stopped and self._trainer.step_count < self._config.steps:
                self._step(stop)
                stop.has_step = True
                if not self._is_stopped or self._trainer.step_count == self._config.steps:
                    self._do_what_is_due(stop)
            if self._is_stopped:
                return self._end(stop)
            self._trainer.settle()
            if self._trainer.exchange.retire():
                self._do_what_is_due(stop)
            self._trainer.exchange.leave()
            self._writer.close_timeline()  # the summary reads the timelines of all ranks
            self._trainer.close()
            self._meet()
            stop.is_done = True
            if self._writer.leads:
                self._say("")
                with contextlib.suppress(OSError):  # all is saved: only its reader is gone
                    print(summary(self._run, self._saving.summary()), flush=True)
            return 0
        except Exception as error:
            self._time.failed(error)
            raise
        finally:
            self._trainer.close()
            self._writer.close_timeline()
            self._profiling.close()
            self._compiling.close()
            self._saving.close()
            self._writer.close("the ranks end")
            if self._servers is not None:
                self._servers.close()

    def _end(self, stop: StopSignal) -> int:
        """Save after a signal, and return the exit code; raise Regroup if others go on."""
        if self._membership is not None and not are_all_asked(stop, self._coordinator):
            with self._time.part("save"):
                self._saving.save_for_others()
            self._time.leave()
            raise Regroup
        if self._trainer.exchange.leads:
            with self._time.part("save"):
                path = self._saving.save_at_end()
            self._say(
                f"stopped by a signal; saved {shown(path)}; "
                f"go on with --resume {shlex.quote(shown(self._run.path))}"
            )
        return EXIT_STOPPED

    def _step(self, stop: StopSignal) -> None:
        """Make a step. If too many were skipped, save the state after them: a resume goes on there."""
        self._compiling.begin_step()
        try:
            with self._profiling.step(self._trainer.step_count + 1):
                self._trainer.step(stop=lambda: self._has_to_stop(stop))
        except TrainingError:
            with contextlib.suppress(CheckpointError), self._time.part("save"):
                self._saving.save_at_end()
            raise
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                plan, step = self._trainer.plan, self._trainer.step_count + 1
                number = self._rank.number
                raise does_not_fit(self._config, plan, self._job.cluster, number, step, error) from error
            if not isinstance(error, RuntimeError):
                raise
            if self._config.deterministic and (operator := nondeterministic_operator(error)):
                raise ConfigError(
                    f"deterministic=true was given, and {operator} has no deterministic form on "
                    f"{self._device.type}",
                    possible="operators that are deterministic there, or deterministic=false",
                    change="leave out deterministic=true, or use another operator in the model",
                ) from error
            raise

    def _has_to_stop(self, stop: StopSignal) -> bool:
        """Return whether this rank is asked to stop, or the members change."""
        return stop.received is not None or (self._membership is not None and self._membership.is_due)

    def _take_result(self, result: StepResult) -> None:
        """Take note of a step's result; on a GPU it comes while the next step runs."""
        self._is_stopped |= result.stop
        if self._membership is not None:
            self._membership.step_seconds, self._membership.steps = result.seconds, result.step
        self._saving.stepped(result.seconds, is_made=not result.skipped)
        if self._writer.leads:
            if result.skipped:
                self._say(f"step {result.step} is skipped: it has {result.skipped}")
            self._live.show(result)

    def _do_what_is_due(self, stop: StopSignal) -> None:
        """Save, and then validate: a signal meanwhile loses no step."""
        before, step = self._looked_at, self._trainer.step_count
        if not self._trainer.exchange.is_savable:
            return
        self._looked_at = step
        if not self._trainer.exchange.leads:
            return
        with self._time.part("save"):
            self._saving.save_if_due(before)
        if step == self._config.steps or is_due(before, step, self._config.validation.every):
            self._validate(stop)

    def _validate(self, stop: StopSignal) -> None:
        """Measure on held-out samples, and tell the values, unless a rank is asked to stop meanwhile."""
        functions = {"validation_accuracy": accuracy} if self._config.data.label else {}
        count, is_asked = self._config.validation.samples, lambda: stop.received is not None
        values = self._trainer.evaluate(self._held_out, count, functions, stop=is_asked)
        begins = f"step {self._trainer.step_count}/{self._config.steps}  validation"
        if not values:
            self._is_stopped = True
            self._say(f"{begins} stopped by a signal, without a result")
            return
        named = [f"{name.removeprefix('validation_')} {value:.3f}" for name, value in values.items()]
        self._say(f"{begins} {', '.join(named)}")

    def _upload(self, checkpoint: Path) -> None:
        """Copy a checkpoint that is complete to the object store, if there is one."""
        if self._writer.leads:
            self._saving.upload(checkpoint)

    def _take_up(self) -> None:
        """Load what the job resumes or begins from, if anything."""
        resume, init = self._job.resume, self._config.init
        if resume is not None:
            before = resume.run.description if self._coordinator.rank == 0 else {}
            path = self._saving.resume(resume)
            begins = "there is no sound checkpoint: training starts from the beginning"
            self._say(f"goes on from {shown(path)}" if path else begins)
            if path and self._writer.leads:
                made = self._trainer.step_count
                if text := rate_change_of(resume.run, before, self._config, made):
                    self._say(text)
        if init and self._trainer.step_count == 0:
            begin_from(self._trainer, init, self._say)
            self._say(f"begins from the weights of {init}")
        self._writer.loaded(self._trainer.step_count)  # where there was nothing to load, too

    def save_replica(self, seconds: float) -> None:
        """Keep the last step's state for those that stay; see `SavePolicy.save_replica`."""
        with contextlib.suppress(CheckpointError):  # then an older state counts
            self._saving.save_replica(seconds)

    @property
    def _plan(self) -> Plan:
        """The Plan, with the stages that the model was cut into if all ranks share a process group."""
        return self._trainer.parallel.plan if self._role is None else self._job.plan

    def _prepare_data(self) -> AnyCorpus:
        """Tokenize once per host: the first rank there does it, the others find it done."""
        if self._world.local_rank == 0:
            prepared(self._config)
        self._meet()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first call has given them already
            return prepared(self._config)

    def _meet(self) -> None:
        """Return once all ranks have come here."""
        self._coordinator.all_gather_object(None)
