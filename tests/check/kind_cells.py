"""Compares a small model of every kind of Hugging Face's language models under Plans with one device.

Nouns: Kind (a `model_type`, and whether it predicts the next token or masked ones), cell (a Plan, or packed
documents on one device), line (the verdict of a kind in a cell, a JSON object). Lines are appended to a file
one by one: a call with the same file goes on after them. `python tests/check/kind_cells.py FILE [KIND ...]`.
"""

from __future__ import annotations

import json
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.errors import UserError, WorkerError
from shoal.models.tiny_hugging_face import kinds, small_configuration
from shoal.spec.plan import Plan, SettledPlan
from shoal.testing import RankPool
from shoal.testing.check import Comparison, Trial

CELLS = {
    "dp": "dp=2,microbatch=1",
    "zero3": "dp=2,shard=zero3,microbatch=1",
    "tp plain": "tp=2,tensor=plain",
    "tp sequence": "tp=2,tensor=sequence",
    "pp": "pp=2",
    "cp ring": "cp=2,context=ring",
    "cp ulysses": "cp=2,context=ulysses",
    "boundaries": "dp=1",
    "balance dp": "dp=2,microbatch=1",
    "balance tp": "tp=2",
    "balance cp": "cp=2",
    "balance pp": "pp=2",
}
ALONE = "dp=1,microbatch=2"
STEPS, BATCH, SEQUENCE, WIDE = 2, 4, 16, 64
LIMIT = 120.0  # seconds of a cell
LOOSE = 1e-3  # a bound of loss or norm as large says little


class Kind(NamedTuple):
    name: str
    masked: bool

    def __str__(self) -> str:
        return f"{self.name}{' (masked)' if self.masked else ''}"


def every_kind() -> list[Kind]:
    return [
        Kind(name, masked)
        for name, heads in kinds().items()
        for masked in ((False, True) if heads == "both" else (heads == "masked",))
    ]


def trial_of(kind: Kind, cell: str) -> Trial | None:
    """The training; None if there is none, since the kind has no routers to balance.

    Context parallelism has no windows, so for it they are as wide as the model's context.
    """
    options: dict[str, Any] = {}
    try:
        config = small_configuration(kind.name, {})
    except Exception:  # the error comes again, and is told, when the model is built
        config = None
    if cell.startswith("balance"):
        if not hasattr(config, "output_router_logits"):
            return None
        options["output_router_logits"] = True
    described = {} if config is None else config.to_dict()
    if "cp" in cell and described.get("sliding_window"):
        options["sliding_window"] = WIDE
    return Trial(
        model=f"hf:{kind.name}",
        model_options=options,
        steps=STEPS,
        batch=BATCH,
        sequence=SEQUENCE,
        masked=kind.masked,
        boundaries=cell == "boundaries",
    )


def verdict_of(kind: Kind, cell: str, text: str) -> dict[str, Any] | None:
    """The verdict, as one rank; the first has it. A refusal before the start is one of `shoal check`."""
    warnings.filterwarnings("ignore")
    plan = Plan.parse(text)
    trial = trial_of(kind, cell)
    if trial is None:
        return {"verdict": "none"}
    try:
        trial.require_possible()(plan)
    except UserError as error:
        return {"verdict": "refused", "words": str(error)}
    verdict = _comparison(trial).check(SettledPlan.of(plan, BATCH))
    if verdict is None:
        return None
    if verdict.outcome == "refused":
        return {"verdict": "refused", "words": verdict.reason}
    numbers = [each for step in verdict.steps for each in (step.loss, step.norm, step.evaluation)]
    loosest = max((each.bound for each in numbers), default=0.0)
    if verdict.outcome == "passed":
        return {"verdict": "equal", "bound": loosest}
    departure = verdict.departure
    words = departure.text if departure else verdict.reason
    return {"verdict": "wrong", "words": words, "bound": loosest}


_COMPARISONS: dict[str, Comparison] = {}


def _comparison(trial: Trial) -> Comparison:
    """The comparisons of the last trials, whose references are measured once."""
    key = repr(trial)
    if key not in _COMPARISONS:
        for old in list(_COMPARISONS)[:-2]:
            del _COMPARISONS[old]
        _COMPARISONS[key] = Comparison(trial, torch.device("cpu"))
    return _COMPARISONS[key]


def lines(pool: RankPool, chosen: Sequence[Kind], done: set[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    for kind in chosen:
        if all((str(kind), cell) in done for cell in CELLS):
            continue
        alone = _line(pool, kind, "alone", ALONE)
        is_run = alone["verdict"] in ("equal", "wrong")
        cannot = "" if is_run else f"{alone['verdict']}: {alone['words']}"
        if is_run and alone["bound"] > LOOSE:
            cannot = f"rounding alone moves its training by {alone['bound']:.1e}"
        for cell, plan in CELLS.items():
            if (str(kind), cell) in done:
                continue
            line = {"verdict": "cannot", "words": cannot} if cannot else _line(pool, kind, cell, plan)
            yield {"kind": str(kind), "cell": cell, **line}


def _line(pool: RankPool, kind: Kind, cell: str, plan: str) -> dict[str, Any]:
    began = time.monotonic()
    try:
        line = pool.run(verdict_of, Plan.parse(plan).ranks, kind, cell, plan, timeout=LIMIT)[0]
    except WorkerError as error:
        line = {"verdict": "crash", "words": str(error)}
    assert line is not None
    line["seconds"] = round(time.monotonic() - began, 1)
    return line


def run(file: Path, chosen: Sequence[Kind]) -> None:
    """Append the lines that the file does not have."""
    done = {(line["kind"], line["cell"]) for line in read(file)}
    with RankPool("shoal") as pool, file.open("a", encoding="utf-8") as out:
        for line in lines(pool, chosen, done):
            print(json.dumps(line), file=out, flush=True)
            print(
                line["kind"],
                line["cell"],
                line["verdict"],
                re.sub(r"\s+", " ", line.get("words", ""))[-150:],
                flush=True,
            )


def read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    names = set(sys.argv[2:])
    run(Path(sys.argv[1]), [kind for kind in every_kind() if not names or kind.name in names])
