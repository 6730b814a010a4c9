"""The description of a run in its run.json, and what its opening says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from shoal.models import Transformer, new_parameters
from shoal.plan import Plan
from shoal.run import shown
from shoal.train.automatic import PassedOver
from shoal.train.config import describe_config
from shoal.train.job import Job
from shoal.train.run_writer import describe_device, describe_run
from shoal.units import format_count


def opening(job: Job, described: Mapping[str, Any], plan: Plan) -> str:
    """Return the first lines of a training.

    Args:
        job: The job.
        described: The description of its run.
        plan: Its Plan, with the stages that the model was cut into.
    """
    model, device = described["model"], described["device"]
    ranks = f"{job.plan.ranks} {device['type']} rank{'s' if job.plan.ranks > 1 else ''}"
    return (
        f"run {shown(job.path)}: {model['name']} with {format_count(model['parameters'])} parameters "
        f"on {ranks}, Plan {plan}\n{describe_config(job.config)}{_passed_over_text(job.passed_over)}"
        f"{'' if job.goes_on else _new_parameters_text(described)}"
    )


def _passed_over_text(passed_over: Sequence[PassedOver]) -> str:
    """Return the Plans that plan = "auto" passed over, each reason once."""
    first = {each.reason: each for each in reversed(passed_over)}
    lines = [f"\nnot used, though predicted to be faster: {each}" for each in reversed(first.values())]
    if len(passed_over) > len(first):
        lines.append(f"\n{len(passed_over) - len(first)} others for the same reasons; run.json has all")
    return "".join(lines)


def _new_parameters_text(described: Mapping[str, Any]) -> str:
    """Return a line on the parameters that the model's folder lacks; empty if it lacks none."""
    names = described["new_parameters"]
    if not names:
        return ""
    return (
        f"\nnew values for {', '.join(names)}: the weights of {described['config']['model']} do not have them"
    )


def describe(job: Job, model: nn.Module, device: torch.device, loss_unit: str) -> dict[str, Any]:
    """Return the description of a run.

    Args:
        job: The job.
        model: The whole model.
        device: The device of a rank.
        loss_unit: Unit of the loss, such as "nats a token".
    """
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if isinstance(model, Transformer):
        flops = model.config.flops_per_token(job.config.sequence)
    else:
        flops = 6.0 * parameters
    return {
        **describe_run(job.path, job.plan.ranks, job.config.model, parameters, flops),
        "plan": str(job.plan),
        "passed_over": [{"plan": str(each.plan), "reason": each.reason} for each in job.passed_over],
        "cluster": None if job.cluster is None else asdict(job.cluster),
        "seed": job.config.seed,
        "config": job.config.model_dump(mode="json"),
        "device": describe_device(device, job.plan),
        "tokens_per_step": job.config.batch * job.config.sequence,
        "loss_unit": loss_unit,
        "new_parameters": list(new_parameters(model)),
    }
