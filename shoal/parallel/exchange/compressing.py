"""The compression of a Plan as one strategy uses it, and the step that it is in."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.plan import Compression, Exchange, Plan


@dataclass(slots=True)
class Compressing:
    """What the exchanges of a strategy's gradients have in common; with exchange=auto it changes.

    Attributes:
        compression: What is sent in place of a vector.
        feedback: Share of what was left out of one exchange that is added to the next.
        dense: First steps, in which nothing is compressed.
        is_between_workers: Whether the sums over replicas are compressed. If not, the plan has one worker,
            and its ranks compress what they send each other.
        step: Steps made.
        changes: How often another exchange was to be followed.
    """

    compression: Compression
    feedback: float
    dense: int
    is_between_workers: bool
    step: int = 0
    changes: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Compressing | None:
        """Return the compression of gradients under a Plan; None if they are sent whole."""
        exchange = plan.exchanged
        if exchange.merges or not (exchange.compresses or (exchange.is_chosen and plan.replicas > 1)):
            return None
        return cls(exchange.compression, exchange.feedback, exchange.dense, plan.replicas > 1)

    def follow(self, exchange: Exchange) -> None:
        """Compress as an exchange says from the next step on; what was left out before is dropped."""
        self.compression = Compression() if exchange.merges else exchange.compression
        self.feedback, self.dense = exchange.feedback, 0
        self.changes += 1

    @property
    def is_on(self) -> bool:
        """Whether this step's gradients are compressed."""
        return self.compression.kind != "none" and self.step >= self.dense
