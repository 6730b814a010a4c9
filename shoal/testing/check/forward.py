"""Finds the first layer of a forward whose output on the ranks departs from that on one device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.spec.plan import Mesh
from shoal.testing.check.reference import TYPES, bound_of, forward_of
from shoal.testing.check.trace import Forward, Note, Place, RankTrace, joined
from shoal.testing.check.trial import Trial


@dataclass(frozen=True, slots=True)
class ForwardReference:
    """The first forward of one device, over the whole batch.

    Attributes:
        forward: The forward in the Plan's precision.
        wider: The same forward in a type of twice the width.
    """

    forward: Forward
    wider: Forward

    @classmethod
    def measure(cls, trial: Trial, precision: str, device: torch.device) -> ForwardReference:
        """Compute the reference for Plans of this precision: fp32 or bf16."""
        return cls(*(forward_of(trial, compute, device) for compute in TYPES[precision]))


@dataclass(frozen=True, slots=True)
class Fault:
    """The first departure in forward.

    Attributes:
        layer: Name of the layer; "" if it is not in a layer.
        text: The message: what departs, and on which ranks.
    """

    layer: str
    text: str


def first_fault(
    trial: Trial, mesh: Mesh, ranks: Sequence[RankTrace], reference: ForwardReference
) -> Fault | None:
    """Return the first layer, in the order of execution, whose output on a rank departs from one device's.

    An output is compared only if the rank has all features of its tokens: not if tensor parallelism splits
    them.

    Args:
        trial: The training that is compared.
        mesh: The mesh of the ranks.
        ranks: The trace of the first step on each rank.
        reference: The first forward of one device.

    Returns:
        None if every output that can be compared agrees.
    """
    lost = _lost_tokens(trial, mesh, ranks)
    if lost:
        return Fault("", lost)
    misplaced = _misplaced(mesh, ranks, reference.forward)
    if misplaced is not None:
        return misplaced
    rows = {sample: row for row, sample in enumerate(trial.batch_of(0))}
    for place, wanted in reference.forward.items():
        layer, kind = place
        if kind == "positions":
            text = _other_positions(place, wanted, ranks)
        else:
            parts = list(_parts(place, wanted, reference.wider[place], mesh, ranks, rows))
            text = (_other_choices if kind == "choices" else _other_output)(layer, parts, len(ranks))
        if text:
            return Fault(layer, text)
    return None


def _lost_tokens(trial: Trial, mesh: Mesh, ranks: Sequence[RankTrace]) -> str:
    """Say which tokens of a sample are on none of the ranks that share it."""
    for group in mesh.groups("cp"):
        held = [position for rank in group for position in ranks[rank].held.tolist()]
        lost = sorted(set(range(trial.sequence)) - set(held))
        if lost:
            return (
                f"tokens: no rank trains on the positions {_ranges(lost)} of the samples of {_ranks(group)}"
            )
    return ""


def _misplaced(mesh: Mesh, ranks: Sequence[RankTrace], reference: Forward) -> Fault | None:
    """Return the first block that no stage of the pipeline runs, or that stages on several ranks run."""
    for block in ranks[0].blocks:
        place = (block, "output")
        runners = [
            rank for rank, trace in enumerate(ranks) if any(place in forward for forward in trace.forwards)
        ]
        places = {mesh.coordinate(rank, "pp") for rank in runners}
        if len(places) > 1:
            return Fault(block, f"stages: {block} runs on {_ranks(runners)}, one after the other")
        if not places and place in reference:
            return Fault(block, f"stages: no rank runs {block}")
    return None


def _other_positions(place: Place, wanted: Note, ranks: Sequence[RankTrace]) -> str:
    """Say which ranks give their tokens other positions than one device does."""
    wrong: dict[int, list[int]] = {}
    for rank, trace in enumerate(ranks):
        given = joined(trace.forwards, place)
        if given is not None and not torch.equal(given.values, wanted.values[trace.held]):
            wrong[rank] = given.values.tolist()
    if not wrong:
        return ""
    rank, given_positions = next(iter(wrong.items()))
    owners = [
        other for other, trace in enumerate(ranks) if other != rank and trace.held.tolist() == given_positions
    ]
    text = f"positions: rank {rank} gives its tokens the positions {_ranges(given_positions)}"
    text += f", which are those of {_ranks(owners[:1])}" if owners else ""
    text += f"; one device has them at {_ranges(ranks[rank].held.tolist())}"
    return text + (f"; so it is on {_ranks(list(wrong))}" if len(wrong) > 1 else "")


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of a quantity, and the same part of both references.

    Attributes:
        rank: The rank.
        values: Its values for all micro-batches, `[batch, seq, ...]`.
        wanted: The values of the reference.
        wider: The values of the reference in the wider type.
        sizes: Samples in each micro-batch.
    """

    rank: int
    values: Tensor
    wanted: Tensor
    wider: Tensor
    sizes: Sequence[int]


def _parts(
    place: Place,
    wanted: Note,
    wider: Note,
    mesh: Mesh,
    ranks: Sequence[RankTrace],
    rows: dict[int, int],
) -> Iterator[_Part]:
    """Yield the parts that can be compared at a place, none if its output is not one of each token."""
    if wanted.values.shape[:2] != (len(rows), len(ranks[0].held) * len(mesh.group(0, "cp"))):
        return
    tp = len(mesh.group(0, "tp"))
    for rank, trace in enumerate(ranks):
        note = joined(trace.forwards, place)
        if note is None or note.width != wanted.width:
            continue
        length, held = note.values.shape[1], trace.held
        if length * tp == len(held):  # tensor parallelism splits the sequence between blocks
            held = held.chunk(tp)[mesh.coordinate(rank, "tp")]
        samples = [sample for micro in trace.samples for sample in micro]
        if length != len(held) or len(samples) != len(note.values) or not rows.keys() >= set(samples):
            continue
        chosen = torch.tensor([rows[sample] for sample in samples])[:, None], held[None]
        sizes = [len(micro) for micro in trace.samples]
        yield _Part(rank, note.values, wanted.values[chosen], wider.values[chosen], sizes)


def _other_choices(layer: str, parts: Sequence[_Part], ranks: int) -> str:
    """Say on which ranks a router chooses other experts, for more tokens than rounding explains."""
    wrong: dict[int, int] = {}
    for part in parts:
        differing = int((part.values != part.wanted).any(-1).sum())
        by_rounding = int((part.wider != part.wanted).any(-1).sum())
        if differing > bound_of([float(by_rounding)]):
            wrong[part.rank] = differing
    if not wrong:
        return ""
    tokens = sum(part.values.shape[:2].numel() for part in parts if part.rank in wrong)
    where = _ranks(list(wrong)) if len(wrong) < ranks else "every rank"
    return (
        f"the router of {layer} chooses other experts on {where} than one device does for the same "
        f"tokens: {sum(wrong.values())} of {tokens}"
    )


def _other_output(layer: str, parts: Sequence[_Part], ranks: int) -> str:
    """Say on which ranks a layer's output departs."""
    wrong: dict[int, tuple[float, float]] = {}
    mistaken = ""
    for part in parts:
        deviation = _deviation(part.values, part.wanted)
        bound = bound_of([_deviation(part.wider, part.wanted)])
        if not deviation <= bound:
            wrong[part.rank] = deviation, bound
            mistaken = mistaken or _mistaken(part, bound)
    if not wrong:
        return ""
    deviation, bound = max(wrong.values())
    where = _ranks(list(wrong)) if len(wrong) < ranks else "every rank"
    return (
        f"forward: the output of {layer} is the first that departs, on {where}, "
        f"by {deviation:.1e}, and rounding explains {bound:.1e}{mistaken}"
    )


def _mistaken(part: _Part, bound: float) -> str:
    """Say whether a rank's values for some micro-batches are those of other micro-batches."""
    values, wanted = part.values.split(list(part.sizes)), part.wanted.split(list(part.sizes))
    taken: dict[int, int] = {}
    for number, value in enumerate(values):
        if _deviation(value, wanted[number]) <= bound:
            continue
        others = [other for other, each in enumerate(wanted) if _deviation(value, each) <= bound]
        if not others:
            return ""
        taken[number] = others[0]
    if not taken:
        return ""
    number, other = next(iter(taken.items()))
    more = f", and so on for {len(taken)} of {len(values)}" if len(taken) > 1 else ""
    return f"; for micro-batch {number} it is what one device gives for micro-batch {other}{more}"


def _deviation(values: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm of `wanted`; infinite if the shapes differ."""
    if values.shape != wanted.shape:
        return float("inf")
    scale = max(float(wanted.double().norm()), torch.finfo(torch.float32).tiny)
    return float((values.double() - wanted.double()).norm()) / scale


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_ranges(sorted(ranks))}"


def _ranges(numbers: Sequence[int]) -> str:
    """Write runs of successive numbers as `first..last`."""
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}..{members[-1]}")
    shown = ", ".join(runs[:6])
    return shown if len(runs) <= 6 else f"{shown} and {len(runs) - 6} more runs"
