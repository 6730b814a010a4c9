"""The run directory: the files of one training run.

run.json                what ran: configuration, Plan, model, versions, seed; there once the run is made
metrics.jsonl           one object a step
timeline/rank-*.jsonl   the Timeline of each rank
timeline/clock-*.jsonl  what one rank of each further host measured of its clock
memory/rank-*.json      the memory of each rank in one step
checkpoints/step-*/     saved states
checkpoints/.writer-*   the process that writes the run: see `shoal.spec.run.writer`
servers/server-*.jsonl  what each parameter server applied, with its staleness
decisions.jsonl         what exchange=auto, or the guard of stale gradients, decided, with reasons
doctor/HOST.json        what each host looked like when the run started
members.jsonl           ranks that were lost and came while others trained, with the time and the reason
events.jsonl            launches, failures, and what the time between them went into: see `account.py`
log/                    what each rank of a local run printed, and what loggers write
log/hang/               after a hang: the calls and stacks of each rank, and the verdict

Only the user who starts a run can enter its directory: samples of the data, names of hosts and weights are in
it. The files inside follow the umask, so that `chmod g+rx RUN` lets a group read the whole run.

The metrics file: one JSON object a line, at least one a step.

    {"step":12,"loss":2.5,"gradient_norm":1.2,"tokens":8192,"step_seconds":0.1,"tokens_per_second":81920.0}
    {"step":12,"validation_loss":2.6}

JSON has no numbers that are not finite; they are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from shoal.errors import RunError, ShoalError, nearest
from shoal.limits import DESCRIPTION, json_of, read_regular
from shoal.lines import bounded_lines


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision about the exchange between workers.

    Attributes:
        step: Steps made.
        exchange: The exchange that is followed from then on, as a Plan's settings.
        reason: Why, in a sentence.
        numbers: What it rests on, by name.
    """

    step: int
    exchange: str
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"after step {self.step}: {self.exchange}: {self.reason}"


def write_decision(path: Path, decision: Decision) -> None:
    """Add a decision to a run's file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(decision)) + "\n")


def read_decisions(path: Path) -> list[Decision]:
    """Return the decisions of a run, in order; empty without a file. A torn last line is left out."""
    found: list[Decision] = []
    if not path.exists():
        return found
    for line in bounded_lines(path):
        try:
            told = json_of(line)
            found.append(Decision(**{name: told[name] for name in Decision.__slots__}))
        except (ValueError, KeyError, TypeError):
            continue
    return found


@dataclass(frozen=True, slots=True)
class Applied:
    """One contribution that a server applied.

    Attributes:
        shard: The part of the values.
        update: Updates of that part, with this one.
        worker: Who sent it.
        staleness: Updates, or rounds, that the worker had not heard of when it computed it.
        seconds: When it was applied, in seconds since the epoch.
    """

    shard: int
    update: int
    worker: int
    staleness: int
    seconds: float


def read_updates(paths: Iterable[Path]) -> list[Applied]:
    """Return what servers applied to the first part of the values, in order; a torn last line is left out.

    All parts get the same contributions, so that one of them tells of all.
    """
    found: list[Applied] = []
    for path in paths:
        for line in bounded_lines(path):
            try:
                told = json_of(line)
                applied = Applied(**{name: told[name] for name in Applied.__slots__})
            except (ValueError, KeyError, TypeError):
                continue
            if applied.shard == 0:
                found.append(applied)
    return sorted(found, key=lambda each: each.seconds)


OUTSIDE = "outside blocks"
"""Name of the unit of all that is in no block: embedding, last norm, head."""


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """Bytes of a part of the model on a rank: a block, or all that is outside of blocks.

    Attributes:
        name: Name of the block in the model.
        weights: Bytes of the weights that compute, or of the shards that they are gathered from.
        gradients: Bytes of gradients at the rank's peak.
        optimizer: Bytes of the optimizer's state, and of its copy of the weights if it has one.
        activations: Bytes that the forward of a micro-batch leaves for backward, without gathered weights;
            the most of all micro-batches.
    """

    name: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Bytes of a rank in a step.

    Attributes:
        rank: The rank.
        step: The step, from 1.
        peak: The most bytes of tensors that lived at once.
        moment: Where the step was then.
        buffers: Bytes of the model's buffers.
        units: The parts of the model on the rank.
        resident: Most bytes of the process that the system had in memory so far; None if it does not say.
        reserved: Most bytes that the GPU's allocator held; None on a CPU.
    """

    rank: int
    step: int
    peak: int
    moment: str
    buffers: int
    units: tuple[UnitMemory, ...] = field(default=())
    resident: int | None = None
    reserved: int | None = None

    @property
    def parts(self) -> dict[str, int]:
        """The bytes at the peak by name; activations are all that is not one of the others."""
        parts = {
            name: sum(getattr(unit, name) for unit in self.units)
            for name in ("weights", "gradients", "optimizer")
        }
        parts["buffers"] = self.buffers
        return {**parts, "activations": max(0, self.peak - sum(parts.values()))}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return what `write_memory` wrote."""
        return cls(**{**values, "units": tuple(UnitMemory(**unit) for unit in values["units"])})


def write_memory(path: Path, measured: MeasuredMemory) -> None:
    """Write what was measured, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")


def read_memory(paths: Iterable[Path]) -> list[MeasuredMemory]:
    """Return what ranks wrote.

    Raises:
        RunError: A file is malformed.
    """
    found = []
    for path in paths:
        try:
            found.append(MeasuredMemory.of(json_of(read_regular(path, DESCRIPTION))))
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(
                f"{path} cannot be read: {error}",
                possible="the file as the run wrote it",
                change="remove it, and train on with --resume, which measures again",
            ) from error
    return found


NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def metrics_line(step: int, values: Mapping[str, float]) -> str:
    """Return the line with the values of a step, and a newline; scalars of any library become floats."""
    writable = {name: json_number(value) for name, value in values.items()}
    return json.dumps({"step": step, **writable}, allow_nan=False, separators=(",", ":")) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the values of each step, with its "step", by ascending step; empty if there is no file.

    Objects of one step are merged: later values replace earlier ones, since a resumed run repeats the steps
    after its checkpoint. Lines that a killed process left torn are skipped.

    Raises:
        ShoalError: A line is whole and is not the object of a step; the message names file and line.
    """
    if not path.exists():
        return []
    steps: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(bounded_lines(path), start=1):
        try:
            values = json_of(line)
        except ValueError:
            continue
        if not isinstance(values, dict) or not isinstance(values.get("step"), int):
            raise ShoalError(f'{path}:{number}: not an object with a "step"')
        step = steps.setdefault(values["step"], {})
        step.update((name, _readable(value)) for name, value in values.items())
    return [steps[step] for step in sorted(steps)]


def json_number(value: float) -> float | str:
    """Return a number as JSON can hold it: a string if it is not finite."""
    if isinstance(value, int):
        return value
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def _readable(value: Any) -> Any:
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


_DESCRIPTION = "run.json"
_NAMED_RUNS = 5
_OUTPUT = re.compile(r"rank-[0-9]+\.log")
_TYPES: Mapping[type, tuple[str, ...]] = {
    dict: ("config", "model", "device", "versions", "cluster"),
    str: ("plan", "name", "created"),
    int: ("world_size", "since_step"),
}
"""Types of what readers of run.json look into; each may be absent or null."""
_OWNER_ALONE = 0o700


@dataclass(frozen=True, repr=False)
class Run:
    """A run directory; `Run.create` makes one, `Run.open` finds one.

    Attributes:
        path: The directory.
    """

    path: Path

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @classmethod
    def create(cls, path: str | os.PathLike[str], description: Mapping[str, Any]) -> Self:
        """Make the directory and its contents; run.json comes last, whole or not at all.

        Args:
            path: A directory that is absent or empty, but for what a creation that was cut off left there.
                A new one gets the mode 0700; one that is there keeps its own.
            description: Description of the run, as `json` can write it.

        Raises:
            RunError: The path has contents already, or the directory cannot be made.
            TypeError: The description holds a value that JSON cannot hold.
        """
        run = cls(Path(path))
        text = json.dumps(description, indent=2, allow_nan=False) + "\n"
        if not is_free(run.path):
            raise RunError(
                f"{shown(run.path)} exists already, and a run is never overwritten",
                possible="a path that does not exist yet, or an empty directory",
                change="give another path, or resume the run that is there",
            )
        try:
            run.path.mkdir(mode=_OWNER_ALONE, parents=True, exist_ok=True)
            for directory in (run.timeline, run.checkpoints, run.log):
                directory.mkdir(exist_ok=True)
            _write_atomically(run.path / _DESCRIPTION, text, is_new=True)
        except FileExistsError as error:
            raise RunError(
                f"{shown(run.path)} was made by another process just now",
                possible="one process for a run",
                change="give another path, or resume the run that is there once it has ended",
            ) from error
        except OSError as error:
            raise RunError(
                f"the run {shown(run.path)} cannot be made: {error}",
                possible="a path in a directory that can be written to",
                change="give another path, or make that directory writable",
            ) from error
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a run that was made before.

        Raises:
            RunError: The path is absent, or is no run; the error names what is missing, and a run that may be
                meant.
        """
        run = cls(Path(path))
        beside = [other.name for other in _runs(run.path.parent)]
        if not run.path.exists():
            given = f"{run.path} does not exist{nearest(run.path.name, beside)}"
        elif not run.path.is_dir():
            given = f"{run.path} is a file, not the directory of a run"
        elif not (run.path / _DESCRIPTION).is_file():
            given = f"{run.path} is not a run: it has no {_DESCRIPTION}"
        else:
            return run
        newest = ", ".join(beside[-_NAMED_RUNS:])
        in_parent = f"the newest in {run.path.parent}: {newest}" if beside else f"{run.path.parent} has none"
        raise RunError(
            given,
            possible=f"a directory with a {_DESCRIPTION}, as `shoal train` makes it; {in_parent}",
            change="give the path of a run",
        )

    @classmethod
    def newest(cls, parent: str | os.PathLike[str]) -> Self | None:
        """Return the newest run in a directory; None if there is none."""
        runs = _runs(Path(parent))
        return cls(runs[-1]) if runs else None

    @cached_property
    def description(self) -> dict[str, Any]:
        """Return the description, as given to `create`.

        Raises:
            ShoalError: run.json is malformed.
        """
        path = self.path / _DESCRIPTION
        try:
            description = json_of(read_regular(path, DESCRIPTION))
        except ValueError as error:
            raise ShoalError(f"{path} cannot be read: {error}") from error
        if not isinstance(description, dict):
            raise ShoalError(f"{path} holds no JSON object")
        for kind, names in _TYPES.items():
            for name in names:
                if not isinstance(description.get(name), kind | None):
                    raise ShoalError(
                        f"{path}: {name} is {type(description[name]).__name__}, not {kind.__name__}"
                    )
        return description

    def describe(self, description: Mapping[str, Any]) -> None:
        """Replace the description, for example when a run is resumed."""
        _write_atomically(self.path / _DESCRIPTION, json.dumps(description, indent=2, allow_nan=False) + "\n")
        self.__dict__.pop("description", None)

    @property
    def metrics_file(self) -> Path:
        """Return the file of the metrics; absent until the first step."""
        return self.path / "metrics.jsonl"

    @property
    def timeline(self) -> Path:
        """Return the directory of the timeline files."""
        return self.path / "timeline"

    @property
    def checkpoints(self) -> Path:
        """Return the directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        """Return the directory that loggers write to."""
        return self.path / "log"

    def timeline_file(self, rank: int) -> Path:
        """Return the timeline file of a rank."""
        return self.timeline / f"rank-{rank:05d}.jsonl"

    def memory_file(self, rank: int) -> Path:
        """Return the file of a rank's memory in one step."""
        return self.path / "memory" / f"rank-{rank:05d}.json"

    def memory(self) -> list[MeasuredMemory]:
        """Return the memory of each rank in one step; empty if the run did not measure it."""
        return read_memory(sorted((self.path / "memory").glob("rank-*.json")))

    def server_file(self, server: int) -> Path:
        """Return the file of what a parameter server applied."""
        return self.path / "servers" / f"server-{server}.jsonl"

    def updates(self) -> list[Applied]:
        """Return what parameter servers applied; empty for a run without them."""
        return read_updates(sorted((self.path / "servers").glob("server-*.jsonl")))

    @property
    def decisions_file(self) -> Path:
        """Return the file of decisions about the exchange; absent until the first."""
        return self.path / "decisions.jsonl"

    def decisions(self) -> list[Decision]:
        """Return the decisions about the exchange; empty for a run that decided nothing."""
        return read_decisions(self.decisions_file)

    @property
    def members_file(self) -> Path:
        """Return the file of ranks that were lost and came; absent if none was lost."""
        return self.path / "members.jsonl"

    @property
    def events_file(self) -> Path:
        """Return the file of launches and failures, and of what the time between them went into."""
        return self.path / "events.jsonl"

    def metrics(self) -> list[dict[str, Any]]:
        """Return the values of each step, by ascending step; see `read_metrics`."""
        return read_metrics(self.metrics_file)


def default_path(parent: str | os.PathLike[str], name: str) -> Path:
    """Return an unused path for a new run, named after the run and the local time.

    >>> default_path("runs", "tiny")  # doctest: +SKIP
    PosixPath('runs/tiny-20250131-090507')
    """
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for candidate in candidates if not (path := Path(parent) / candidate).exists())


def is_free(path: Path) -> bool:
    """Return whether a new run may be made at a path: nothing is there, or a creation that was cut off.

    A signal, a full disk or a loss of power may end it before run.json is there, and the same command shall
    work again.
    """
    if not path.exists():
        return True
    try:
        return path.is_dir() and all(map(_is_left, path.iterdir()))
    except OSError:
        return False


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None


_given_in = _working_directory()


def absolute(path: Path) -> Path:
    """Return an absolute path, valid after a model's code changes the working directory; see `shown`."""
    global _given_in
    if not path.is_absolute():
        _given_in = _working_directory()
    return path.absolute()


def shown(path: Path) -> str:
    """Return a path as messages give it: relative to the folder in which relative paths were given.

    That is the folder of the last call of `absolute`, before one the folder in which the process started.
    """
    if _given_in is not None and path.is_relative_to(_given_in):
        return str(path.relative_to(_given_in))
    return str(path)


def _is_left(path: Path) -> bool:
    """Return whether a part of a directory is what a creation makes before run.json, and as it made it."""
    if path.name.startswith(f"{_DESCRIPTION}.") and path.suffix == ".tmp":
        return path.is_file()
    run = Run(path.parent)
    if path not in (run.timeline, run.checkpoints, run.log) or not path.is_dir():
        return False
    # The output of ranks is kept there from the moment at which log/ is made.
    return all(path == run.log and _OUTPUT.fullmatch(each.name) for each in path.iterdir())


def _runs(parent: Path) -> list[Path]:
    """Return the directories in `parent` that are runs, the newest last."""
    descriptions = sorted(parent.glob(f"*/{_DESCRIPTION}"), key=lambda path: (path.stat().st_mtime_ns, path))
    return [description.parent for description in descriptions]


def _write_atomically(path: Path, text: str, *, is_new: bool = False) -> None:
    """Write a file so that it exists whole or not at all, also after a loss of power.

    Raises:
        FileExistsError: It is to be new, and is there.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if not (is_new and _link(temporary, path)):
            temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _link(source: Path, target: Path) -> bool:
    """Give a file its name, which only one process can; return False if this file system has no links.

    Raises:
        FileExistsError: The name is taken.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if target.exists():
            raise FileExistsError(target) from None
        return False
    return True


def resume_command(path: Path) -> str:
    """Return the command that goes on with a run, as a shell reads it."""
    return f"shoal train --resume {shlex.quote(shown(path))}"
