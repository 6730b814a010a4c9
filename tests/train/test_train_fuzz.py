"""Random trainings under Plans against one process: models, exchanges, data, saves and loads.

    SHOAL_FUZZ_CASES=17:18 pytest -m long tests/train/test_train_fuzz.py      one case
    SHOAL_FUZZ_CASES=0:1000 SHOAL_FUZZ_SEED=5 pytest -m long tests/train/test_train_fuzz.py      others

Each case adds a line to the file that SHOAL_FUZZ_RESULTS names.
"""

import functools
import json
import math
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fuzz_cases import all_pairs, draw_cases, pairs_of
from fuzz_reference import train
from fuzz_stand_ins import Pools, run_case

from shoal.errors import UserError, WorkerError
from shoal.spec.plan import Plan

BY_ROUNDING = 32  # an error may be so many times what fp32 makes in one process
ULP = 2.0**-23
QUICK = (6, 29, 39, 23, 1, 8, 0, 47, 19, 12, 7)
"""Cases for every run of the tests, the quickest that catch the faults in tests/faults/exchanges.toml."""

NAMED = ("PlanError", "ModelError", "LayoutError", "ConfigError")


def difference_of(pools, case, folder):
    """How a training differs from the same in one process; "" for not at all.

    Raises:
        WorkerError: A rank raised.
    """
    phases = run_case(pools, case, folder)
    for number, told in enumerate(phases):
        if found := unlike_copies(told):
            return f"phase {number}: {found}"
    last = phases[-1]
    if case.other and case.other == case.plan and not Plan.parse(case.plan).exchanged.is_served:
        for name, value in phases[0][0].weights.items():
            if not torch.equal(value, last[0].weights[name]):
                return f"resumed, {name} has other bits than without an interruption"
    fragments = [told[0].fragments for told in phases]
    single, double = (train(case, fragments, dtype) for dtype in (torch.float32, torch.float64))
    return wrong_weights(case, last[0].weights, single, double) or wrong_reports(case, last, single, double)


def unlike_copies(told):
    """The first part that ranks hold with unlike bits; after the last step all workers are equal."""
    known = {}
    for rank, each in enumerate(told):
        for part, digest in each.parts.items():
            other, before = known.setdefault(part, (rank, digest))
            if before != digest:
                return f"ranks {other} and {rank} hold other bits of {part}"
    return ""


def wrong_weights(case, found, single, double):
    """Compare the last values with those in fp64, by the rounding that fp32 makes in one process."""
    if case.is_compressed:
        return wrong_course(case, found, double)
    rounding = max(
        (single.weights[name] - value).abs().max().item() for name, value in double.weights.items()
    )
    worst = 0.0, ""
    for name, value in double.weights.items():
        bound = BY_ROUNDING * max(rounding, ULP * max(1.0, value.abs().max().item()))
        error = (found[name].double() - value).abs().max().item()
        if not error <= bound:
            worst = max(
                worst, (error / bound, f"{name} is off by {error:.2e}, where {bound:.2e} is rounding")
            )
    return worst[1]


def wrong_course(case, found, double):
    """Compare how far a compressed training is from the other with how far both went."""
    squares = torch.zeros(2, dtype=torch.float64)
    for name, value in double.weights.items():
        squares += torch.stack(
            [(found[name].double() - value).square().sum(), (value - double.first[name]).square().sum()]
        )
    apart, went = squares.sqrt().tolist()
    bound = case.loss_of_codec * went
    return "" if apart <= bound else f"weights are {apart:.2e} apart, where {bound:.2e} is compression"


def wrong_reports(case, told, single, double):
    """Compare the losses and norms that were reported by ranks that no servers join.

    Where training diverges, rounding moves them by more than sums in another order do.
    """
    plan = Plan.parse(case.other or case.plan)
    if plan.exchanged.is_served or case.is_compressed:
        return ""
    for each in told:
        worker = each.worker if plan.exchanged.merges else 0
        for kind in ("losses", "norms"):
            found = getattr(each, kind)
            rounded, exact = (getattr(run, kind)[worker][-len(found) :] for run in (single, double))
            for step, (one, near, other) in enumerate(zip(found, rounded, exact, strict=True)):
                if math.isnan(double.losses[worker][-len(found) :][step]):
                    continue
                if not abs(one - other) <= max(1e-4 * abs(other), 1e-6, BY_ROUNDING * abs(near - other)):
                    return f"worker {worker} reports {kind} {one:.6f} and not {other:.6f} in step {step}"
    return ""


def outcome_of(pools, case, folder):
    """The outcome of a case: "" for equal, "refused: ...", or what is wrong."""
    try:
        return difference_of(pools, case, folder)
    except UserError as error:  # by a Plan, before ranks are asked
        return f"refused: {error.given}"
    except WorkerError as error:
        found = re.findall(r"(?:shoal\.errors\.)?(\w+Error): (.*)", str(error))
        kind, text = found[-1] if found else ("", str(error))
        return f"refused: {text}" if kind in NAMED else f"raised {kind}: {text}"


def run_range(cases, folder):
    """Outcomes of cases, by their numbers."""
    results, outcomes = os.environ.get("SHOAL_FUZZ_RESULTS"), {}
    pools = Pools()
    try:
        for case in cases:
            began = time.monotonic()
            outcomes[case.number] = outcome = outcome_of(pools, case, folder / str(case.number))
            if results:
                line = {
                    "case": str(case),
                    "outcome": outcome,
                    "seconds": round(time.monotonic() - began, 2),
                    "repeat": f"SHOAL_FUZZ_CASES={case.number}:{case.number + 1}",
                }
                with Path(results).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    finally:
        pools.close()
    return outcomes


def wrong_of(cases, folder):
    """The cases that differ, with how, and the number of those that were refused."""
    outcomes = run_range(cases, folder)
    refused = sum(outcome.startswith("refused") for outcome in outcomes.values())
    wrong = [
        f"{case}\n    {outcomes[case.number]}"
        for case in cases
        if outcomes[case.number] and not outcomes[case.number].startswith("refused")
    ]
    return "\n".join(wrong), refused


drawn = functools.cache(draw_cases)


@pytest.fixture(scope="module")
def pools():
    made = Pools()
    yield made
    made.close()


@pytest.mark.parametrize("number", QUICK)
def test_some_random_trainings_are_those_of_one_process(pools, tmp_path, one_thread, number):
    case = drawn(max(QUICK) + 1)[number]
    assert not outcome_of(pools, case, tmp_path), case


def test_servers_clip_the_gradient_of_a_worker_with_several_whole_states(pools, tmp_path, one_thread):
    (drawn,) = draw_cases(1)
    settings = {**drawn.settings, "model": "tied", "data": "plain", "optimizer": "sgd", "clip": "on"}
    plan = "dp=2,cp=2,exchange=server,servers=2,microbatch=2"
    assert not outcome_of(pools, replace(drawn, settings=settings, plan=plan, other="", saved=0), tmp_path)


@pytest.mark.long
def test_random_trainings_are_those_of_one_process(tmp_path, one_thread):
    first, last = map(int, os.environ.get("SHOAL_FUZZ_CASES", "0:300").split(":"))
    cases = draw_cases(last, int(os.environ.get("SHOAL_FUZZ_SEED", "0")))
    if first == 0 and last >= 300:
        assert set().union(*(pairs_of(case.settings) for case in cases)) == all_pairs()
    wrong, refused = wrong_of(cases[first:], tmp_path)
    assert not wrong, wrong
    assert refused <= max(1, 0.3 * len(cases[first:]))
