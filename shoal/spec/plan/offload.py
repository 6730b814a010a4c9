"""Memory tiers: the parts of a rank's state that are kept outside of its device, and where.

The text form joins parts by `+`, each with its place: `optimizer:file+gradients:file+parameters:file`.

    optimizer    the optimizer's state of each element, such as Adam's moments
    gradients    shards of the sums of gradients
    parameters   shards of the parameters, from which each block gathers its weights
    activations  what the blocks' forwards save for backward; with a number, such as activations:file:8, that
                 of so many of the model's blocks

The optimizer reads and writes the first three block by block, so gradients and parameters go with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from shoal.errors import PlanError, nearest
from shoal.spec.plan.allowed_values import share_of_blocks
from shoal.spec.plan.sharding import Sharding

PLACES: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("host", "file"),
    "gradients": ("file",),
    "parameters": ("file",),
    "activations": ("file",),
}
"""The places of each part, beside the device."""

OFFLOADED = "none"
"""The text form if everything is on the device."""

GRANULE = 4096
"""Elements at whose multiples blocks begin: pages of 4 KiB, for elements of one byte or more."""

BLOCK_ELEMENTS = 512 * GRANULE
"""Elements of a block: 8 MiB of each array in fp32."""

BUFFERS = 3
"""Blocks in memory: one is read, one updated, one written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """The place of each part of a rank's state: `device`, `host` (the host's memory) or `file`.

    Attributes:
        optimizer: The place of the optimizer's state.
        gradients: The place of the shards of gradients.
        parameters: The place of the shards of parameters.
        activations: The place of what blocks save for backward.
        blocks: Number of the model's blocks whose activations are in that place; None for all.
    """

    optimizer: str = "device"
    gradients: str = "device"
    parameters: str = "device"
    activations: str = "device"
    blocks: int | None = None

    @classmethod
    def parse(cls, text: str) -> Tiers:
        """Read the text form.

        Raises:
            PlanError: A part or a place does not exist, or a part is given twice.
        """
        return DEVICE if text == OFFLOADED else _parsed(text)

    def __str__(self) -> str:
        text = "+".join(f"{part}:{place}" for part, place in self.moved.items()) or OFFLOADED
        return text if self.blocks is None else f"{text}:{self.blocks}"  # activations are the last part

    @property
    def moved(self) -> dict[str, str]:
        """Return the place of each part that is not on the device."""
        places = {part: getattr(self, part) for part in PLACES}
        return {part: place for part, place in places.items() if place != "device"}

    def stored_blocks(self, blocks: int, every: int) -> int:
        """Return how many blocks of a pipeline stage have activations in a file.

        Args:
            blocks: The stage's blocks.
            every: The model's blocks.
        """
        if self.activations == "device":
            return 0
        return blocks if self.blocks is None else share_of_blocks(self.blocks, blocks, every)

    @property
    def has_files(self) -> bool:
        """Whether a part is kept in files."""
        return "file" in self.moved.values()

    @property
    def of_cpu(self) -> Tiers:
        """Return these places for a rank on a CPU, where the host's memory is the device's."""
        return replace(self, optimizer="device") if self.optimizer == "host" else self

    def takes(self, sharding: Sharding) -> bool:
        """Return whether a sharding can have its state in these places: see `require`."""
        cuts_both = sharding.cuts_gradients and sharding.cuts_weights
        return (self.gradients == "device" or cuts_both) and (
            self.parameters == "device" or sharding.cuts_weights
        )

    def require(self, sharding: Sharding, exchange: str) -> Tiers:
        """Return these places, once it is checked that a Plan's sharding and exchange can have state there.

        Raises:
            PlanError: They cannot.
        """
        given = f"offload={self}"
        if exchange != "bucketed":
            raise PlanError(
                f"{given} was given with exchange={exchange}, whose own state stays in memory",
                possible="offload with exchange=bucketed",
                change="leave out offload, or leave out exchange",
            )
        if self.optimizer != "file" and not {"gradients", "parameters"}.isdisjoint(self.moved):
            raise PlanError(
                f"{given} was given, and the optimizer would hold its state in memory for all parameters",
                possible="gradients and parameters in files together with the optimizer's state",
                change=f"write offload={replace(self, optimizer='file')}",
            )
        if self.gradients != "device" and not (sharding.cuts_gradients and sharding.cuts_weights):
            raise PlanError(
                f"{given} was given with shard={sharding.name}, which sums whole gradients in memory",
                possible="gradients in files with shard=zero3, on one rank too",
                change="write shard=zero3, or offload the optimizer's state alone",
            )
        if self.parameters != "device" and not sharding.cuts_weights:
            raise PlanError(
                f"{given} was given with shard={sharding.name}, where every rank keeps whole weights",
                possible="parameters in files with shard=zero3 or zero3-once, on one rank too",
                change="write shard=zero3, or offload the optimizer's state alone",
            )
        return self


DEVICE = Tiers()
"""All state on the device."""


@lru_cache(maxsize=1 << 10)
def _parsed(text: str) -> Tiers:
    places: dict[str, str] = {}
    blocks = None
    for item in text.split("+"):
        part, _, place = (word.strip() for word in item.partition(":"))
        if part == "activations" and ":" in place:
            place, _, number = (word.strip() for word in place.partition(":"))
            blocks = _number(text, number)
        if part not in PLACES or place not in PLACES[part] or part in places:
            is_known = part in PLACES
            guess = nearest(place, PLACES[part]) if is_known else nearest(part, PLACES)
            raise PlanError(
                f"offload={text} holds {item!r}, which {'is there twice' if part in places else 'is no part'}"
                f" with a place{'' if part in places else guess}",
                possible="; ".join(f"{name}:{' or '.join(where)}" for name, where in PLACES.items())
                + "; several are joined by +",
                change="write, for example, offload=optimizer:file",
            )
        places[part] = place
    return Tiers(**places, blocks=blocks)


def _number(text: str, number: str) -> int:
    if not number.isdecimal() or int(number) == 0:
        raise PlanError(
            f"offload={text} does not say for how many blocks activations are in files",
            possible="activations:file, alone or with a number of blocks above 0, such as activations:file:8",
            change="write, for example, offload=activations:file:8",
        )
    return int(number)
