"""Recompute: what a block's backward computes again, and in how many blocks.

The text form is a policy, `none`, `selective` or `full`, for all blocks, or with a number of the model's
blocks, such as `full:8`. A pipeline stage has its share of them, rounded up: `block_choices` says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shoal.errors import PlanError
from shoal.plan.choices import CHOICES, require_choice


@dataclass(frozen=True, slots=True)
class Recompute:
    """What is computed again, and where.

    Attributes:
        policy: none, selective or full.
        blocks: Number of the model's blocks; None for all.
    """

    policy: str
    blocks: int | None = None

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Read the text form.

        Raises:
            PlanError: There is no such policy, or the number is not one above 0.
        """
        return _parsed(text)

    def count(self, blocks: int, every: int) -> int:
        """Return how many blocks of a stage have the policy.

        Args:
            blocks: The stage's blocks.
            every: The model's blocks.
        """
        if self.blocks is None:
            return blocks
        return share_of_blocks(self.blocks, blocks, every)


def share_of_blocks(number: int, blocks: int, every: int) -> int:
    """Return a stage's share of a number of the model's blocks, rounded up.

    Args:
        number: The number of the model's blocks.
        blocks: The stage's blocks.
        every: The model's blocks.
    """
    return min(blocks, -(-number * blocks // every)) if every else 0


@lru_cache(maxsize=256)
def _parsed(text: str) -> Recompute:
    policy, colon, number = text.partition(":")
    if not colon or policy not in CHOICES["recompute"]:
        require_choice("recompute", policy)
        return Recompute(policy)
    if policy == "none" or not number.isdecimal() or int(number) == 0:
        raise PlanError(
            f"recompute={text} does not say in how many blocks what is computed again",
            possible="selective or full, alone or with a number of blocks above 0, such as full:8",
            change="write, for example, recompute=full:8",
        )
    return Recompute(policy, int(number))
