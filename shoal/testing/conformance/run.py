"""Run Cases one after another on the same ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from shoal.errors import UserError, WorkerError
from shoal.models.task import Task
from shoal.testing.conformance.case import SHARDINGS, Case
from shoal.testing.conformance.outcome import Outcome, judge
from shoal.testing.conformance.reference import train_alone
from shoal.testing.conformance.training import Training
from shoal.testing.conformance.under_plan import train_under
from shoal.testing.ranks import RankPool

__all__ = ["outcomes"]

Ended = Training | Outcome
"""A rank's result of a Case: a training, or the reason for none."""

_SECONDS = 2.0  # seconds allowed per Case, and once more for the start; most take a tenth
_START_SECONDS = 30.0
_OTHERS = ("CollectiveError", "CommunicationError")
"""Errors that a rank raises because another one failed."""


def outcomes(
    pool: RankPool, cases: Sequence[Case], entries: Mapping[str, Callable[[], Task]]
) -> dict[Case, Outcome]:
    """Train all Cases, and return whether each agrees with one device.

    Args:
        pool: The ranks.
        cases: The Cases to train.
        entries: The zoo, by name.

    Raises:
        MissingExtraError: An entry needs a package that is not installed.
    """
    references = _References(entries)
    found: dict[Case, Outcome] = {}
    for ranks in sorted({SHARDINGS[case.sharding].ranks for case in cases}):
        chosen = [case for case in cases if SHARDINGS[case.sharding].ranks == ranks]
        for case, ended in _on_ranks(pool, ranks, chosen, entries):
            found[case] = _outcome(case, ended, references)
    return {case: found[case] for case in cases}


def _on_ranks(
    pool: RankPool, ranks: int, cases: Sequence[Case], entries: Mapping[str, Callable[[], Task]]
) -> Iterator[tuple[Case, list[Ended]]]:
    """Yield every rank's result of each Case. A failed Case ends its ranks; the others get new ones."""
    left = list(cases)
    while left:
        try:
            work = [(case, entries[case.entry]) for case in left]
            told = pool.run(_served, ranks, work, timeout=_START_SECONDS + _SECONDS * len(work))
        except WorkerError as error:
            if len(left) > 1:
                for case in left:
                    yield from _on_ranks(pool, ranks, [case], entries)
            else:
                yield left[0], [Outcome("failed", error.reason.strip().splitlines()[-1])]
            return
        done = min(map(len, told))
        for number in range(done):
            yield left[number], [each[number] for each in told]
        del left[:done]


def _served(cases: Sequence[tuple[Case, Callable[[], Task]]]) -> list[Ended]:
    """Return one rank's results, up to the first Case that fails: after it the ranks are out of step."""
    told: list[Ended] = []
    for case, entry in cases:
        try:
            told.append(train_under(entry(), case.plan))
        except UserError as error:
            told.append(Outcome("refused", f"{type(error).__name__}: {error.given}"))
        except Exception as error:
            said = next(iter(str(error).splitlines()), "")
            place = traceback.extract_tb(error.__traceback__)[-1]
            told.append(Outcome("failed", f"{type(error).__name__}: {said} ({place.name})"))
            break
    return told


def _outcome(case: Case, ended: Sequence[Ended], references: _References) -> Outcome:
    """Return the outcome of a Case from the results of all ranks."""
    reasons = [each for each in ended if isinstance(each, Outcome)]
    failed = [each for each in reasons if each.kind == "failed"]
    if failed:
        return next((each for each in failed if not each.text.startswith(_OTHERS)), failed[0])
    trainings = [each for each in ended if isinstance(each, Training)]
    if reasons:
        return reasons[0] if not trainings else Outcome("failed", f"some ranks alone: {reasons[0].text}")
    whole = replace(
        trainings[0],
        losses=[each.losses[0] for each in trainings],
        evaluated=[each.evaluated[0] for each in trainings],
    )
    ranks = len(ended)
    reference = references.training(case.entry, case.precision, ranks)
    exact = references.training(case.entry, case.precision, ranks, compute="fp32")
    return judge(whole, reference, exact, references.start(case.entry))


@final
class _References:
    """Trainings on one device, each made once."""

    def __init__(self, entries: Mapping[str, Callable[[], Task]]) -> None:
        self._entries = entries
        self._trainings: dict[tuple[Any, ...], Training] = {}

    def training(self, entry: str, precision: str, ranks: int, compute: str = "") -> Training:
        """See `train_alone`."""
        key = entry, precision, ranks, compute or precision
        if key not in self._trainings:
            task = self._entries[entry]()
            self._trainings[key] = train_alone(task, precision, ranks, compute=compute)
        return self._trainings[key]

    def start(self, entry: str) -> dict[str, Tensor]:
        """Return the state that training starts from."""
        torch.manual_seed(0)
        return self._entries[entry]().build().state_dict()
