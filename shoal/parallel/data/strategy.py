"""What a data-parallel strategy is given, and what it offers to the one who trains with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.parallel.axes import Axes, Family
from shoal.parallel.data.blocks import Group, Run, parameter_runs
from shoal.parallel.data.bucket import Bucket, Fill
from shoal.parallel.layout import Cut
from shoal.parallel.owned import Frozen, Owned

__all__ = ["Setup", "Strategy"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a strategy is given.

    Attributes:
        model: The whole model; its parameters' first values come from `fill`.
        blocks: Its repeated parts, in forward order.
        axes: What to communicate over.
        dtype: Type of the weights that compute.
        bucket: Bytes at which a bucket is closed.
        fill: Gives the first values.
        cuts: Of the parameters of which this rank has a block, which one; by name.
        narrowed: Names of the parameters that are whole on every rank of `axes.tp`, each of which computes
            with a part.
        experts: Names of the parameters of experts, of which this rank has some.
        tied: Names of the parameters that the first and the last pipeline stage share, on different ranks.
        lent: Names of the parameters that another stage of this rank uses too.
        in_fp32: Names of the parameters that compute in fp32 whatever `dtype` is.
        names: Names of the model's parameters that the strategy is for; None for all.
        entry: The module whose forward is that of all these parameters; None for the model.
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    axes: Axes
    dtype: torch.dtype
    bucket: int
    fill: Fill
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    narrowed: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    lent: frozenset[str] = frozenset()
    in_fp32: frozenset[str] = frozenset()
    names: frozenset[str] | None = None
    entry: nn.Module | None = None

    @property
    def named(self) -> Sequence[tuple[str, nn.Parameter]]:
        """The parameters that the strategy is for."""
        return [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if self.names is None or name in self.names
        ]

    @property
    def families(self) -> Sequence[tuple[Family, frozenset[str]]]:
        """What trained parameters are kept over, with the names of these parameters."""
        return [(family, names) for family, _, names in self._kinds(are_trained=True)]

    def _kinds(self, *, are_trained: bool) -> Sequence[tuple[Family, torch.dtype, frozenset[str]]]:
        """What parameters are kept over, and the type that they compute in, with their names."""
        kinds: dict[tuple[Family, torch.dtype], set[str]] = {}
        for name, parameter in self.named:
            if parameter.requires_grad == are_trained and parameter.is_floating_point():
                kinds.setdefault((self._family(name, parameter), self.dtype_of(name)), set()).add(name)
        return [(family, dtype, frozenset(names)) for (family, dtype), names in kinds.items()]

    def dtype_of(self, name: str) -> torch.dtype:
        """The type that a parameter computes in."""
        return torch.float32 if name in self.in_fp32 else self.dtype

    @property
    def frozen(self) -> Sequence[Frozen]:
        """What this rank has of the parameters that are not trained and not in buckets: all of them."""
        return [
            self._frozen(name, parameter) for name, parameter in self.named if not parameter.requires_grad
        ]

    def buckets(
        self, grouped: Callable[[Sequence[Run]], Sequence[Group]], *, resident: bool, are_trained: bool = True
    ) -> list[tuple[Group, Bucket]]:
        """Parameters in buckets, each of one family and type, in the order in which backward ends them.

        A bucket ends with its parameter that the model registers first, and forward uses first.

        Args:
            grouped: Makes the groups of a family.
            resident: See `Bucket`.
            are_trained: Whether of the parameters that are trained, or of the floating ones that are not.
        """
        groups = [
            (family, dtype, group)
            for family, dtype, names in self._kinds(are_trained=are_trained)
            for group in grouped(parameter_runs(self.model, self.blocks, names))
        ]
        position = {name: index for index, (name, _) in enumerate(self.named)}
        groups.sort(key=lambda each: min(position[name] for name, _ in each[2].parameters), reverse=True)
        return [
            (
                group,
                Bucket(
                    f"bucket {number}" if are_trained else f"frozen bucket {number}",
                    group.parameters,
                    family=family,
                    dtype=dtype,
                    resident=resident,
                    fill=self.fill,
                    cuts=self.cuts,
                ),
            )
            for number, (family, dtype, group) in enumerate(groups)
        ]

    def _frozen(self, name: str, parameter: nn.Parameter) -> Frozen:
        cut = self.cuts.get(name)
        family = self._family(name, parameter)
        is_first = family.shard.index == 0 and family.is_first
        shape = tuple(parameter.shape) if cut is None else cut.shape
        return Frozen(name, shape, 0, parameter.detach(), cut, is_first)

    def _family(self, name: str, parameter: nn.Parameter) -> Family:
        axes = self.axes
        if name in self.experts:
            return axes.experts
        dense, partial, whole = (
            axes.between_ends if name in self.tied else (axes.dense, axes.partial, axes.whole)
        )
        if parameter.dim() == 0 and axes.uncut is not None and name not in self.tied:
            return axes.uncut
        if axes.tp.size == 1 or name in self.cuts:
            return dense
        return partial if name in self.narrowed else whole


class Strategy(ABC):
    """A way to share the states of training among data-parallel ranks.

    After a backward, the gradients of what each rank owns are averages over all data-parallel ranks; in a
    forward, the weights are what all owners' optimizers made of them.
    """

    @property
    @abstractmethod
    def owned(self) -> Sequence[Owned]:
        """What this rank's optimizer changes."""

    @property
    @abstractmethod
    def frozen(self) -> Sequence[Frozen]:
        """What this rank has of the parameters that are not trained."""

    @property
    @abstractmethod
    def stale(self) -> str | None:
        """Why the model's own parameters are not what their owners have; None if they are."""

    @abstractmethod
    def start_step(self) -> None:
        """Begins what the first forward of a step will wait for; not needed, as that would begin it too."""

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Within it, backward adds to the gradients and communicates no more than the strategy must."""

    @property
    @abstractmethod
    def keeps_sums(self) -> bool:
        """Whether gradients are added up whole over micro-batches, and reduced once."""

    @abstractmethod
    def hold(self) -> AbstractContextManager[None]:
        """Within it, backward adds to the gradients and communicates none, whatever memory that takes."""

    @abstractmethod
    def start_reduction(self) -> None:
        """Begins to reduce what backwards within `hold` added up."""

    @abstractmethod
    def finish_reduction(self) -> None:
        """Ends what `start_reduction` began, as a backward would."""

    @abstractmethod
    def gathered(self) -> AbstractContextManager[None]:
        """Within it, every parameter of the model is whole and up to date."""

    @abstractmethod
    def unchanged(self) -> AbstractContextManager[None]:
        """Within it nobody changes what is owned, so that weights need not be gathered in every forward."""

    @abstractmethod
    def clear(self) -> None:
        """Forgets gradients that were accumulated and not yet given to what is owned."""

    @abstractmethod
    def changed(self) -> None:
        """To be called when owned parameters were changed other than after a backward."""
