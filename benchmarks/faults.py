"""What becomes of a training when something fails: kinds of fault by phase of the training.

    python benchmarks/faults.py [--times 1] [--jobs 2] [--kinds kill,stop] [--phases forward,save]
        [--keep faults.jsonl] [--write benchmarks/faults.md]

Each trial is `shoal train --nproc 1:2` of a small model for 12 steps; with faults of the network it is
`--nodes 1:2`, each host in a network namespace, and with changed bits `--nproc 1:3`. Rank 1 suffers the fault
in its seventh step, in the phase that the trial names, after a random wait; "load" is the load of a run that
is taken up, and "start" the import of the user's code. A trial is good if no step has another loss than in an
unbroken run, to 1e-4, and if

- the run reaches its end ("recovers"), or
- it ends, tells the cause, leaves no process, and goes on with `--resume` ("named").

The cause must also be told if a rank is lost. Waits are drawn evenly between 0 and 20 ms. What is drawn
follows from the kind, the phase and the number of the trial alone. With `--keep` results add up: trials that
are in the file are not made again.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from faults_trial import KINDS, PHASES, Ground, Result, Trial

from shoal.machine.bench import describe
from shoal.testing.programs import Programs


def kept(path: Path | None) -> list[Result]:
    """Return the results in a file of results."""
    if path is None or not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def make(trials: Sequence[tuple[str, str, int]], jobs: int, keep: Path | None) -> list[Result]:
    """Make trials, some at a time, and return their results."""
    waiting: queue.SimpleQueue[tuple[str, str, int]] = queue.SimpleQueue()
    for trial in trials:
        waiting.put(trial)
    results: list[Result] = []
    lock = threading.Lock()

    def work(ground: Ground) -> None:
        with Programs() as programs:
            while True:
                try:
                    kind, phase, number = waiting.get_nowait()
                except queue.Empty:
                    return
                with Trial(ground, programs, kind, phase, number) as trial:
                    trial.make()
                with lock:
                    results.append(trial.result)
                    tell(trial.result, len(results), len(trials))
                    if keep is not None:
                        with keep.open("a") as file:
                            file.write(json.dumps(asdict(trial.result)) + "\n")
                        if trial.told:
                            keep.with_name(f"{keep.stem}-{kind}-{phase}-{number}.txt").write_text(trial.told)

    with tempfile.TemporaryDirectory() as folder:
        ground = Ground(Path(folder))
        threads = [threading.Thread(target=work, args=(ground,)) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def tell(result: Result, made: int, of: int) -> None:
    """Tell of a trial if it is bad."""
    if result.verdict == "BAD":
        print(
            f"{made}/{of} {result.kind}, {result.phase}, {result.number}: {result.why}",
            file=sys.stderr,
            flush=True,
        )


def row(kind: str, phase: str, results: Sequence[Result]) -> str:
    """Return a row of the table."""

    def seconds(values: Sequence[float | None]) -> str:
        there = [value for value in values if value is not None]
        return f"{median(there):.2f} ({max(there):.2f})" if there else ""

    verdicts = [result.verdict for result in results]
    outcome = ", ".join(
        f"{each} {verdicts.count(each)}" for each in ("recovers", "named", "BAD") if each in verdicts
    )
    lost = max((result.lost for result in results if result.lost is not None), default="")
    noted, next_step = [each.noted for each in results], [each.next_step for each in results]
    return f"| {kind} | {phase} | {outcome} | {seconds(noted)} | {seconds(next_step)} | {lost} |"


def table(results: Sequence[Result]) -> list[str]:
    """Return the lines of the table."""
    cells: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        cells[result.kind, result.phase].append(result)
    lines = [
        "| fault | phase | outcome | noted after, s | next step after, s | steps made again |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind in KINDS:
        lines += [row(kind, phase, cells[kind, phase]) for phase in PHASES if (kind, phase) in cells]
    loads = [result.load for result in results]
    bad = sum(result.verdict == "BAD" for result in results)
    lines += [
        "",
        f"{len(results)} trials in {len(cells)} cells, {bad} of them bad; at a load of {min(loads):.0f} to "
        f"{max(loads):.0f}, {median(loads):.0f} in the median.",
    ]
    return lines


def page(results: Sequence[Result]) -> str:
    """Return the page of results."""
    lines = [
        "# Faults by phase",
        "",
        "`python benchmarks/faults.py --times 20 --keep faults.jsonl --write benchmarks/faults.md`, by parts",
        "",
        "What becomes of a training of two or three ranks in which one suffers a fault; see `faults.py`.",
        "",
        "- recovers: the command reached its end, with the losses of an unbroken run",
        "- named: the command ended with the cause, and went on with `--resume` to the same losses",
        "- noted: seconds from the fault until a rank was noted as lost, or the command ended",
        "- next step: seconds from the fault until the first step after it ended, if the command went on",
        "- seconds are medians, with the largest in brackets; of steps made again there is the largest",
        "",
        *(f"- {kind}: {text}" for kind, text in KINDS.items()),
        "",
        *table(results),
        "",
        *(f"    {line}" for line in str(describe()).splitlines()),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=1, help="trials of each kind in each phase (default 1)")
    parser.add_argument("--jobs", type=int, default=2, help="trials that run at once (default 2)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds, with commas between")
    parser.add_argument("--phases", default=",".join(PHASES), help="phases, with commas between")
    parser.add_argument("--keep", type=Path, help="file of results, to which those of this run are added")
    parser.add_argument("--write", type=Path, help="file for the page of all results")
    options = parser.parse_args()
    kinds, phases = options.kinds.split(","), options.phases.split(",")
    if unknown := [each for each in kinds if each not in KINDS] + [
        each for each in phases if each not in PHASES
    ]:
        parser.error(f"{unknown[0]} is unknown; kinds: {', '.join(KINDS)}; phases: {', '.join(PHASES)}")
    before = kept(options.keep)
    made = {(each.kind, each.phase, each.number) for each in before}
    trials = [
        (kind, phase, number)
        for number in range(options.times)
        for kind in kinds
        for phase in phases
        if (kind, phase, number) not in made
    ]
    results = before + (make(trials, options.jobs, options.keep) if trials else [])
    print("\n".join(table(results)))
    if options.write is not None:
        options.write.write_text(page(results))
    return int(any(result.verdict == "BAD" for result in results))


if __name__ == "__main__":
    sys.exit(main())
