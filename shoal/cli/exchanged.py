"""The bytes that workers sent each other in a run, beside those of whole gradients."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from shoal.plan import Groups, Plan
from shoal.timeline import Kind, Purpose, Span, Timeline

_SENT = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
"""Bytes that each of n ranks sends, over (n - 1) / n of the bytes that its span is counted with."""

_SERVED = ("push", "pull")
_FP32 = 4


def exchanged_summary(plan: Plan, timeline: Timeline, parameters: int) -> dict[str, float] | None:
    """Return the bytes of a mean step of a rank, for JSON; None if all workers average whole gradients.

    What workers send when they save or validate is not in a step. Whole gradients of a rank's part, fp32,
    take 2 (d - 1) / d of its bytes between d workers, and twice its bytes to servers and back.

    Args:
        plan: The Plan of the run.
        timeline: Its spans.
        parameters: Parameters of the model.
    """
    exchange, workers = plan.exchanged, plan.replicas
    is_loose = exchange.merges or exchange.compresses or exchange.is_chosen or exchange.is_served
    if not is_loose or workers == 1 or not timeline.steps():
        return None
    groups = set() if exchange.is_served else set(Groups.of(plan).workers.tile(plan.ranks))
    steps, sent = 0, 0.0
    for rank in timeline.ranks:
        made = [step for index in timeline.steps() if (step := timeline.step(rank, index)) is not None]
        starts = [step.start for step in made]
        steps += len(made)
        for span in timeline.of(rank):
            place = bisect_right(starts, span.start) - 1
            if place >= 0 and span.start < made[place].stop:
                sent += _sent(span, groups)
    cut = plan.tp * plan.pp * (plan.shards * plan.cp if plan.sharding.cuts_optimizer else 1)
    whole = _FP32 * parameters / cut * 2 * (1 if exchange.is_served else (workers - 1) / workers)
    return {"sent": sent / steps, "whole_gradients": whole}


def exchanged_text(summary: Mapping[str, float]) -> str:
    """Return the sentence of a report about what `exchanged_summary` returned."""
    sent, whole = summary["sent"], summary["whole_gradients"]
    text = f"{sent / 1e6:,.3g} MB of a rank to other workers in the mean step"
    return f"{text}, 1/{whole / sent:,.1f} of whole gradients" if sent > 0 else text


def sent_bytes(operation: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that each rank of a collective sends; 0 for one that sums or gathers nothing.

    Args:
        operation: Its name, such as "all_reduce".
        nbytes: Its bytes, counted as in nccl-tests' algbw.
        ranks: Number of ranks.
    """
    return _SENT.get(operation, 0.0) * nbytes * (ranks - 1) / ranks


def _sent(span: Span, groups: set[tuple[int, ...]]) -> float:
    """Return the bytes that a rank sent in a span, or exchanged with servers; 0 if not between workers."""
    if span.kind != Kind.COLLECTIVE or span.purpose != Purpose.DATA:
        return 0.0
    operation = span.name.partition(":")[0]
    if operation in _SERVED:
        return float(span.bytes)
    return sent_bytes(operation, span.bytes, len(span.group)) if span.group in groups else 0.0
