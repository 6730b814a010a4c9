"""Judges whether a Plan computed the same training, and finds the first departure if it did not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shoal.check.diagnosis import (
    Evidence,
    explain_gradient,
    explain_norm,
    explain_parameter,
    explain_samples,
)
from shoal.check.distributed import Copy, Fragment, RankStep, copies, distinct
from shoal.check.forward import Fault
from shoal.check.reference import Tensors
from shoal.check.task_trial import AnyTrial
from shoal.check.tolerance import Tolerance, relative, scales_of, vector_deviation
from shoal.plan import Mesh, Plan, SettledPlan

_SHOWN = 6  # number of deviating parameters that are named after the first


@dataclass(frozen=True, slots=True)
class Deviation:
    """The relative deviation of a quantity from the reference, and the bound that rounding explains.

    Attributes:
        value: The deviation.
        bound: The largest deviation that rounding explains.
        name: Name of the parameter that is farthest beyond its bound, if the quantity has several.
    """

    value: float
    bound: float
    name: str = ""

    @property
    def departs(self) -> bool:
        """Whether the deviation is more than rounding explains."""
        return not self.value <= self.bound


@dataclass(frozen=True, slots=True)
class StepReport:
    """The deviations of one step.

    Attributes:
        step: Number of the step, from 1.
        loss: Deviation of the loss.
        norm: Deviation of the gradient's norm, before clipping.
        gradients: Deviation of the gradient that is farthest beyond its bound.
        parameters: Deviation of the parameter that is farthest beyond its bound, after the step.
        evaluation: Deviation of the loss in evaluation, after the step; 0 if it is not comparable.
    """

    step: int
    loss: Deviation
    norm: Deviation
    gradients: Deviation
    parameters: Deviation
    evaluation: Deviation


@dataclass(frozen=True, slots=True)
class Departure:
    """The first quantity that departs from the reference.

    Attributes:
        step: Number of the step.
        quantity: "samples", "gradient", "gradient norm", "loss", "parameter", "buffer" or "evaluation".
        name: Name of the parameter, the first in the model's order that departs.
        deviation: The deviation.
        bound: The largest deviation that rounding explains.
        text: All of this in sentences, with the likely cause.
        layer: First layer in forward order that departs; "" if none does, or none was looked for.
    """

    step: int
    quantity: str
    name: str
    deviation: float
    bound: float
    text: str
    layer: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the comparison of one Plan.

    Attributes:
        plan: The Plan's text form.
        outcome: "passed"; "failed": it computes something else; "refused": it does not fit this model;
            "broken": it did not end.
        steps: Deviations of each step.
        departure: The first departure, if the Plan failed.
        reason: Why it was refused or broken.
    """

    plan: str
    outcome: str
    steps: tuple[StepReport, ...] = ()
    departure: Departure | None = None
    reason: str = ""


def judge(trial: AnyTrial, plan: Plan, tolerance: Tolerance, ranks: Sequence[Sequence[RankStep]]) -> Verdict:
    """Compare the results of all ranks with the reference.

    Args:
        trial: The training that was compared.
        plan: The Plan that it ran under.
        tolerance: The reference, and the bounds of deviations from it.
        ranks: The results of every step on each rank.
    """
    reports = []
    departure = None
    mesh = Mesh.of(plan)
    microbatch = SettledPlan.of(plan, trial.batch).microbatch
    for index, (reference, bounds) in enumerate(zip(tolerance.steps, tolerance.bounds, strict=True)):
        seen = [steps[index] for steps in ranks]
        gradients = _distinct_copies([step.gradients for step in seen])
        parameters = _distinct_copies([step.parameters for step in seen])
        gradient_deviations = _deviations(gradients, reference.gradients, bounds.gradients)
        parameter_deviations = _deviations(parameters, reference.parameters, bounds.parameters)
        report = StepReport(
            index + 1,
            _worst_number([step.loss for step in seen], reference.loss, bounds.loss),
            _worst_number([step.norm for step in seen], reference.norm, bounds.norm),
            _farthest(gradient_deviations),
            _farthest(parameter_deviations),
            _worst_number(
                [step.evaluation for step in seen], reference.evaluation, max(bounds.loss, bounds.evaluation)
            ),
        )
        reports.append(report)
        if departure is None:
            evidence = Evidence(
                trial=trial,
                mesh=mesh,
                step=index + 1,
                wanted=trial.batch_of(index),
                microbatch=microbatch,
                seen=seen,
                reference=reference,
            )
            buffers = _buffer_deviations(seen[0].buffers, reference.buffers, bounds.buffers)
            departure = _first_departure(report, gradient_deviations, parameter_deviations, buffers, evidence)
    outcome = "passed" if departure is None else "failed"
    return Verdict(str(plan), outcome, tuple(reports), departure)


def may_be_of_forward(verdict: Verdict) -> bool:
    """Return whether the fault may be in the first step's forward, so that a trace may show it."""
    departure = verdict.departure
    return departure is not None and departure.step == 1 and departure.quantity in ("gradient", "loss")


def with_fault(verdict: Verdict, fault: Fault | None) -> Verdict:
    """Return the verdict with the fault that was found in forward, if the fault can be there."""
    departure = verdict.departure
    assert departure is not None
    if fault is not None:
        layer, told = fault.layer, fault.text
    elif verdict.steps[0].loss.departs:
        layer, told = "", "forward: every layer agrees of which one rank has the whole output"
    else:
        return verdict
    return replace(verdict, departure=replace(departure, layer=layer, text=f"{departure.text}\n  {told}"))


def _first_departure(
    report: StepReport,
    gradients: Sequence[Deviation],
    parameters: Sequence[Deviation],
    buffers: Sequence[Deviation],
    evidence: Evidence,
) -> Departure | None:
    """Return the first departure in the order of a step: samples, gradients and loss, norm, values."""
    step = report.step
    wrong_samples = explain_samples(evidence)
    if wrong_samples:
        return Departure(step, "samples", "", math.inf, 0.0, f"step {step}: {wrong_samples}")
    loss = f"; the loss departs too, by {report.loss.value:.1e}" if report.loss.departs else ""
    departing = [each for each in gradients if each.departs]
    if departing:
        first = departing[0]
        text = f"{_said(step, 'the gradient of', departing)}{loss}{explain_gradient(evidence, departing)}"
        return Departure(step, "gradient", first.name, first.value, first.bound, text)
    if report.loss.departs:
        text = f"{_said(step, 'the loss', [report.loss])}, though every gradient agrees"
        return Departure(step, "loss", "", report.loss.value, report.loss.bound, text)
    if report.norm.departs:
        text = f"{_said(step, 'the gradient norm', [report.norm])}, though every gradient agrees"
        text += explain_norm(evidence)
        return Departure(step, "gradient norm", "", report.norm.value, report.norm.bound, text)
    departing = [each for each in parameters if each.departs]
    if departing:
        first = departing[0]
        text = f"{_said(step, 'after the optimizer', departing)}, though every gradient agrees"
        text += explain_parameter(evidence, first.name)
        return Departure(step, "parameter", first.name, first.value, first.bound, text)
    departing = [each for each in buffers if each.departs]
    if departing:
        first = departing[0]
        text = f"{_said(step, 'after the step', departing)}, though every parameter agrees"
        return Departure(step, "buffer", first.name, first.value, first.bound, text)
    if report.evaluation.departs:
        text = f"{_said(step, 'the loss in evaluation', [report.evaluation])}, though every parameter agrees"
        return Departure(step, "evaluation", "", report.evaluation.value, report.evaluation.bound, text)
    return None


def _said(step: int, what: str, departing: Sequence[Deviation]) -> str:
    first = departing[0]
    named = f"{what} {first.name}" if first.name else what
    text = f"step {step}: {named} departs by {first.value:.1e}, and rounding explains {first.bound:.1e}"
    if len(departing) > 1:
        others = [each.name for each in departing[1:]]
        shown = others if len(others) <= _SHOWN else [*others[: _SHOWN - 1], "...", others[-1]]
        text += f"; so do {len(others)} after it: {', '.join(shown)}"
    return text


def _distinct_copies(ranks: Sequence[Sequence[Fragment]]) -> dict[str, list[Copy]]:
    return copies(distinct((rank, fragment) for rank, held in enumerate(ranks) for fragment in held))


def _deviations(
    held: Mapping[str, Sequence[Copy]], reference: Tensors, bounds: Mapping[str, float]
) -> list[Deviation]:
    """Return each parameter's worst copy's deviation, in the model's order; the first must be complete."""
    scales = scales_of(reference)
    deviations = []
    for name, value in reference.items():
        values = [math.inf if value.numel() else 0.0]
        if held.get(name):
            values = [vector_deviation(held[name][0].values, value, scales[name])]
            for copy in held[name][1:]:
                there = torch.cat(list(copy.places.values()))
                part = copy.values.flatten()[there]
                values.append(vector_deviation(part, value.flatten()[there], scales[name]))
        deviations.append(Deviation(max(values), bounds[name], name))
    return deviations


def _buffer_deviations(
    given: Mapping[str, torch.Tensor], reference: Tensors, bounds: Mapping[str, float]
) -> list[Deviation]:
    """Return the deviation of each buffer of the first rank; infinite if there is none of this shape."""
    scales = scales_of(reference)
    values = {
        name: vector_deviation(given[name], value, scales[name])
        if name in given and given[name].shape == value.shape
        else math.inf
        for name, value in reference.items()
    }
    return [Deviation(value, bounds[name], name) for name, value in values.items()]


def _farthest(deviations: Sequence[Deviation]) -> Deviation:
    return max(deviations, key=lambda each: each.value / each.bound)


def _worst_number(values: Sequence[float | None], reference: float | None, bound: float) -> Deviation:
    if reference is None or all(each is None for each in values):
        return Deviation(0.0, bound)
    return Deviation(max(relative(math.nan if each is None else each, reference) for each in values), bound)
