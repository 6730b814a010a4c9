"""The model of `shoal schedule --model`: the costs of its pieces, and how they make stages."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, final

from shoal.errors import PlanError
from shoal.spec.plan import Plan
from shoal.spec.plan.schedules import FOUND, Schedule, Times, kind_of
from shoal.spec.plan.stages import Cost, ranges_of, split_by_cost, split_by_count, split_text, times_of
from shoal.units import parse_bytes

if TYPE_CHECKING:
    from shoal.testing.check import Trial


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options for the model and for its costs."""
    model = parser.add_argument_group("stages of a model, in place of equal ones")
    model.add_argument(
        "--model", metavar="NAME", help="a model, named as for shoal train; prints the Plan with its split"
    )
    model.add_argument(
        "--option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one of the model's options, such as layers=2; may be given several times",
    )
    model.add_argument(
        "--measure",
        action="store_true",
        help="measure the costs of its blocks on this device (default: compute them)",
    )
    model.add_argument(
        "--memory",
        metavar="SIZE",
        help="limit for the memory of a rank, such as 8GiB: weights, gradients, Adam's state, activations",
    )
    model.add_argument(
        "--microbatch",
        metavar="N",
        type=int,
        default=1,
        help="sequences in a micro-batch (default 1)",
    )
    model.add_argument(
        "--sequence", metavar="N", type=int, default=128, help="tokens in a sequence (default 128)"
    )
    model.add_argument(
        "--recompute",
        metavar="POLICY",
        default="none",
        help="recomputation for --measure and --memory: none, selective or full (default none)",
    )
    model.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device that trains, for its costs (default auto)",
    )


_Cut = Callable[[Plan, int], tuple[int, ...]]
"""Function that returns the number of pieces of each stage, under a Plan with so many micro-batches."""

_Weigh = Callable[[Plan, int], list[Cost]]
"""Function that returns the costs with the memory of pieces, under a Plan with so many micro-batches."""


@final
class ModelStages:
    """A model's pieces as stages of schedules.

    Args:
        costs: Cost of each piece, for output: the embedding, the blocks, the end.
        unit: Unit of the costs.
        computed: Costs that training computes, for which it finds schedules.
        transfer: Time from rank to rank, in that unit.
        activations: Function from the stages on a rank to the most activations of a found schedule.
        limit: Bytes that a rank may hold; None: any number.
        cut: See `_Cut`.
        weigh: See `_Weigh`.
    """

    def __init__(
        self,
        costs: Sequence[Cost],
        unit: str,
        *,
        computed: Sequence[Cost],
        transfer: float,
        activations: Callable[[int], int | None],
        limit: int | None,
        cut: _Cut,
        weigh: _Weigh,
    ) -> None:
        self.unit = unit
        self.limit = limit
        self._costs = costs
        self._computed = computed
        self._transfer = transfer
        self._activations = activations
        self._split = cache(cut)
        self._weigh = weigh

    def found(self, ranks: int, virtual: int, microbatches: int) -> Schedule:
        """Return the schedule that a Plan with `schedule=search` trains with.

        Args:
            ranks: Pipeline-parallel degree.
            virtual: Stages on a rank.
            microbatches: Micro-batches in a step.

        Raises:
            PlanError: See `split`.
        """
        plan = self._plan(FOUND, ranks, virtual)
        return plan.schedule_for(microbatches, times_of(self._computed, self._split(plan, microbatches)))

    def split(self, schedule: Schedule) -> tuple[int, ...]:
        """Return the number of pieces of each stage, by cost.

        Raises:
            PlanError: The model has fewer blocks than there are stages, or no split fits the memory.
        """
        return self._split(self._plan_of(schedule), schedule.microbatches)

    def split_by_count(self, schedule: Schedule) -> tuple[int, ...]:
        """Cut the model into stages with equal numbers of blocks."""
        return split_by_count(len(self._costs) - 2, schedule.stages)

    def times(self, schedule: Schedule) -> Times:
        """Return the times of the stages of the split by cost."""
        return self.times_of(self.split(schedule))

    def times_of(self, split: Sequence[int]) -> Times:
        """Return the times of the stages of a split."""
        return times_of(self._costs, split, self._transfer)

    def memory(self, schedule: Schedule) -> list[float]:
        """Return the bytes of each stage when its rank holds the most activations."""
        costs = self._weigh(self._plan_of(schedule), schedule.microbatches)
        return [
            sum(cost.memory + held * cost.activations for cost in costs[pieces.start : pieces.stop])
            for held, pieces in zip(schedule.held_by_stage, ranges_of(self.split(schedule)), strict=True)
        ]

    def plan(self, schedule: Schedule) -> Plan:
        """Return the Plan that runs the schedule with the split by cost."""
        return self._plan_of(schedule).replace(split=split_text(self.split(schedule)))

    def _plan_of(self, schedule: Schedule) -> Plan:
        return self._plan(schedule.name, schedule.ranks, schedule.virtual)

    def _plan(self, name: str, ranks: int, virtual: int) -> Plan:
        return Plan(
            pp=ranks,
            schedule=name,
            virtual=None if virtual == kind_of(name).least_virtual else virtual,
            activations=self._activations(virtual) if name == FOUND else None,
        )


def open_model(args: argparse.Namespace, activations: Callable[[int], int | None]) -> ModelStages:
    """Return the model that the arguments name, with its costs measured in seconds, or computed.

    Computed costs are those by which training splits the model on such devices, in the unit of `--times`: the
    mean forward of a rank is 1.

    Args:
        args: Arguments of the command.
        activations: Function from the stages on a rank to the most activations of a found schedule.

    Raises:
        UserError: There is no such model, or it cannot be cut into stages or measured.
    """
    # Imported here because they bring torch, which schedules without a model do without.
    from shoal.launch.local import choose_device
    from shoal.parallel import Batch
    from shoal.parallel.pipeline.pieces import (
        Room,
        computed_costs,
        costs_on_device,
        cut_pieces,
        device_name,
        settled_on_device,
        with_memory,
    )
    from shoal.parallel.pipeline.stage_layout import stages_of
    from shoal.testing.check import Trial
    from shoal.train import load_config

    sys.path.insert(0, os.getcwd())  # for a model of the user's own, `file:function`
    settings = {"microbatch": args.microbatch, "recompute": args.recompute}
    Plan(**settings)  # checks them
    limit = _bytes(args.memory)
    options = load_config(None, [f"model_options.{option}" for option in args.option]).model_options
    trial = Trial(
        model=args.model, model_options=options, steps=1, batch=args.microbatch, sequence=args.sequence
    )
    if args.measure or limit is not None:
        trial.require_possible()
    model = trial.build("cpu" if ":" in args.model else "meta")
    layout = stages_of(model)
    computed = computed_costs(model, layout)
    device = device_name(choose_device(args.device, 0))

    def batch_of(microbatches: int) -> Batch:
        return Batch(args.microbatch * microbatches, args.sequence)

    def weigh(plan: Plan, microbatches: int) -> list[Cost]:
        return with_memory(costs, model, layout, plan.replace(**settings), batch_of(microbatches))

    def cut_as_trained(plan: Plan, microbatches: int) -> tuple[int, ...]:
        batch = batch_of(microbatches)
        settled = settled_on_device(model, plan.replace(**settings), batch, device, limit)
        room = None if limit is None else Room(limit, batch, {})
        return tuple(map(len, cut_pieces(model, settled, layout, room).ranges))

    def cut_as_measured(plan: Plan, microbatches: int) -> tuple[int, ...]:
        weighed, held = costs, None
        if limit is not None:
            weighed, held = weigh(plan, microbatches), plan.schedule_for(microbatches).held_by_stage
        return split_by_cost(weighed, plan.stages, plan.placement, limit, microbatches, held)

    if args.measure:
        costs, unit = _measured(trial, args.device, args.recompute), "seconds"
    else:
        known = costs_on_device(model, Plan(pp=args.pp, **settings), batch_of(1), device) or computed
        mean = sum(cost.forward for cost in known) / max(args.pp, 1) or 1.0
        costs = [Cost(cost.forward / mean, cost.backward / mean) for cost in known]
        unit = "a rank's mean forward"
    return ModelStages(
        costs,
        unit,
        computed=computed,
        transfer=args.transfer,
        activations=activations,
        limit=limit,
        cut=cut_as_measured if args.measure else cut_as_trained,
        weigh=weigh,
    )


def _bytes(text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError:
        raise PlanError(
            f"--memory {text} cannot be read",
            possible="a size such as 512MiB or 8GiB",
            change="write --memory 8GiB, say",
        ) from None


def _measured(trial: Trial, device_asked: str, recompute: str) -> list[Cost]:
    import numpy as np

    from shoal.launch.local import choose_device
    from shoal.models import next_token_loss
    from shoal.parallel.compiled import compile_blocks
    from shoal.parallel.pipeline.pieces import measured_costs
    from shoal.parallel.pipeline.stage_layout import named_part, stages_of

    device = choose_device(device_asked, 0)
    model = trial.build_with_values(device)
    layout = stages_of(model)
    compile_blocks(list(named_part(model, layout.blocks).children()), recompute)
    inputs, targets = (
        each.to(device) for each in trial.samples(model).batch(np.arange(trial.batch, dtype=np.int64))
    )
    return measured_costs(model, layout, inputs, lambda output: next_token_loss(output, targets))
