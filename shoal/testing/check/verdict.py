"""Judges whether a Plan computed the same training, and finds the first departure if it did not.

Explains a departure: finds a common fault of layouts that would give just these numbers.

Each explanation is a hypothesis that is tested against the numbers. Only one that fits is reported.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.spec.plan import AXES, Mesh, Plan, SettledPlan
from shoal.testing.check.distributed import Copy, Fragment, RankStep, copies, distinct, places
from shoal.testing.check.forward import Fault
from shoal.testing.check.reference import (
    Step,
    Tensors,
    Tolerance,
    gradients_of,
    relative,
    scales_of,
    vector_deviation,
)
from shoal.testing.check.task_trial import AnyTrial

_FITS = 1e-3  # largest error of a hypothesis that fits, as a share of the tensor's norm
_MOST_TRIED = 32  # largest number of micro-batches whose loss is tried
_DATA_AXES = ("replicate", "shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All facts about one step.

    Attributes:
        trial: The training that is compared.
        mesh: The mesh of the ranks.
        step: Number of the step, from 1.
        wanted: The samples of its batch.
        microbatch: Samples in one forward of a rank.
        seen: The results of each rank.
        reference: The results of one device.
    """

    trial: AnyTrial
    mesh: Mesh
    step: int
    wanted: Sequence[int]
    microbatch: int
    seen: Sequence[RankStep]
    reference: Step


def explain_samples(evidence: Evidence) -> str:
    """Say which samples were trained on twice, not at all, or in another order than on ranks that share them.

    Returns:
        "" if each sample was trained on once, and in the same order.
    """
    by_place: dict[int, list[int]] = {}
    for rank, step in enumerate(evidence.seen):
        place = evidence.mesh.coordinate(rank, "dp")
        first = by_place.setdefault(place, step.samples)
        if step.samples and first != step.samples:
            order = "in another order" if sorted(first) == sorted(step.samples) else "on other samples"
            return (
                f"rank {rank} trains {order} than other ranks at the same place along dp, which must have "
                "the same samples"
            )
    counts = Counter(itertools.chain.from_iterable(by_place.values()))
    wanted = Counter(evidence.wanted)
    dropped, added = wanted - counts, counts - wanted
    if not dropped and not added:
        return ""
    twice = sorted(index for index in added if index in wanted)
    foreign = sorted(index for index in added if index not in wanted)
    told = [
        f"{text} {_listed(indices)}"
        for text, indices in (
            ("dropped:", sorted(dropped)),
            ("duplicated:", twice),
            ("from another step:", foreign),
        )
        if indices
    ]
    if twice:
        holders = [place for place, held in by_place.items() if twice[0] in held]
        told.append(f"sample {twice[0]} is at {_listed(holders)} along dp")
    return f"not every sample of the batch is trained on once: {'; '.join(told)}"


def explain_gradient(evidence: Evidence, departing: Sequence[Any]) -> str:
    """Explain the first gradient that departs."""
    name = departing[0].name
    held = _held(name, [step.gradients for step in evidence.seen])
    reference = evidence.reference.gradients[name].double()
    if not held:
        return "\n  no rank owns it"
    if held[0].values.isnan().any():
        return "\n  an element is not a number, or no rank owns it"
    factor, _ = _projection(held[0].values, reference)
    if factor == 0.0 and all(float(copy.values.norm()) == 0.0 for copy in held):
        return f"\n  it is zero: it was not computed{_where(evidence, departing)}"
    if _all_fit(held, reference, factor):
        return f"\n  it is {factor:.4g} times the reference{_as_mean(evidence.mesh, factor)}"
    return (
        _not_reduced(evidence, name)
        or _not_added_up(evidence, held, reference)
        or _lost(evidence, held, departing)
        or _unlike(evidence, name, held)
    )


def explain_norm(evidence: Evidence) -> str:
    """Say which part of the gradient the norm was taken over."""
    norms = sorted({step.norm for step in evidence.seen})
    lines = []
    if norms[-1] > norms[0] * (1 + _FITS):
        lines.append(f"the ranks have different norms, from {norms[0]:.6g} to {norms[-1]:.6g}")
    own = [_norm_of(step.gradients) for step in evidence.seen]
    if all(
        math.isclose(step.norm, norm, rel_tol=_FITS) for step, norm in zip(evidence.seen, own, strict=True)
    ):
        lines.append("each is the norm of the rank's own part: the squares are not summed over the ranks")
    else:
        factor = norms[-1] / evidence.reference.norm
        lines.append(f"it is {factor:.4g} times the reference, and its square {factor**2:.4g} times")
    return "".join(f"\n  {line}" for line in lines)


def explain_parameter(evidence: Evidence, name: str) -> str:
    """Say how the copies of a parameter differ."""
    held = _held(name, [step.parameters for step in evidence.seen])
    return "\n  no rank owns it" if not held else _unlike(evidence, name, held, of_parameters=True)


def _held(name: str, ranks: Sequence[Sequence[Fragment]]) -> Sequence[Copy]:
    """Return all copies of one tensor."""
    named = ((rank, each) for rank, held in enumerate(ranks) for each in held if each.name == name)
    return copies(named).get(name, [])


def _not_reduced(evidence: Evidence, name: str) -> str:
    """Test whether ranks hold the gradient of part of the batch: it was not summed over some axes."""
    if evidence.step > 1:  # only the first step's weights are known to be right
        return ""
    mesh = evidence.mesh
    axes = [axis for axis in _DATA_AXES if mesh.sizes[AXES.index(axis)] > 1]
    known: dict[tuple[int, ...], torch.Tensor] = {}
    for missing in [*((axis,) for axis in axes), *([tuple(axes)] if len(axes) > 1 else [])]:
        beside = [axis for axis in axes if axis not in missing]
        factors = []
        for rank, step in enumerate(evidence.seen):
            summed = mesh.group(rank, *beside) if beside else (rank,)
            samples = tuple(index for member in summed for index in evidence.seen[member].samples)
            if samples not in known:
                device = torch.device("cpu")
                known[samples] = gradients_of(evidence.trial, samples, device)[name].double().flatten()
            for fragment in step.gradients:
                if fragment.name == name and fragment.stop > fragment.start:
                    where = places(fragment)
                    factor, rest = _projection(fragment.values.double(), known[samples][where])
                    factors.append(factor if rest <= _FITS else math.nan)
        if factors and max(factors) - min(factors) <= _FITS:
            return (
                f"\n  each rank holds {factors[0]:.4g} times the gradient of its own samples: "
                f"it is not summed over the axis {' and '.join(missing)}"
            )
    return ""


def _not_added_up(evidence: Evidence, held: Sequence[Copy], reference: torch.Tensor) -> str:
    """Test whether each stage that shares a parameter has only the gradient of its own use."""
    by_place: dict[int, torch.Tensor] = {}
    for copy in held:
        by_place.setdefault(evidence.mesh.coordinate(copy.ranks[0], "pp"), copy.values)
    if len(by_place) < 2:
        return ""
    factor, rest = _projection(torch.stack(list(by_place.values())).sum(0), reference)
    if rest > _FITS or abs(factor - 1) > _FITS:
        return ""
    return (
        f"\n  the ranks at {_listed(sorted(by_place))} along pp hold gradients whose sum is right: "
        "the gradients of a tied parameter are not summed over the stages that share it"
    )


def _lost(evidence: Evidence, held: Sequence[Copy], departing: Sequence[Any]) -> str:
    """Test whether the gradient of a micro-batch is missing or counted twice, on all data ranks or one."""
    if evidence.step > 1:  # only the first step's weights are known to be right
        return ""
    name = departing[0].name
    missing = evidence.reference.gradients[name].double() - held[0].values
    by_place: dict[int, list[list[int]]] = {}
    for rank, step in enumerate(evidence.seen):
        size = evidence.microbatch
        micro = [step.samples[start : start + size] for start in range(0, len(step.samples), size)]
        by_place.setdefault(evidence.mesh.coordinate(rank, "dp"), micro)
    everywhere = [
        [each for micro in parts for each in micro] for parts in zip(*by_place.values(), strict=True)
    ]
    own = by_place.values() if len(by_place) > 1 else ()
    for micro in (everywhere, *own):
        for number, samples in enumerate(micro[:_MOST_TRIED]):
            gradient = gradients_of(evidence.trial, samples, torch.device("cpu"))[name].double()
            factor, rest = _projection(missing, gradient * (len(samples) / len(evidence.wanted)))
            if rest <= _FITS * 10 and abs(abs(factor) - 1) <= _FITS * 10:
                told = "is missing" if factor > 0 else "is counted twice"
                where = _where(evidence, departing)
                return f"\n  the gradient of micro-batch {number} (sample {_listed(samples)}) {told}{where}"
    return ""


def _where(evidence: Evidence, departing: Sequence[Any]) -> str:
    """Say on which ranks and stages of a pipeline gradients depart; "" without a pipeline."""
    mesh = evidence.mesh
    if mesh.sizes[AXES.index("pp")] == 1:
        return ""
    names = {each.name for each in departing}
    ranks = [
        rank for rank, step in enumerate(evidence.seen) if any(each.name in names for each in step.gradients)
    ]
    places = sorted({mesh.coordinate(rank, "pp") for rank in ranks})
    return f"; the fault is on rank {_listed(ranks)}, at {_listed(places)} along pp"


def _unlike(evidence: Evidence, name: str, held: Sequence[Copy], *, of_parameters: bool = False) -> str:
    """Say along which axes ranks hold different copies, and on which ranks a part departs."""
    mesh, reference = evidence.mesh, evidence.reference
    wanted = (reference.parameters if of_parameters else reference.gradients)[name].double().flatten()
    fragments = [
        {
            (each.block, each.start, each.stop): each.values.double()
            for each in (step.parameters if of_parameters else step.gradients)
            if each.name == name and each.stop > each.start
        }
        for step in evidence.seen
    ]
    lines = []
    for axis in AXES:
        pairs = [pair for group in mesh.groups(axis) for pair in itertools.combinations(group, 2)]
        if any(
            not torch.allclose(fragments[a][key], fragments[b][key], rtol=_FITS, atol=0.0)
            for a, b in pairs
            for key in fragments[a].keys() & fragments[b].keys()
        ):
            lines.append(f"ranks along the axis {axis} hold different values of the same elements")
    wrong = [
        rank
        for rank in range(len(fragments))
        if any(
            float((copy.values.flatten()[copy.places[rank]] - wanted[copy.places[rank]]).norm())
            > _FITS * float(wanted[copy.places[rank]].norm())
            for copy in held
            if rank in copy.places
        )
    ]
    if wrong and len(wrong) < sum(map(bool, fragments)):
        lines.append(f"it departs only on rank {_listed(wrong)}")
    return "".join(f"\n  {line}" for line in lines)


def _as_mean(mesh: Mesh, factor: float) -> str:
    """Name the axes whose size is the factor, or 1 / the factor."""
    sizes = {
        **{axis: size for axis, size in zip(AXES, mesh.sizes, strict=True) if size > 1},
        "dp": mesh.sizes[AXES.index("replicate")] * mesh.sizes[AXES.index("shard")],
    }
    for text, wanted in (
        ("a sum in place of a mean", factor),
        ("averaged twice", 1 / factor if factor else 0),
    ):
        axes = [
            axis for axis, size in sizes.items() if size > 1 and math.isclose(size, wanted, rel_tol=_FITS)
        ]
        if axes:
            return f": {text} over {' or '.join(axes)}"
    return ""


def _all_fit(held: Sequence[Copy], reference: torch.Tensor, factor: float) -> bool:
    deviations = [
        float((copy.values - factor * reference)[~copy.values.isnan()].norm()) / float(reference.norm())
        for copy in held
    ]
    return all(deviation <= _FITS * abs(factor) for deviation in deviations)


def _projection(value: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Return the factor that brings the reference nearest to the value, and the share that is left."""
    square, norm = float(reference.square().sum()), float(value.norm())
    if square == 0.0 or norm == 0.0:
        return 0.0, float(square != norm)
    factor = float((value * reference).sum()) / square
    return factor, float((value - factor * reference).norm()) / norm


def _norm_of(fragments: Sequence[Fragment]) -> float:
    return math.sqrt(sum(float(fragment.values.double().square().sum()) for fragment in fragments))


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"


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
