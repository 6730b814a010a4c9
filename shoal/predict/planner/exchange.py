"""Which exchange between workers reaches a loss soonest, by what was measured in a training.

The least seconds of a dense step's progress are looked for: the seconds of a step, predicted until they are
measured, times the steps that an exchange takes for what one dense step does.

Seconds. A step without an exchange is measured; an all-reduce of n bytes takes `latency + n per_byte`, by two
measured sizes. What of it a dense step hides beside its backward is known from a measured dense step. Other
exchanges are taken to hide nothing until a step of theirs is measured.

Steps. With B the batch and N the gradient noise scale, gradient descent takes `S (1 + N / B)` steps to a loss
(McCandlish et al., arXiv:1812.06162). The first summand is what exact gradients would take, and
the second one is noise. What compression leaves out is fed back later. That slows the first one down by at
most 1 / kept, with kept the share of a gradient's square that is sent, and leaves the second one as it is
(Stich and Karimireddy, arXiv:1909.05350). So a compressed step is worth a dense one over
`(1 / kept + N / B) / (1 + N / B)`. Local steps are taken to be worth a dense one until a trial of some tells,
whatever their compression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.predict.cost.time import payload_bytes
from shoal.spec.plan import Compression, Exchange, Plan, parse_settings

DENSE = "exchange=bucketed"
"""Every step averages whole gradients."""

_FP32 = 4


class CodecMeasure(NamedTuple):
    """A codec on a gradient of the training.

    Attributes:
        kept: Share of the gradient's square that its payload keeps.
        encode: Seconds for an element.
        decode: Seconds for an element, added to a vector.
    """

    kept: float
    encode: float
    decode: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What was measured in a training.

    Attributes:
        workers: Number of workers.
        elements: Elements of which the rank with most exchanges gradients.
        compute: Seconds of a step without an exchange between workers, on the slowest.
        dense: Seconds of a step that averages whole gradients.
        latency: Seconds of an all-reduce between workers of no bytes.
        per_byte: Seconds that it takes longer for each byte of its vector.
        hidden: Seconds of the all-reduce that a dense step hides beside its backward; below 0 if it takes
            longer there.
        noise: Gradient noise scale over the batch.
        codecs: Codecs by the text of their compression.
    """

    workers: int
    elements: int
    compute: float
    dense: float
    latency: float
    per_byte: float
    hidden: float
    noise: float
    codecs: Mapping[str, CodecMeasure]

    def all_reduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce between workers of a vector of this many bytes."""
        return self.latency + nbytes * self.per_byte


class Tried(NamedTuple):
    """The result of a trial of an exchange beside as many dense steps.

    Attributes:
        step: The step of the training after which it was made, or up to which it was followed since.
        seconds: Seconds of a step; None if links have changed since.
        worth: Dense steps that one of its steps was worth, at most 1.
        failed: Why a guard refused it, in the trial or later; "" if none did.
    """

    step: int
    seconds: float | None
    worth: float
    failed: str


class Expected(NamedTuple):
    """What is expected of an exchange.

    Attributes:
        exchange: Its text.
        seconds: Seconds of a step.
        steps: Steps for what one dense step does.
        is_measured: Whether the seconds were measured.
    """

    exchange: str
    seconds: float
    steps: float
    is_measured: bool

    @property
    def cost(self) -> float:
        """Seconds for what one dense step does."""
        return self.seconds * self.steps

    def __str__(self) -> str:
        how = "measured" if self.is_measured else "predicted"
        return f"{self.exchange}: {self.seconds:.3g} s a step {how}, {self.steps:.3g} for each dense one"


def candidates(every: int) -> Sequence[str]:
    """Return the texts of the exchanges to choose from, with this many local steps between merges.

    Those that change gradients least come first.
    """
    return (
        DENSE,
        "compress=int8",
        f"exchange=local,every={every}",
        f"exchange=local,every={every},compress=int8",
        "compress=topk:64",
        f"exchange=local,every={every},compress=topk:64:2bit,feedback=0.95",
    )


def exchange_of(text: str, plan: Plan) -> Exchange:
    """Return the Exchange that a text names, for the workers of a Plan with exchange=auto."""
    named = {"exchange": "bucketed", "dense": 0, **parse_settings(text)}
    if named["exchange"] != "local":
        named["every"] = 20
    return plan.replace(**named).exchanged


def expected(
    text: str, exchange: Exchange, conditions: Conditions, tried: Tried | None, worth: float = 1.0
) -> Expected:
    """Return what is expected of an exchange.

    Args:
        text: Its text.
        exchange: The same, read.
        conditions: What was measured.
        tried: The newest trial of it; None without one.
        worth: Dense steps that a local step is taken to be worth without a trial.
    """
    seconds, steps = _seconds(exchange, conditions), 1 / worth if exchange.merges else 1.0
    if tried is not None:
        measured = tried.seconds or seconds
        return Expected(text, measured, 1 / tried.worth, is_measured=tried.seconds is not None)
    if exchange.compresses and not exchange.merges:
        kept, noise = conditions.codecs[str(exchange.compression)].kept, conditions.noise
        steps = (1 / kept + noise) / (1 + noise)
    return Expected(text, seconds, steps, is_measured=False)


def _seconds(exchange: Exchange, now: Conditions) -> float:
    """Return the predicted seconds of a step."""
    whole = now.all_reduce(_FP32 * now.elements)
    exchanged = _compressed(exchange.compression, now) if exchange.compresses else whole
    if exchange.merges:
        return now.compute + exchanged / exchange.every
    return now.compute + (exchanged if exchange.compresses else max(0.0, whole - now.hidden))


def _compressed(compression: Compression, now: Conditions) -> float:
    """Return the seconds of a compressed exchange with its codec."""
    nbytes, workers = payload_bytes(compression, now.elements), now.workers
    codec = now.codecs[str(compression)]
    if compression.is_quantised and workers > 2:
        passes = (1 + 1 / workers) * codec.encode + 2 * codec.decode
        return now.all_reduce(nbytes) + now.elements * passes
    # An all-reduce sends 2 (d - 1) / d of its vector's bytes, and gathers of payloads d - 1 payloads.
    gathered = now.latency / 2 + nbytes * now.per_byte * workers / 2
    return gathered + now.elements * (codec.encode + workers * codec.decode)
