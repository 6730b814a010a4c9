"""The writer of a run: what a training leaves in its directory beside checkpoints.

`shoal train` and a Trainer of the library have one each, on every rank. The first rank describes the run and
claims it. Every rank writes its Timeline and its memory. The rank that leads writes metrics, decisions, the
account of time, and what people read.

The time that the first rank of a run spends, as it writes it into the run's events.

A rank is always in one part of its work: `start` until its first step, then `steps`, or what it does between
steps. See `shoal.spec.run.account` for the parts, and `shoal.spec.run.account` for the file.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from shoal.checkpoint import Coordinator
from shoal.errors import ConfigError, RunError, ShoalError
from shoal.models import Transformer
from shoal.parallel import Parallel
from shoal.parallel.exchange.worker_exchange import WorkerExchange
from shoal.record import (
    ClockExchange,
    Loggers,
    Marks,
    MetricsWriter,
    NullRecorder,
    Recorder,
    exchange_clocks,
    open_recorder,
)
from shoal.release import release
from shoal.spec.cluster import peak_flops
from shoal.spec.plan import Plan
from shoal.spec.run import (
    Account,
    Decision,
    Ledger,
    Run,
    absolute,
    read_events,
    shown,
    write_decision,
    write_event,
)
from shoal.train.agreement import claim_together
from shoal.train.config import RecordConfig
from shoal.train.step_memory import MemoryRecord

_SOON = 1.0  # seconds: lines come no sooner than this after each other
_SHARE = 1e-3  # of the run's age that passes between two lines, so that a long run has few


@final
class TimeAccount:
    """Account for the time of a group of ranks, from when it formed.

    Args:
        run: The run.
        launched: When the command that started the ranks began, in seconds since the epoch.
        ranks: Number of processes.
        is_writer: Whether this rank writes; the others account for nothing.
        told: Called with the account of the whole run, whenever there is a new one.
    """

    def __init__(
        self,
        run: Run,
        launched: float,
        ranks: int,
        is_writer: bool,
        told: Callable[[Account], object] = lambda account: None,
    ) -> None:
        self._file = run.events_file
        self._is_writer = is_writer
        self._told = told
        # Clocks of the system may be set while training goes on; the difference to this one may not change.
        self._offset = time.time() - time.perf_counter()
        self._at = self._written = time.perf_counter()
        self._part = "start"
        self._seconds: dict[str, float] = {}
        self._step = 0
        self._has_stepped = False
        self._is_closed = not is_writer
        self._ledger = Ledger(read_events([run.events_file, run.members_file]) if is_writer else ())
        self._write("began", launched=launched, ranks=ranks)
        now = self._ledger.account()
        self._began = time.time() if now is None else now.began

    @property
    def account(self) -> Account | None:
        """The account of the whole run up to the last event; None on ranks that do not write."""
        return self._ledger.account()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Give the time within this context to a part, unless an error breaks it off."""
        before = self._switch(name)
        yield
        self._switch(before)

    def loaded(self, step: int) -> None:
        """Note that the ranks hold the state after a step, and train from now on."""
        self._switch("other")
        self._step = step
        self._write("loaded", step=step)

    def stepped(self, step: int, compiling: float) -> None:
        """Note that a step was finished, of which compiling took some seconds; write what is due."""
        self._switch(self._part)
        self._step = step
        if compiling:
            moved = min(compiling, self._seconds.get("steps", 0.0))
            self._seconds["steps"] = self._seconds.get("steps", 0.0) - moved
            self._seconds["compile"] = self._seconds.get("compile", 0.0) + moved
        age = self._at + self._offset - self._began
        # The first step tells that ranks train again, should they be lost soon.
        if not self._has_stepped or self._at - self._written >= max(_SOON, _SHARE * age):
            self._flush()
        self._has_stepped = True

    def failed(self, error: BaseException) -> None:
        """Note that training failed: the part that the error broke off, such as a step, is lost."""
        if self._is_closed:
            return
        self._flush()
        self._write("failed", reason=f"{type(error).__name__}: {error}")
        self._is_closed = True

    def close(self, reason: str) -> None:
        """Write and tell what is left, and that these ranks end, unless they failed."""
        if self._is_closed:
            return
        self.write()
        self._write("ended", reason=reason)
        self._is_closed = True

    def write(self) -> None:
        """Write and tell what is known up to now."""
        if not self._is_closed:
            self._switch(self._part)
            self._flush()

    def leave(self) -> None:
        """Write what is left: the ranks go on in another group."""
        self.write()
        self._is_closed = True

    def _switch(self, part: str) -> str:
        """Give the time since the last call to the part before; return that part."""
        now = time.perf_counter()
        before = self._part
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._at
        self._at, self._part = now, part
        return before

    def _flush(self) -> None:
        """Write how the time between the last line and the last change of parts was spent."""
        self._written = self._at
        told: Mapping[str, Any] = {name: round(seconds, 6) for name, seconds in self._seconds.items()}
        self._seconds = {}
        self._write("spent", at=self._at, step=self._step, seconds=told)
        if (now := self._ledger.account()) is not None:
            self._told(now)

    def _write(self, event: str, *, at: float | None = None, **values: Any) -> None:
        if self._is_writer:
            moment = (time.perf_counter() if at is None else at) + self._offset
            self._ledger.take(write_event(self._file, event, at=moment, **values))


def describe_device(device: torch.device, plan: Plan) -> dict[str, Any]:
    """Return the description in run.json of the ranks' devices."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    peak = peak_flops(name, plan.precision) if device.type == "cuda" else None
    return {"type": device.type, "name": name, "peak_flops": peak}


def describe_run(
    path: Path, ranks: int, model: str, parameters: int, flops_per_token: float | None
) -> dict[str, Any]:
    """Return what run.json holds of every run.

    Args:
        path: The run's directory.
        ranks: Number of ranks.
        model: Name of the model.
        parameters: Number of its parameters.
        flops_per_token: FLOP of a token in forward and backward; None if they are not known.
    """
    return {
        "name": path.name,
        "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "world_size": ranks,
        "model": {"name": model, "parameters": parameters, "flops_per_token": flops_per_token},
        "versions": {"shoal": release(), "torch": torch.__version__, "python": platform.python_version()},
    }


@dataclass(frozen=True, slots=True)
class WritingRank:
    """A rank that writes a Run.

    Attributes:
        ranks: The ranks of its worker, which open the Run together.
        device: Device on which it computes.
        begins: Whether it is the first rank of all, which describes and claims the Run.
        say: Prints one line, such as a failure of this rank to write.
        first: Number of its worker's first rank among the ranks of all workers.
        towards: Address of the host where the ranks meet; see `shoal.record.exchange_clocks`.
    """

    ranks: Coordinator
    device: torch.device
    begins: bool
    say: Callable[[str], object]
    first: int = 0
    towards: str = ""

    @property
    def number(self) -> int:
        """Number of the rank among those of all workers."""
        return self.first + self.ranks.rank


@final
class RunWriter:
    """Write a Run. All ranks make one together, once the directory is there, and call its methods.

    Args:
        run: The Run.
        described: Its description, as far as it is known before the model is laid out.
        rank: This rank.
        config: What is recorded.
        goes_on: Whether the Run existed before, so that a checkpoint has to be loaded.
        recorder: Recorder of spans, if they do not go into the Run.

    Attributes:
        run: The Run.
        recorder: Recorder of spans.
        marks: Marks that are made with each span.

    Raises:
        RunError: On all ranks: another process writes the Run.
        ConfigError: NVTX ranges were asked for where there is no GPU.
    """

    def __init__(
        self,
        run: Run,
        described: Mapping[str, Any],
        rank: WritingRank,
        config: RecordConfig,
        *,
        goes_on: bool,
        recorder: Recorder | None = None,
    ) -> None:
        self.run = run
        self.marks = Marks()
        self._described = dict(described)
        self._rank = rank
        self._config = config
        self._goes_on = goes_on
        self._opened = time.time()
        self._exchange: WorkerExchange | None = None  # until the model is laid out
        self._time: TimeAccount | None = None
        self._compiled: Callable[[int], float] = lambda step: 0.0
        self._claim = claim_together(rank.ranks, run, rank.say, acts=rank.begins)
        self._owns_recorder = recorder is None
        self.recorder: Recorder = self._open_recorder() if recorder is None else recorder
        self._clocks = self._compare_clocks() if config.timeline and recorder is None else ClockExchange()
        memory = run.memory_file(rank.number) if config.memory else None
        self._memory = MemoryRecord(memory, rank.number, self.say)
        self._destinations = self._loggers = Loggers([])

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes what all share, and speaks for all."""
        if self._exchange is None or self._exchange.worker < 0:
            return self._rank.begins
        return self._rank.ranks.rank == 0 and self._exchange.leads

    def say(self, text: str) -> None:
        """Print a line on the rank that leads."""
        if self.leads:
            self._rank.say(text)

    def begin(
        self, launched: float, processes: int, compiled: Callable[[int], float] = lambda step: 0.0
    ) -> TimeAccount:
        """Begin, and return, the account of time; without this call it begins with the first step.

        Args:
            launched: When the command that started the ranks began, in seconds since the epoch.
            processes: Number of processes.
            compiled: Returns the seconds that compiling took of a step that has ended.
        """
        self._compiled = compiled
        self._time = TimeAccount(self.run, launched, processes, self._rank.begins, self._tell_account)
        return self._time

    def laid_out(self, plan: Plan, exchange: WorkerExchange) -> None:
        """Note the final Plan and the exchange, and open what takes the values of steps."""
        self._exchange = exchange
        self._described |= {"plan": str(plan), "device": describe_device(self._rank.device, plan)}
        if self.leads and not self._goes_on:
            self.run.describe(self._described)
        if self._rank.ranks.rank == 0:
            say = self._rank.say
            self._destinations = Loggers(self._config.destinations().open(self.run, say), say=say)
            metrics = MetricsWriter(self.run.metrics_file, say=say)
            self._loggers = Loggers([metrics, self._destinations], say=say)

    def loaded(self, step: int) -> None:
        """Note that the Run goes on after step number `step`, and describe it as it is now."""
        if self._goes_on and self.leads:
            before = self.run.description
            settings = ("plan", "world_size", "tokens_per_step", "device")
            is_same = all(before.get(name) == self._described[name] for name in settings)
            since = before.get("since_step") if is_same else step + 1
            self.run.describe({**self._described, "created": before["created"], "since_step": since})
        self._goes_on = False

    @contextmanager
    def step(self, made: Callable[[], int]) -> Iterator[None]:
        """Return a context for a step, whose time is noted; `made` returns the number of steps made.

        Raises:
            RunError: The directory held a Run, and no checkpoint was loaded.
        """
        if self._goes_on:
            raise RunError(
                f"{shown(self.run.path)} holds a run, and a new run would overwrite it",
                possible="a new directory, or the run's own Trainer with one of its checkpoints loaded",
                change="give another run=, or load one of its checkpoints before the first step",
            )
        account = self._time
        if account is None:
            account = self.begin(self._opened, self._rank.ranks.size)
            account.loaded(made())
        with account.part("steps"):
            yield
        account.stepped(made(), self._compiled(made()))

    def measured(
        self, parallel: Parallel, optimizer: torch.optim.Optimizer, step: int
    ) -> AbstractContextManager[None]:
        """Return a context for the computation of a step, from 1, whose memory may be measured."""
        return self._memory.step(parallel, optimizer, step)

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time goes to a part of the account, if that has begun."""
        return nullcontext() if self._time is None else self._time.part(name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write values of a step.

        Raises:
            RunError: Another process has begun to write the Run.
        """
        if self._claim is not None:
            self._claim.require()
        if self.leads:
            self._loggers.log(step, values)

    def decided(self, decision: Decision) -> None:
        """Write a decision about the exchange."""
        if self.leads:
            write_decision(self.run.decisions_file, decision)

    def failed(self, error: BaseException) -> None:
        """Note that an error ends the training."""
        if self._time is not None:
            self._time.failed(error)

    def close_timeline(self) -> None:
        """Write what is still buffered of the Timeline, so that others can read it."""
        self._clocks.close()
        if self._owns_recorder:
            self.recorder.close()

    def close(self, reason: str) -> None:
        """Write what is still buffered, and that these ranks end, and give the Run up."""
        self.close_timeline()
        if self._time is not None:
            self._time.close(reason)
        self._loggers.close()
        if self._claim is not None:
            self._claim.close()

    def _tell_account(self, account: Account) -> None:
        self._destinations.log(account.step, account.values())

    def _open_recorder(self) -> Recorder:
        config, rank = self._config, self._rank
        if config.nvtx:
            if rank.device.type != "cuda":
                raise ConfigError(
                    f"record.nvtx=true was given, and the ranks compute on {rank.device.type}",
                    possible="GPUs of NVIDIA",
                    change="leave out record.nvtx",
                )
            self.marks.new = torch.cuda.nvtx.range
        if not config.timeline:
            return NullRecorder()
        path = self.run.timeline_file(rank.number)
        return open_recorder(path, rank.number, rank.device, say=rank.say, marks=self.marks, first=rank.first)

    def _compare_clocks(self) -> ClockExchange:
        rank = self._rank
        return exchange_clocks(rank.ranks, self.run.timeline, rank.number, rank.say, towards=rank.towards)


def writer_of_trainer(
    path: Path,
    ranks: Coordinator,
    device: torch.device,
    model: nn.Module,
    settings: Mapping[str, Any],
    recorder: Recorder | None,
) -> RunWriter:
    """Return the writer of the Run of a Trainer of the library; all ranks call it together.

    Args:
        path: A directory that is absent or empty, or the directory of a Run of which a checkpoint will be
            loaded.
        ranks: All ranks.
        device: Device on which this rank computes.
        model: The model, before it is laid over ranks.
        settings: Further settings for the description.
        recorder: Recorder of spans, if they do not go into the Run.

    Raises:
        RunError: On all ranks: the directory holds something else, cannot be made, or another process writes
            it.
    """
    path = absolute(path)  # the model's code may change the working directory
    parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = model.config.flops_per_token(model.config.seq) if isinstance(model, Transformer) else None
    described = {**describe_run(path, ranks.size, type(model).__name__, parameters, flops), **settings}
    goes_on = _make_together(path, ranks, described)
    is_first = ranks.rank == 0
    say = print if is_first else lambda text: None
    rank = WritingRank(ranks, device, is_first, say)
    return RunWriter(Run(path), described, rank, RecordConfig(), goes_on=goes_on, recorder=recorder)


def _make_together(path: Path, ranks: Coordinator, described: Mapping[str, Any]) -> bool:
    """Return whether the Run existed before; if not, rank 0 makes it."""
    outcome: bool | ShoalError = False
    if ranks.rank == 0:
        try:
            if (path / "run.json").is_file():
                outcome = True
            else:
                Run.create(path, described)
        except ShoalError as error:
            outcome = error
    outcome = ranks.all_gather_object(outcome)[0]
    if isinstance(outcome, ShoalError):
        raise outcome
    return outcome
