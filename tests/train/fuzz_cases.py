"""Random trainings: a model, data, an optimizer, one or two Plans, and when the state is saved and loaded.

A case is a function of its number. `draw_cases` chooses each among random candidates for the pairs of
settings that it meets first; once all are met, for the triples. A pair that no candidate can have, such as
exchange=naive with zero3, becomes a case too, which has to be refused by a named error.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import PlanError
from shoal.spec.plan import Plan, SettledPlan

__all__ = ["BATCH", "SEQUENCE", "STEPS", "Case", "all_pairs", "draw_cases", "pairs_of"]

BATCH, STEPS, SEQUENCE = 8, 6, 16

_MIXED = "masked packed"
_AXES = {
    "dp": "",
    "tp plain": "tp=2,tensor=plain",
    "tp sequence": "tp=2",
    "pp 1f1b": "pp=2",
    "pp zb-h1": "pp=2,schedule=zb-h1",
    "pp interleaved": "pp=2,schedule=interleaved",
    "cp ring": "cp=2",
    "cp ulysses": "cp=2,context=ulysses",
    "ep": "ep=2",
    "tp and pp": "tp=2,pp=2",
    "tp and cp": "tp=2,cp=2",
    "pp and cp": "pp=2,cp=2",
}
_SHARDS = {
    "none": "",
    "zero1": "shard=zero1",
    "zero2": "shard=zero2",
    "zero3": "shard=zero3",
    "zero3-once": "shard=zero3-once",
    "zero1 in replicas": "shard=zero1,replicate=2",
    "zero3 in replicas": "shard=zero3,replicate=2",
}
_CODECS = ["int8", "int4", "fp8", "sign", "topk:4", "topk:4:2bit", "random:4", "threshold:1", "powersgd:64"]
_LOSSES = {"none": 0.0, "int8": 0.1, "fp8": 0.2, "int4": 0.6}
"""What of a step these leave for later ones, at most; others leave most of it."""

_OF_NORMALISED = 4
"""How many times as much, where an element moves as far by a small gradient, which rounds to 0, as by any."""

_EXCHANGES = {
    "each step": [""],
    "naive": ["exchange=naive"],
    "compressed": [f"compress={codec}" for codec in _CODECS]
    + ["compress=topk:4,feedback=0.5", "compress=int8,dense=3"],
    "local": ["exchange=local,every=1", "exchange=local,every=2", "exchange=local,every=3"],
    "local, dense first": ["exchange=local,every=2,dense=1", "exchange=local,every=2,dense=3"],
    "local, stretched": ["exchange=local,every=1,stretch=3"],
    "local, fragments": [
        "exchange=local,every=2,fragments=2",
        "exchange=local,every=3,fragments=3",
        "exchange=local,every=4,fragments=3",
    ],
    "local, late": ["exchange=local,every=2,delay=1", "exchange=local,every=3,delay=2"],
    "local, late fragments": ["exchange=local,every=4,fragments=2,delay=1"],
    "local, compressed": [f"exchange=local,every=2,compress={codec}" for codec in _CODECS]
    + ["exchange=local,every=4,fragments=2,compress=int8", "exchange=local,every=3,delay=1,compress=topk:4"],
    "server": ["exchange=server", "exchange=server,servers=2"],
    "server, local": ["exchange=local,servers=1,every=2", "exchange=local,servers=2,every=3"],
}
_MODELS = ("llama of Shoal", "tied", "experts", "user's", "hugging face")

LEVELS: Mapping[str, tuple[str, ...]] = {
    "axes": tuple(_AXES),
    "shard": tuple(_SHARDS),
    "exchange": tuple(_EXCHANGES),
    "data": ("plain", "masked", "packed", _MIXED),
    "save": ("none", "goes on", "same Plan", "other Plan"),
    "model": _MODELS,
    "microbatch": ("1", "2"),
    "recompute": ("none", "selective", "full"),
    "bucket": ("small", "whole"),
    "optimizer": ("adamw", "sgd"),
    "clip": ("off", "on"),
}
"""The settings of a case, with their values."""

_WEAK = ("model", "microbatch", "recompute", "bucket", "optimizer", "clip")


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        number: Its number, which determines the rest.
        settings: A value of each of `LEVELS`.
        plan: The Plan that it begins with.
        other: The Plan that it goes on with after a load; "" for none.
        saved: Steps made before the save; 0 for none.
        outer: Learning rate and momentum of outer steps, and the rounds in which the momentum grows.
        refused: Why the settings are expected not to fit; "" if as far as Plans know they do.
    """

    number: int
    settings: Mapping[str, str]
    plan: str
    other: str = ""
    saved: int = 0
    outer: tuple[float, float, int] = (0.7, 0.9, 2)
    refused: str = ""

    @property
    def model(self) -> str:
        """The kind of model."""
        return self.settings["model"]

    @property
    def data(self) -> str:
        """The kind of data."""
        return self.settings["data"]

    @property
    def is_compressed(self) -> bool:
        """Whether what is exchanged is not what one process would compute, to rounding."""
        plans = [Plan.parse(each) for each in (self.plan, self.other) if each]
        return any(each.compress not in ("none", "powersgd:64") for each in plans)

    @property
    def loss_of_codec(self) -> float:
        """Distance from a training without compression, at most, as a share of the distance that it went."""
        plans = [Plan.parse(each) for each in (self.plan, self.other) if each]
        left = max(_LOSSES.get(each.exchanged.compression.kind, 1.0) for each in plans)
        return min(1.0, left * _OF_NORMALISED) if self.settings["optimizer"] == "adamw" else left

    def __str__(self) -> str:
        return (
            f"{self.number}: {self.model}, {self.data}, {self.settings['optimizer']}, "
            f"clip {self.settings['clip']}, {self.plan}"
            + (f", saved after {self.saved} ({self.settings['save']})" if self.saved else "")
            + (f", then {self.other}" if self.other and self.other != self.plan else "")
        )


def pairs_of(settings: Mapping[str, str]) -> set[tuple[str, str, str, str]]:
    """Return the pairs of settings that have to be met: those of Plan, exchange, data and save."""
    return {
        (one, settings[one], other, settings[other])
        for one, other in itertools.combinations(LEVELS, 2)
        if one not in _WEAK or other not in _WEAK
    }


def all_pairs() -> set[tuple[str, str, str, str]]:
    """Return all pairs of settings that have to be met."""
    return {
        (one, first, other, second)
        for one, other in itertools.combinations(LEVELS, 2)
        if one not in _WEAK or other not in _WEAK
        for first in LEVELS[one]
        for second in LEVELS[other]
    }


def draw_cases(count: int, seed: int = 0) -> list[Case]:
    """Draw cases that meet pairs of settings as early as possible, and then triples."""
    chance = random.Random(seed)
    missing = all_pairs()
    met: set[tuple[tuple[str, str], ...]] = set()
    cases: list[Case] = []

    def news(case: Case) -> tuple[bool, int]:
        new = pairs_of(case.settings) & missing if missing else _triples_of(case.settings) - met
        return not case.refused, len(new)

    while len(cases) < count:
        wanted = chance.choice(sorted(missing)) if missing else None
        best = max((_candidate(len(cases), chance, wanted) for _ in range(60)), key=news)
        cases.append(best)
        missing -= pairs_of(best.settings)
        met |= _triples_of(best.settings)
    return cases


def _triples_of(settings: Mapping[str, str]) -> set[tuple[tuple[str, str], ...]]:
    return set(itertools.combinations(settings.items(), 3))


def _candidate(number: int, chance: random.Random, wanted: tuple[str, str, str, str] | None) -> Case:
    settings = {name: chance.choice(values) for name, values in LEVELS.items()}
    if wanted is not None:
        settings |= {wanted[0]: wanted[1], wanted[2]: wanted[3]}
    if settings["axes"] == "ep" and (wanted is None or "model" not in wanted):  # else it is refused
        settings["model"] = "experts"
    plan, refused = _plan(settings, chance)
    saved = 0 if settings["save"] == "none" else chance.randrange(1, STEPS)
    other = ""
    if settings["save"] == "same Plan":
        other = plan
    if settings["save"] == "other Plan":
        for _ in range(40):
            second = {name: chance.choice(LEVELS[name]) for name in LEVELS} | {
                name: settings[name] for name in ("model", "data", "optimizer", "clip")
            }
            other, reason = _plan(second, chance)
            if not reason and other != plan and not _is_served_apart(other):
                break
    if saved and not refused and _is_served_apart(plan):
        every = Plan.parse(plan).every
        saved = max(every, saved // every * every)
        saved = min(saved, STEPS - every)
    outer = chance.choice([(0.7, 0.9, 2), (1.0, 0.0, 0), (0.7, 0.5, 0)])
    return Case(number, settings, plan, other, saved, outer, refused)


def _is_served_apart(plan: str) -> bool:
    return "servers" in plan and "exchange=local" in plan


def _plan(settings: Mapping[str, str], chance: random.Random) -> tuple[str, str]:
    """Return a Plan's text, and why it does not fit; "" if it does."""
    axes, shard = _AXES[settings["axes"]], _SHARDS[settings["shard"]]
    exchange = chance.choice(_EXCHANGES[settings["exchange"]])
    degrees = dict(each.split("=") for each in axes.split(",") if each)
    ranks = int(degrees.get("tp", 1)) * int(degrees.get("pp", 1)) * int(degrees.get("cp", 1))
    most = 4 // ranks
    dp = chance.choice([each for each in (1, 2, 4) if each <= most])
    if dp == 1 and (exchange or shard or "ep" in degrees):
        dp = most
    parts = [f"dp={dp}", axes, shard, exchange, f"microbatch={settings['microbatch']}"]
    if settings["recompute"] != "none":
        parts.append(f"recompute={settings['recompute']}")
    if settings["bucket"] == "small":
        parts.append("bucket=4096")
    text = ",".join(part for part in parts if part)
    try:
        plan = Plan.parse(text)
        settled = SettledPlan.of(plan, BATCH)
        if plan.pp > 1:
            plan.require_micro_batches(settled.microbatches_of(BATCH))
        if plan.ep > 1 and settings["model"] != "experts":
            return text, "the model has no experts"
        if (plan.tp > 1 or plan.pp > 1) and settings["model"] == "user's":
            return text, "the model has no layers that Shoal knows"
        if plan.replicas == 1 and (plan.exchanged.merges or plan.exchanged.is_served):
            return text, "there is one worker"
        if plan.ranks == 1 and exchange:
            return text, "there is one worker"
    except PlanError as error:
        return text, str(error)
    return text, ""
