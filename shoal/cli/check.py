"""Trains the same model on the same samples on one device and under a Plan, and compares loss, gradients,
gradient norm and parameters after each step. Samples are random tokens, unless the model's factory returns a
Task of shoal.models, which brings its own batches and loss. The bound of each deviation is measured: a
multiple of the difference on one device between sums in this order and in another order and higher precision.
Starts local ranks; under torchrun or srun, it runs as one of the ranks they started. Turns off torch's own
dropout, because its masks depend on the layout; dropout of Shoal's models stays on.

Exit codes: 0 all Plans pass; 1 a Plan computes something else, or did not end; 2 wrong input; 130 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from shoal.cli.local import nursery_for
from shoal.cli.table import as_json
from shoal.errors import ConfigError, WorkerError
from shoal.spec.plan import SYNCHRONOUS, Plan, SettledPlan
from shoal.spec.plan.enumerate import VARIED, legal_plans

if TYPE_CHECKING:
    from shoal.launch.local import Nursery, World
    from shoal.testing.check import AnyTrial, CheckJob, Deviation, StepReport, Verdict

_REFUSED, _STOPPED = 2, 130
_LEAST_BATCH = 8
_ZOO = "shoal.testing.zoo:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--plan", metavar="PLAN", help="a Plan, such as dp=2,shard=zero3")
    which.add_argument(
        "--all",
        action="store_true",
        help="check every legal Plan for --ranks ranks, with two micro-batches or more",
    )
    parser.add_argument(
        "--axes",
        metavar="N",
        type=int,
        help="with --all, check only Plans with N or more degrees above 1, ep included",
    )
    parser.add_argument(
        "--sample",
        metavar="N",
        type=int,
        help="with --all, check only N Plans, chosen to cover as many pairs of settings as possible",
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, help="number of ranks (default: 2 with --all, else the Plan's)"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        default="tiny",
        help="a model, named as for shoal train, or hf:KIND for a small model of a kind of transformers, or "
        "zoo:NAME, or a factory of a Task (default tiny)",
    )
    parser.add_argument(
        "--masked",
        action="store_true",
        help="with hf:KIND, take the kind's model that predicts masked tokens, where there are two",
    )
    parser.add_argument(
        "--boundaries",
        action="store_true",
        help="pack several documents into each sample, and require that each is trained as if it were alone",
    )
    parser.add_argument(
        "--option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one of the model's options, such as layers=2; may be given several times",
    )
    parser.add_argument("--steps", metavar="N", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument(
        "--batch",
        metavar="N",
        type=int,
        help="sequences in a step (default: 8 or more, for two micro-batches on each rank and stage)",
    )
    parser.add_argument("--sequence", metavar="N", type=int, help="tokens in a sequence (default 32)")
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="seed of weights and tokens (default 0)"
    )
    parser.add_argument(
        "--precision", default="fp32", help="precision of the Plans of --all: fp32 or bf16 (default fp32)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to train on (default auto)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Compare, as one of the ranks that a launcher started or on local ranks that this starts.

    Raises:
        UserError: Something given cannot work; nothing was started.
    """
    # Imported here because they bring torch, which `--help` should not wait for.
    from shoal.launch.local import find_world

    sys.path.insert(0, os.getcwd())  # for a model of the user's own, `file:function`
    world = find_world()
    if world is not None:
        return _compare(args, world, None)
    with nursery_for(args, "shoal.testing.check") as nursery:
        return _compare(args, None, nursery)


def _compare(args: argparse.Namespace, world: World | None, nursery: Nursery | None) -> int:
    from shoal.launch.local import run_rank
    from shoal.testing.check import compare_here, compare_locally

    job = _job(args, None if world is None else world.ranks)
    live = tell if args.all and not args.json else _be_silent
    if world is not None:
        there = world

        def work(_: object) -> int:
            verdicts = compare_here(job, there, live)
            return _conclude(args, job.trial, verdicts) if there.rank == 0 else 0

        return run_rank(world.rank, work)
    try:
        verdicts = compare_locally(job, live, nursery)
    except WorkerError as error:
        if error.exit_code == _STOPPED:  # there was nothing to save
            return _STOPPED
        raise
    return _conclude(args, job.trial, verdicts)


def tell(verdict: Verdict) -> None:
    """Print one line for a Plan, and more lines for a departure."""
    print(f"{verdict.outcome:<8}{_share_of_bound(verdict):>8}  {verdict.plan}", flush=True)
    if verdict.departure is not None or verdict.reason:
        print(_indented(verdict.departure.text if verdict.departure else verdict.reason), flush=True)


def _be_silent(verdict: Verdict) -> None:
    """Print nothing; the results are printed at the end."""


def _job(args: argparse.Namespace, there: int | None) -> CheckJob:
    """Return the job that the arguments ask for, after a check that it is possible."""
    from shoal.launch.local import choose_device
    from shoal.testing.check import CheckJob, covering, require_precision, trial_of, with_axes
    from shoal.train import TrainConfig, load_config, resolve

    _require_all(args)
    options = load_config(None, [f"model_options.{option}" for option in args.option]).model_options
    ranks = args.ranks if args.ranks is not None else there
    plan = Plan(precision=args.precision) if args.all else Plan.parse(args.plan)
    require_precision(plan.precision)
    if args.all:
        ranks = 2 if ranks is None else ranks
        unit = max(1, ranks)
    else:
        shares = plan.shared
        unit = (plan.dp * plan.pp if shares is None else shares.total) * (plan.microbatch or 1)
    model = args.model.replace("zoo:", _ZOO, 1) if args.model.startswith("zoo:") else args.model
    trial = trial_of(
        model,
        options,
        sizes={"batch": args.batch, "sequence": args.sequence},
        default_batch=_default_batch(unit),
        steps=args.steps,
        seed=args.seed,
        masked=args.masked,
        boundaries=args.boundaries,
    )
    require = trial.require_possible()
    if args.all:
        assert ranks is not None
        SettledPlan.of(plan.replace(dp=unit), trial.batch)
        varied = {**VARIED, "precision": (plan.precision,)}
        plans = [_in_two(each, trial.batch) for each in legal_plans(ranks, varied=varied, require=require)]
        if not plans:  # none fits: the simplest Plan's error says why
            require(plan.replace(dp=ranks))
        if choose_device(args.device, 0).type == "cuda":  # there each Plan would be compiled, for a minute
            plans = [each.replace(compile="none") for each in plans]
        plans = plans if args.axes is None else with_axes(plans, args.axes)
        plans = plans if args.sample is None else covering(plans, args.sample)
    else:
        if ranks is not None:
            plan = resolve(TrainConfig(plan=args.plan, batch=trial.batch), ranks).plan
        plan = _synchronous(plan)
        require(plan)
        plans = [SettledPlan.of(plan, trial.batch)]
    if there is not None:
        plans[0].require_ranks(there)
    return CheckJob(trial=trial, plans=plans, device=args.device)


def _require_all(args: argparse.Namespace) -> None:
    for name in ("axes", "sample"):
        if getattr(args, name) is not None and not args.all:
            raise ConfigError(
                f"--{name} was given with --plan",
                possible="--{name} with --all, of whose Plans it selects some",
                change=f"leave out --{name}, or give --all in place of --plan",
            )


def _default_batch(unit: int) -> int:
    """Return a batch of at least two micro-batches per rank, so that the comparison includes accumulation.

    This is enough for every pipeline schedule.
    """
    return unit * max(2, -(-_LEAST_BATCH // unit))


def _synchronous(plan: Plan) -> Plan:
    """Return the Plan without what is meant to train otherwise than one device."""
    exchange = plan.exchanged
    if not (exchange.merges or exchange.compresses or exchange.is_chosen):
        return plan
    plan = plan.replace(**SYNCHRONOUS)
    print(
        f"note: compression and local updates train otherwise than one device does; checked is {plan}",
        file=sys.stderr,
    )
    return plan


def _in_two(plan: Plan, batch: int) -> Plan:
    """Return the Plan with two micro-batches per rank, or with one if its samples do not divide into two.

    A pipeline keeps as many as its stages need.
    """
    if plan.pp > 1:
        return SettledPlan.of(plan, batch)
    local = SettledPlan.of(plan, batch).microbatch
    assert local is not None
    return plan.replace(microbatch=local // 2 if local % 2 == 0 else local)


def _conclude(args: argparse.Namespace, trial: AnyTrial, verdicts: list[Verdict]) -> int:
    """Print the rest of the results, and return the exit code."""
    counts = {
        outcome: sum(verdict.outcome == outcome for verdict in verdicts)
        for outcome in ("passed", "failed", "broken", "refused")
    }
    if args.json:
        content = {"trial": asdict(trial), **counts, "plans": [asdict(verdict) for verdict in verdicts]}
        print(as_json(content))
    elif args.all:
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
        print(f"{len(verdicts)} Plans: {told}")
    else:
        verdict = verdicts[0]
        if verdict.outcome == "refused":
            print(f"shoal: {verdict.reason}", file=sys.stderr)
            return _REFUSED
        print(_table(trial, verdict))
    return 1 if counts["failed"] or counts["broken"] else 0


def _table(trial: AnyTrial, verdict: Verdict) -> str:
    lines = [
        f"{verdict.plan} against one device: {trial.model}, {trial.size}, seed {trial.seed}",
        "relative deviation / its bound from rounding",
        f"{'step':>4}  {'loss':>17}  {'gradient norm':>17}  {'gradient':>17}  {'parameter':>17}  "
        f"{'evaluation':>17}",
    ]
    for step in verdict.steps:
        cells = [_cell(each) for each in _deviations(step)]
        lines.append(f"{step.step:>4}  " + "  ".join(f"{cell:>17}" for cell in cells))
    if verdict.departure is not None:
        lines.append(f"failed: {verdict.departure.text}")
    elif verdict.reason:
        lines.append(f"{verdict.outcome}: {verdict.reason}")
    else:
        lines.append(
            "passed: rounding explains every deviation; "
            f"the largest is {_share_of_bound(verdict)} of its bound"
        )
    statistics = trial.statistics()
    if statistics:
        lines.append(
            "not compared: running statistics, which each rank takes over its own samples, in "
            + ", ".join(statistics)
        )
    return "\n".join(lines)


def _deviations(step: StepReport) -> tuple[Deviation, ...]:
    return step.loss, step.norm, step.gradients, step.parameters, step.evaluation


def _cell(deviation: Deviation) -> str:
    return f"{deviation.value:.1e} / {deviation.bound:.1e}"


def _share_of_bound(verdict: Verdict) -> str:
    """Return the largest deviation as a share of its bound."""
    shares = [each.value / each.bound for step in verdict.steps for each in _deviations(step)]
    return f"{max(shares):.2g}" if shares else "-"


def _indented(text: str) -> str:
    return "\n".join(f"    {line.strip()}" for line in text.splitlines())
