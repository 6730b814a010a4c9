"""The execution of a job on one rank: build, train step by step, save, report."""

from __future__ import annotations

import contextlib
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch

from shoal.checkpoint import Coordinator
from shoal.data import AnyCorpus
from shoal.errors import CheckpointError, ConfigError, TrainingError
from shoal.launch import EXIT_STOPPED, Membership, StopSignal, World
from shoal.parallel.exchange.worker_exchange import WorkerExchange
from shoal.plan import Plan
from shoal.record import ClockExchange, Marks, exchange_clocks
from shoal.run import Account, Decision, Run, write_decision
from shoal.train.agreement import are_all_asked
from shoal.train.claim_together import claim_together
from shoal.train.classes import for_model, prepared
from shoal.train.compiling import Compiling
from shoal.train.describe import describe, opening, since_step
from shoal.train.first_weights import begin_from
from shoal.train.held_out import HeldOut, accuracy
from shoal.train.host_watch import look_at_host
from shoal.train.job import Job
from shoal.train.live import LiveLine, summary
from shoal.train.located import first_model
from shoal.train.offloading import offload_folder
from shoal.train.out_of_memory import does_not_fit, is_out_of_memory
from shoal.train.randomness import nondeterministic_operator
from shoal.train.rate_change import rate_change_of
from shoal.train.recording import open_destinations, open_loggers, open_profiling, open_run_recorder
from shoal.train.result import StepResult
from shoal.train.roles import Role
from shoal.train.save_policy import SavePolicy
from shoal.train.step_memory import MemoryRecord
from shoal.train.time_account import TimeAccount
from shoal.train.trainer import Trainer
from shoal.train.validation import Validation

__all__ = ["Execution", "Regroup"]


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
        self._exchange: WorkerExchange | None = None  # until the Trainer is made
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
        if self._is_first and not job.goes_on:
            Run.create(job.path, self._described)
        if role is not None:
            role.wait_for_run()
        self._meet()
        self._run = Run.open(job.path) if self._is_first else Run(job.path)
        self._writer = claim_together(coordinator, self._run, self._live.say, acts=self._is_first)
        begins = 0 if role is None else role.first_rank
        look_at_host(self._run, world, unit=begins, replaces_ranks=membership is not None)
        self._time = TimeAccount(self._run, job.launched, job.processes, self._is_first, self._take_account)
        marks, record, number, run = Marks(), self._config.record, self._number, self._run
        first, say = number - world.rank, self._live.say
        self._recorder = open_run_recorder(record, self._run, number, first, device, marks, say)
        self._clocks = self._compare_clocks()
        self._profiling = open_profiling(record, self._run, number, device, marks, self._say)
        self._memory = MemoryRecord(run.memory_file(number) if record.memory else None, number, self._say)
        validation = corpus.samples("validation", self._config.sequence)
        self._trainer = Trainer(
            model,
            corpus.samples("train", self._config.sequence),
            job.plan,
            batch=self._config.batch,
            steps=self._config.steps,
            optimizer=self._config.optimizer,
            seed=self._config.seed,
            device=device,
            recorder=self._recorder,
            sequence=self._config.sequence,
            on_step=self._take_result,
            on_save=self._upload,
            on_decision=self._take_decision,
            held_out=HeldOut(validation, functions={"accuracy": accuracy}),
            servers=self._servers,
            compare_replicas=self._config.compare_replicas,
            offload_folder=offload_folder(self._config, job.path),
        )
        self._exchange = self._trainer.exchange
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
        self._destinations = open_destinations(record, self._run, world.rank == 0, say)
        self._loggers = open_loggers(self._run, self._destinations, world.rank == 0, say)
        self._compiling = Compiling(self._say)
        self._validation = Validation(self._trainer, validation, self._config, self._loggers.log, self._say)

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
                with self._time.part("steps"):
                    compiling = self._step(stop)
                stop.has_step = True
                self._time.stepped(self._trainer.step_count, compiling)
                if not self._is_stopped or self._trainer.step_count == self._config.steps:
                    self._do_what_is_due(stop)
            if self._is_stopped:
                return self._end(stop)
            self._trainer.settle()
            if self._trainer.exchange.retire():
                self._do_what_is_due(stop)
            self._trainer.exchange.leave()
            self._clocks.close()
            self._recorder.close()  # the summary reads the timelines of all ranks
            self._trainer.close()
            self._meet()
            stop.is_done = True
            if self._is_first:
                self._live.say("")
                with contextlib.suppress(OSError):  # all is saved: only its reader is gone
                    print(summary(self._run, self._saving.summary()), flush=True)
            return 0
        except Exception as error:
            self._time.failed(error)
            raise
        finally:
            self._trainer.close()
            self._clocks.close()
            self._recorder.close()
            self._time.write()
            self._loggers.close()
            self._profiling.close()
            self._compiling.close()
            self._saving.close()
            if self._writer is not None:
                self._writer.close()
            if self._servers is not None:
                self._servers.close()
            self._time.close("the ranks end")

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
                f"stopped by a signal; saved {path}; go on with --resume {shlex.quote(str(self._run.path))}"
            )
        return EXIT_STOPPED

    def _step(self, stop: StopSignal) -> float:
        """Make a step, and return the seconds that compiling took of it.

        If too many were skipped, save the state after them: a resume goes on there.
        """
        self._compiling.begin_step()
        try:
            self._make_step(stop=lambda: self._has_to_stop(stop))
            return self._compiling.stepped(self._trainer.step_count)
        except TrainingError:
            with contextlib.suppress(CheckpointError):
                self._saving.save_at_end()
            raise
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                given = self._config, self._trainer.plan, self._job.cluster, self._number
                raise does_not_fit(*given, self._trainer.step_count + 1, error) from error
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

    def _make_step(self, *, stop: Callable[[], bool]) -> None:
        trainer = self._trainer
        number = trainer.step_count + 1
        memory = self._memory.step(trainer.parallel, trainer.optimizer, number)
        with self._profiling.step(number), memory:
            trainer.step(stop=stop)

    def _take_result(self, result: StepResult) -> None:
        """Take note of a step's result; on a GPU it comes while the next step runs."""
        if self._writer is not None:
            self._writer.require()
        self._is_stopped |= result.stop
        if self._membership is not None:
            self._membership.step_seconds, self._membership.steps = result.seconds, result.step
        self._saving.stepped(result.seconds, is_made=not result.skipped)
        if not self._is_first:
            return
        self._loggers.log(result.step, result.values())
        if result.skipped:
            self._say(f"step {result.step} is skipped: it has {result.skipped}")
        self._live.show(result)

    def _take_account(self, account: Account) -> None:
        """Tell destinations where the time of the run went."""
        self._destinations.log(self._trainer.step_count, account.values())

    def _take_decision(self, decision: Decision) -> None:
        """Keep and tell a decision about the exchange."""
        if self._is_first:
            write_decision(self._run.decisions_file, decision)
        self._say(str(decision))

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
        if self._validation.is_due(before):
            with self._time.part("validation"):
                self._is_stopped |= not self._validation.make(stop)

    def _upload(self, checkpoint: Path) -> None:
        """Copy a checkpoint that is complete to the object store, if there is one."""
        if self._is_first:
            self._saving.upload(checkpoint)

    def _take_up(self) -> None:
        """Load what the job resumes or begins from, if anything, and describe the run as it is now."""
        resume, init = self._job.resume, self._config.init
        if resume is not None:
            path = self._saving.resume(resume)
            begins = "there is no sound checkpoint: training starts from the beginning"
            self._say(f"goes on from {path}" if path else begins)
            if path and self._is_first:
                made = self._trainer.step_count
                if text := rate_change_of(resume.run, self._config, made):
                    self._say(text)
        if init and self._trainer.step_count == 0:
            begin_from(self._trainer, init, self._say)
            self._say(f"begins from the weights of {init}")
        # Only now, so that a configuration that does not fit the run leaves it unchanged.
        if self._is_first:
            self._run.describe(self._resolved())

    def _resolved(self) -> dict[str, Any]:
        """Return the run's description, with the stages that the model was cut into."""
        now = {**self._described, "plan": str(self._plan)}
        if not self._job.goes_on:
            return now
        before = self._run.description
        since = since_step(before, now, self._trainer.step_count + 1)
        return {**now, "created": before["created"], "since_step": since}

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

    def _compare_clocks(self) -> ClockExchange:
        if not self._config.record.timeline:
            return ClockExchange()
        ranks, address = self._coordinator, self._world.master[0]
        return exchange_clocks(ranks, self._run.timeline, self._number, self._live.say, towards=address)

    @property
    def _number(self) -> int:
        """Number of this rank among those of all workers."""
        return self._world.rank + (0 if self._role is None else self._role.first_rank)

    @property
    def _is_first(self) -> bool:
        """Whether this is the rank that reports and writes what all share."""
        if self._role is not None and (self._exchange is None or self._exchange.worker < 0):
            return self._role.is_first
        return self._world.rank == 0 and (self._exchange is None or self._exchange.leads)

    def _meet(self) -> None:
        """Return once all ranks have come here."""
        self._coordinator.all_gather_object(None)

    def _say(self, text: str) -> None:
        if self._is_first:
            self._live.say(text)
