"""What `shoal schedule --model` knows of a model: the costs of its pieces, and how they make stages."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from shoal.plan import Plan
from shoal.plan.schedules import Schedule, Times, least_virtual
from shoal.plan.stages import Cost, ranges_of, split_by_cost, split_by_count

if TYPE_CHECKING:
    from shoal.train.comparison import Trial

__all__ = ["ModelStages", "add_arguments", "open_model"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which model, and how its costs are found."""
    model = parser.add_argument_group("stages of a model, in place of equal ones")
    model.add_argument("--model", metavar="NAME", help="as for shoal train; a Plan with its split is printed")
    model.add_argument(
        "--option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one of the model's options, such as layers=2; may be given several times",
    )
    model.add_argument(
        "--measure", action="store_true", help="measure its costs on this device (default: computed)"
    )
    model.add_argument(
        "--microbatch", metavar="N", type=int, default=1, help="sequences to measure with (default 1)"
    )
    model.add_argument(
        "--sequence", metavar="N", type=int, default=128, help="tokens of each of these (default 128)"
    )
    model.add_argument(
        "--recompute", metavar="POLICY", default="none", help="of the Plan, to measure with (default none)"
    )
    model.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")


@final
class ModelStages:
    """A model's pieces as stages of schedules.

    Args:
        costs: Of each piece: the embedding, the blocks, the end.
        transfer: Time from rank to rank, in the unit of the costs.
        unit: What that is.
    """

    def __init__(self, costs: Sequence[Cost], transfer: float, unit: str) -> None:
        self.unit = unit
        self._costs = costs
        self._transfer = transfer
        self._splits: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def split(self, schedule: Schedule) -> tuple[int, ...]:
        """The number of pieces of each stage, by cost.

        Raises:
            PlanError: The model has fewer blocks than there are stages.
        """
        key = schedule.placement, schedule.microbatches
        if key not in self._splits:
            placement, microbatches = key
            self._splits[key] = split_by_cost(
                self._costs, len(placement), placement, microbatches=microbatches
            )
        return self._splits[key]

    def split_by_count(self, schedule: Schedule) -> tuple[int, ...]:
        """The same with equal numbers of blocks."""
        return split_by_count(len(self._costs) - 2, schedule.stages)

    def times(self, split: Sequence[int]) -> Times:
        """Those of the stages of a split. A backward is taken to be as much I as W."""
        stages = [[self._costs[piece] for piece in pieces] for pieces in ranges_of(split)]
        half = tuple(sum(cost.backward for cost in stage) / 2 for stage in stages)
        return Times(
            tuple(sum(cost.forward for cost in stage) for stage in stages),
            half,
            half,
            (self._transfer,) * (len(stages) - 1),
        )

    def plan(self, schedule: Schedule) -> Plan:
        """The settings that run the schedule with the split by cost."""
        virtual = None if schedule.virtual == least_virtual(schedule.name) else schedule.virtual
        blocks = list(self.split(schedule))
        blocks[0] -= 1  # the embedding
        blocks[-1] -= 1  # the end
        return Plan(
            pp=schedule.ranks, schedule=schedule.name, virtual=virtual, split="-".join(map(str, blocks))
        )


def open_model(args: argparse.Namespace) -> ModelStages:
    """The model that is asked for, with its costs measured in seconds, or computed.

    Computed ones are in the unit of `--times`: the mean forward of a rank is 1.

    Raises:
        UserError: There is no such model, or it cannot be cut into stages or measured.
    """
    # Imported here because they bring torch, which schedules without a model do without.
    from shoal.parallel.stage_costs import computed_costs
    from shoal.parallel.stage_layout import stages_of
    from shoal.train import load_config
    from shoal.train.comparison import Trial

    sys.path.insert(0, os.getcwd())  # for a model of the user's own, `file:function`
    Plan(recompute=args.recompute)  # checks it
    options = load_config(None, [f"model_options.{option}" for option in args.option]).model_options
    trial = Trial(
        model=args.model, model_options=options, steps=1, batch=args.microbatch, sequence=args.sequence
    )
    if args.measure:
        return ModelStages(_measured(trial, args.device, args.recompute), args.transfer, "seconds")
    model = trial.build("cpu" if ":" in args.model else "meta")
    costs = computed_costs(model, stages_of(model))
    unit = sum(cost.forward for cost in costs) / max(args.pp, 1) or 1.0
    relative = [Cost(cost.forward / unit, cost.backward / unit, cost.memory) for cost in costs]
    return ModelStages(relative, args.transfer, "a rank's mean forward")


def _measured(trial: Trial, device_asked: str, recompute: str) -> list[Cost]:
    import numpy as np

    from shoal.models import next_token_loss
    from shoal.parallel.recompute import recompute_blocks
    from shoal.parallel.stage_costs import measured_costs
    from shoal.parallel.stage_layout import named_part, stages_of
    from shoal.train import TrainConfig, choose_device

    trial.require_possible()
    device = choose_device(TrainConfig.model_validate({"device": device_asked}), 0)
    model = trial.build_with_values(device)
    layout = stages_of(model)
    recompute_blocks(list(named_part(model, layout.blocks).children()), recompute)
    inputs, targets = (
        each.to(device) for each in trial.samples(model).batch(np.arange(trial.batch, dtype=np.int64))
    )
    return measured_costs(model, layout, inputs, lambda output: next_token_loss(output, targets))
