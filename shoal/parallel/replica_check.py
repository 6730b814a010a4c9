"""Comparison of the bits that replicas hold: finds a rank whose memory or device changes values silently.

Ranks that hold the same parameters make the same updates from the same summed gradients, so that their bits
are equal. Each rank adds up the bits of what it holds, and tells its replicas one number of 64 bits. If these
differ, the ranks tell one number for each parameter: the first that differs is named, and the ranks that
depart from the majority.

Parameters are compared where they lie: the owners' fp32 values among the ranks that step together; weights
that compute, where they are copies, among the ranks that gathered them; parameters that are not trained among
all that hold them. Not compared are weights that are gathered for one block and freed, parameters in files,
and the optimizer's state, whose damage shows in the parameters of the next step.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from shoal.errors import CommunicationError, ReplicaError
from shoal.parallel.communication import Axis
from shoal.parallel.local_shards import checksum, combined
from shoal.parallel.parallel import Parallel

Held = tuple[Axis, str, torch.Tensor]
"""Ranks that hold equal values, the parameter's name, and this rank's values."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Replicas that hold different bits.

    Attributes:
        name: The first parameter that differs.
        ranks: The ranks that depart from the majority; empty if there is no majority.
        replicas: All ranks that were compared.
    """

    name: str
    ranks: tuple[int, ...]
    replicas: tuple[int, ...]

    def __str__(self) -> str:
        if not self.ranks:
            return f"ranks {_named(self.replicas)} should hold the same {self.name}, and hold different bits"
        others = [rank for rank in self.replicas if rank not in self.ranks]
        who = f"rank {self.ranks[0]} holds" if len(self.ranks) == 1 else f"ranks {_named(self.ranks)} hold"
        return f"{who} other bits of {self.name} than rank{'s' * (len(others) > 1)} {_named(others)}"


@final
class Replicas:
    """Compares what this rank holds with its replicas; all ranks call each method together.

    Args:
        parallel: The model.
        every: Steps between comparisons of weights that compute; 0 for no comparison at all.
    """

    def __init__(self, parallel: Parallel, every: int) -> None:
        self._parallel = parallel
        self._every = every
        # Looked up once: the model gathers its weights for whoever asks it for parameters.
        self._keeps_weights = not parallel.plan.sharding.cuts_weights
        self._weights = dict(parallel.module.named_parameters()) if self._keeps_weights else {}
        self._equal_after: int | None = None

    def compare_if_due(self, steps: int) -> None:
        """Compare all, between a backward and the optimizer's step, if that is due; see `require_equal`."""
        if self._every and steps % self._every == 0:
            self.require_equal(steps, computing=True)

    def compare_to_save(self, steps: int) -> None:
        """Compare what a checkpoint will hold, unless no comparison is wanted; see `require_equal`."""
        if self._every:
            self.require_equal(steps, computing=False)

    def require_equal(self, steps: int, *, computing: bool) -> None:
        """Return if all replicas are equal.

        Args:
            steps: Steps made so far.
            computing: Whether to compare weights that compute too; they are equal after a backward, until the
                optimizer's step.

        Raises:
            ReplicaError: This rank departs from the majority, or there is none.
            CommunicationError: Another rank departs, so that this one cannot go on with it.
        """
        found = self.departure(computing=computing)
        if found is None:
            self._equal_after = steps
            return
        before = (
            "no comparison before it found them equal"
            if self._equal_after is None
            else f"they were equal after step {self._equal_after}"
        )
        text = (
            f"{found}, after step {steps}: a memory, a device or a link changed values silently, or ranks "
            f"compute on unlike devices; {before}"
        )
        world = self._parallel.axes.world
        if found.ranks and world.members[world.index] not in found.ranks:
            raise CommunicationError(text)
        raise ReplicaError(f"{text} (host {socket.gethostname()})")

    def departure(self, *, computing: bool) -> Departure | None:
        """Return how replicas of what this rank holds differ; None if they are equal."""
        by_members: dict[tuple[int, ...], tuple[Axis, list[tuple[str, torch.Tensor]]]] = {}
        for axis, name, tensor in self._held(computing=computing):
            if axis.size > 1:
                by_members.setdefault(axis.members, (axis, []))[1].append((name, tensor))
        found = None
        for members in sorted(by_members):  # one order on all ranks, so that none waits in a circle
            found = _compare(*by_members[members]) or found
        return found

    def _held(self, *, computing: bool) -> Iterator[Held]:
        parallel = self._parallel
        for owned in parallel.owned:
            family = owned.family
            if parallel.plan.tiers.parameters != "file":
                yield family.summed, owned.name, owned.local
                if family.tied_ranks is not None:
                    yield family.tied_ranks, owned.name, owned.local
            copy = self._weights.get(owned.name) if computing else None
            if copy is not None and copy.data_ptr() != owned.local.data_ptr():
                yield family.summed, owned.name, copy
            if copy is not None:
                yield family.shard, owned.name, copy
        for frozen in parallel.frozen:
            yield frozen.family.replicate, frozen.name, frozen.local
            if self._keeps_weights or not frozen.local.is_floating_point():
                yield frozen.family.shard, frozen.name, frozen.local


def _compare(axis: Axis, held: Sequence[tuple[str, torch.Tensor]]) -> Departure | None:
    """Compare what the ranks of an axis hold."""
    sums = torch.stack([checksum(tensor) for _, tensor in held])
    told = _gathered(axis, combined(sums).view(1))
    classes = Counter(told)
    if len(classes) == 1:
        return None
    (common, count), *_ = classes.most_common(1)
    has_majority = 2 * count > axis.size
    departed = tuple(
        rank for rank, each in zip(axis.members, told, strict=True) if has_majority and each != common
    )
    of_each = list(zip(*[iter(_gathered(axis, sums))] * len(held), strict=True))  # by rank
    first = next(
        (
            name
            for (name, _), column in zip(held, zip(*of_each, strict=True), strict=True)
            if len(set(column)) > 1
        ),
        "a parameter",
    )
    return Departure(first, departed, axis.members)


def _gathered(axis: Axis, mine: torch.Tensor) -> list[int]:
    """Return the numbers of all ranks of an axis, one rank's after another's."""
    everyone = mine.new_empty(axis.size * len(mine))
    everyone.view(axis.size, -1)[axis.index] = mine
    axis.all_gather(everyone, "replicas").wait()
    numbers: list[int] = everyone.tolist()
    return numbers


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
