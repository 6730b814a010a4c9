"""Seconds from the loss of a rank to the next good step: Shoal beside torchelastic and torchft.

    python benchmarks/recovery.py [--models tiny,12m] [--rounds 5] [--cost-rounds 8] [--large] [--write FILE]

Two ranks train on this machine. In each round each contestant has its turn, every other round in the reverse
order: it starts, makes some steps, and then one of its two ranks, drawn with the moment from a generator with
a seed, gets SIGKILL. All contestants of a round lose the same rank at the same share of the time between two
saves. Then

- the next step is the first one that begins after the kill and is finished, on the ranks that are left;
- the next new step is the first of these that no rank had finished before: steps since the state from which a
  contestant goes on are made again;
- both train again when the first step is finished that both ranks began after the kill.

A state is good if the losses that follow are those of an unbroken run, to a thousandth: of Shoal, where fewer
ranks train on the same batch, and of torchelastic. torchft's next steps train on fewer samples by design, so
there both ranks must hold the same weights, to the bit, in all steps that they make together again.

The steady cost is the time of a step with what allows recovery over the time without, in the same order of
turns: all trainings are there, and those whose turn it is not are stopped.

`--raw FILE` keeps each recovery in a file, and a second call goes on where the first one ended.
With `--large` Shoal alone trains 0.97 billion parameters: preset 1b over bytes, 16 tokens a rank and step,
zero3, SGD without momentum. 20 GiB must be free.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from recovery_contestants import CONTESTANTS, LARGE, Contestant, Made, Task, Training, phases_of
from recovery_cost import cost_table, spread

from shoal.machine.bench import describe
from shoal.units import format_bytes

COMPARED = 20  # steps after the recovery whose losses count
TOLERANCE = 1e-3  # of a loss; fewer ranks add in another order
UNBROKEN = 12.0  # seconds of the run without a failure, after the first steps
PHASES = "noted", "formed", "loaded"
NEEDED = 20 << 30  # bytes of memory for the large model


@dataclass(frozen=True, slots=True)
class Recovery:
    """What followed the loss of a rank.

    Attributes:
        next: Seconds until the next step was finished.
        new: Seconds until the next new step was finished.
        whole: Seconds until both ranks had finished a step.
        again: Steps that were made again.
        is_good: Whether the state was good.
        first: The first step that was made after the loss.
        phases: When parts of the recovery ended, where that is known.
        load: The load average of the last minute, after it.
    """

    next: float
    new: float
    whole: float
    again: int
    is_good: bool
    first: int
    phases: dict[str, float]
    load: float


Found = dict[str, dict[int, Recovery]]
"""What followed each loss of a rank, by contestant and round."""


def recovery_of(
    made: list[Made], killed: float, unbroken: dict[int, float], phases: dict[str, float]
) -> Recovery | None:
    """Return what followed the loss of a rank; None if both do not train again yet.

    Args:
        made: All steps.
        killed: When the rank was lost, in seconds since the epoch.
        unbroken: The losses of an unbroken run by step; empty if steps with fewer ranks are others.
        phases: When parts of the recovery ended.
    """
    before = max(each.step for each in made if each.begin <= killed)
    after = sorted((each for each in made if each.begin > killed), key=lambda each: each.end)
    by_step: dict[int, list[Made]] = {}
    for each in after:
        by_step.setdefault(each.step, []).append(each)
    together = [pair for pair in by_step.values() if len({each.rank for each in pair}) == 2]
    together = [pair for pair in together if all(each.ranks in (0, 2) for each in pair)]
    new = [each.end for each in after if each.step > before]
    if len(together) < 3 or not new:
        return None
    first = after[0].step
    if unbroken:
        losses = {each.step: each.loss for each in after if each.rank == 0 or not each.ranks}
        common = [step for step in range(first, first + COMPARED) if step in losses and step in unbroken]
        is_good = bool(common) and all(
            math.isclose(losses[step], unbroken[step], rel_tol=TOLERANCE) for step in common
        )
    else:
        is_good = all(pair[0].mark == pair[1].mark for pair in together)
    return Recovery(
        next=after[0].end - killed,
        new=min(new) - killed,
        whole=min(max(each.end for each in pair) for pair in together) - killed,
        again=sum(step <= before for step in by_step),
        is_good=is_good,
        first=first,
        phases=phases,
        load=os.getloadavg()[0],
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def unbroken_losses(contestant: Contestant, task: Task) -> tuple[dict[int, float], float]:
    """Return the losses of a run without a failure by step, and the seconds of a step."""
    with tempfile.TemporaryDirectory() as name, Training(contestant, task, Path(name)) as training:
        training.wait(lambda: contestant.progress(training.folder) >= task.warm, "it trains")
        time.sleep(UNBROKEN)
        made = [each for each in contestant.made(training.folder) if each.rank == 0]
        return {each.step: each.loss for each in made}, median(each.end - each.begin for each in made)


def trial(contestant: Contestant, task: Task, lost: int, wait: float, unbroken: dict[int, float]) -> Recovery:
    """Train, let a rank be lost, and return what followed."""
    with tempfile.TemporaryDirectory() as name, Training(contestant, task, Path(name)) as training:
        warm = max(task.warm, task.every)
        training.wait(lambda: contestant.progress(training.folder) >= warm, "it trains")
        time.sleep(wait)
        victim = training.ranks()[lost]
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        found: Recovery | None = None
        while found is None:
            training.wait(
                lambda: contestant.is_whole(training.folder, killed), "both train again after a loss"
            )
            time.sleep(1.0)
            phases = phases_of(training.folder, killed)
            found = recovery_of(contestant.made(training.folder), killed, unbroken, phases)
        return found


def recoveries(task: Task, contestants: list[Contestant], rounds: int, seed: int, raw: Path) -> Found:
    """Return what followed each loss of a rank, by contestant.

    Args:
        task: What is trained.
        contestants: Who trains it.
        rounds: Losses of a rank of each.
        seed: Of what is drawn.
        raw: File to which each recovery is appended; those that it has are not measured again.
    """
    drawn = random.Random(seed)
    unbroken: dict[str, tuple[dict[int, float], float]] = {}
    found: Found = {each.name: {} for each in contestants}
    for line in raw.read_text().splitlines() if raw.exists() else []:
        each = json.loads(line)
        if each["model"] == task.model and each["contestant"] in found:
            found[each["contestant"]][each["round"]] = Recovery(**each["recovery"])
    for number in range(rounds):
        lost, share = drawn.randrange(2), drawn.random()
        for contestant in contestants[:: -1 if number % 2 else 1]:
            name = contestant.name
            if number in found[name]:
                continue
            say(f"{task.model}: round {number + 1} of {rounds}: {name}")
            if name not in unbroken:
                unbroken[name] = unbroken_losses(contestant, task)
            losses, step = unbroken[name]
            losses = {} if contestant.package else losses
            made = trial(contestant, task, lost, share * task.every * step, losses)
            found[name][number] = made
            told = {"model": task.model, "contestant": name, "round": number}
            with raw.open("a") as file:
                file.write(json.dumps({**told, "recovery": asdict(made)}) + "\n")
    return found


def recovery_table(found: Found) -> list[str]:
    """Return the rows of the table of recoveries."""
    rows = [
        "| | next step, s | next new step, s | both train, s | steps made again | good states |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, by_round in found.items():
        each = [*by_round.values()]
        times = [spread([getattr(one, what) for one in each]) for what in ("next", "new", "whole")]
        again = [one.again for one in each]
        good = f"{sum(one.is_good for one in each)} of {len(each)}"
        steps = f"{median(again):g} ({min(again)} to {max(again)})"
        rows.append(f"| {name} | {' | '.join(times)} | {steps} | {good} |")
    loads = [one.load for each in found.values() for one in each.values()]
    return [*rows, "", f"Load average: {min(loads):.1f} to {max(loads):.1f}."]


def large_table(rounds: int, seed: int, raw: Path) -> list[str]:
    """Return the rows of the table of Shoal's recoveries with a large model."""
    if (free := available_memory()) < NEEDED:
        return [f"Left out: {format_bytes(free)} of memory are free, and {format_bytes(NEEDED)} are needed."]
    task = Task("1b", 0, warm=3, sequence=16)
    found = recoveries(task, [LARGE], rounds, seed, raw)[LARGE.name]
    rows = [
        "| noted, s | group formed, s | state loaded, s | next step, s | both train, s | made again | good |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for each in found.values():
        times = [
            f"{seconds:.2f}" for seconds in (*(each.phases[name] for name in PHASES), each.next, each.whole)
        ]
        rows.append(f"| {' | '.join([*times, str(each.again), 'yes' if each.is_good else 'no'])} |")
    return rows


def available_memory() -> int:
    """Return the bytes of memory that processes may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def why_absent(contestant: Contestant) -> str:
    """Return why a contestant cannot be measured; empty if it can."""
    if contestant.package and importlib.util.find_spec(contestant.package) is None:
        return f"{contestant.package} is not installed"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="tiny,12m", help="presets, default tiny,12m")
    parser.add_argument(
        "--rounds", type=int, default=5, help="losses of a rank of each contestant; default 5"
    )
    parser.add_argument("--every", type=int, default=50, help="steps between two saves on disk; default 50")
    parser.add_argument("--cost-rounds", type=int, default=8, help="rounds of the steady cost; default 8")
    parser.add_argument("--cost-seconds", type=float, default=4.0, help="of one of its turns; default 4")
    parser.add_argument("--large", type=int, default=0, help="losses of a rank of a large model; default 0")
    parser.add_argument("--seed", type=int, default=1, help="default 1")
    parser.add_argument("--only", default="", help="contestants whose names have one of these, with commas")
    parser.add_argument("--raw", type=Path, help="file of recoveries, to go on with later")
    parser.add_argument("--write", type=Path, help="file for the page too")
    options = parser.parse_args()
    lines = [f"`python benchmarks/recovery.py {' '.join(sys.argv[1:])}`", ""]
    lines += [*(f"    {line}" for line in str(describe()).splitlines()), ""]
    chosen = [each for each in CONTESTANTS if any(part in each.name for part in options.only.split(","))]
    for absent in (each for each in chosen if why_absent(each)):
        lines += [f"Left out: {absent.name} ({why_absent(absent)}).", ""]
    names = [each.name for each in chosen if not why_absent(each)]
    chosen = [each for each in chosen if each.name in names]
    raw = options.raw or Path(tempfile.mkdtemp()) / "recoveries.jsonl"
    for model in filter(None, options.models.split(",")):
        if options.rounds:
            found = recoveries(Task(model, options.every), chosen, options.rounds, options.seed, raw)
            lines += [f"## {model}: a rank is lost", "", *recovery_table(found), ""]
        if options.cost_rounds:
            table = cost_table(model, options.cost_rounds, options.cost_seconds, names, say)
            lines += [f"## {model}: steady cost", "", *table, ""]
    if options.large:
        lines += ["## 1b: a rank is lost", "", *large_table(options.large, options.seed, raw), ""]
    lines += [f"Load average at the end: {os.getloadavg()[0]:.1f}."]
    print("\n".join(lines))
    if options.write:
        options.write.write_text("\n".join(["# Recovery", "", *lines, ""]), "utf-8")


if __name__ == "__main__":
    main()
