"""The input and the interface of a data-parallel strategy.

The blocks of a model, and the block to which each parameter belongs.

A block is one of a model's repeated parts, such as a transformer layer. Its parameters are used only in its
own forward, so they can be gathered just before it. All other parameters belong to the root, and stay for the
whole of a forward.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from shoal.parallel.axes import Axes, Family
from shoal.parallel.data.bucket import Bucket, CompressedBucket, Named
from shoal.parallel.exchange.compressed_sums import Compressing
from shoal.parallel.local_shards import Cut, Frozen, Owned, fill_buckets
from shoal.parallel.offload.storage import Storage
from shoal.parallel.parameter_init import FirstValues


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive parameters of one block, or of the root.

    Attributes:
        block: Index of the block, or None for the root.
        parameters: The parameters, in the order in which the model registers them.
    """

    block: int | None
    parameters: tuple[Named, ...]


def parameter_runs(model: nn.Module, blocks: Sequence[nn.Module], names: Container[str]) -> list[Run]:
    """Cut the parameters with these names, in order, into runs that belong to one block or to the root.

    A parameter that several blocks use, or a block and the root, belongs to the root.
    """
    block_of = {id(module): index for index, block in enumerate(blocks) for module in block.modules()}
    users: dict[nn.Parameter, set[int | None]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(parameter, set()).add(block_of.get(id(module)))

    def owner(named: Named) -> int | None:
        using = users[named[1]]
        return next(iter(using)) if len(using) == 1 else None

    chosen = [named for named in model.named_parameters() if named[0] in names]
    return [Run(block, tuple(group)) for block, group in itertools.groupby(chosen, key=owner)]


@dataclass(frozen=True, slots=True)
class Group:
    """The parameters of one bucket.

    Attributes:
        blocks: Indices of the blocks that they belong to; empty for the root.
        parameters: The parameters, in the order in which backward is expected to complete them.
    """

    blocks: tuple[int, ...]
    parameters: tuple[Named, ...]


def groups_by_size(runs: Sequence[Run], capacity: int) -> list[Group]:
    """Return groups of about `capacity` bytes in backward order; blocks may share one, the root never."""
    groups = []
    for is_root, neighbours in itertools.groupby(reversed(runs), key=lambda run: run.block is None):
        items = [(run.block, named) for run in neighbours for named in reversed(run.parameters)]
        sizes = [named[1].numel() * named[1].element_size() for _, named in items]
        for indices in fill_buckets(sizes, capacity):
            chosen = [items[index] for index in indices]
            blocks = () if is_root else tuple(sorted({block for block, _ in chosen if block is not None}))
            groups.append(Group(blocks, tuple(named for _, named in chosen)))
    return groups


def groups_by_block(runs: Sequence[Run]) -> list[Group]:
    """Return one group for each run, in backward order."""
    return [
        Group(() if run.block is None else (run.block,), tuple(reversed(run.parameters)))
        for run in reversed(runs)
    ]


@dataclass(frozen=True, slots=True)
class Setup:
    """The input of a strategy.

    Attributes:
        model: The whole model; its parameters' first values come from `first_values`.
        blocks: Its repeated parts, in forward order.
        axes: The axes to communicate over.
        dtype: Type of the weights that compute.
        bucket: Bytes at which a bucket is closed.
        wire: Type in which ranks send each other gradients.
        compressing: How ranks compress gradients that they send each other; None if they do not.
        first_values: Gives the first values.
        cuts: This rank's block of each parameter that tp or ep cuts, by name.
        narrowed: Names of the parameters that are whole on every rank of `axes.tp`, each of which computes
            with a part.
        experts: Names of the parameters of experts, of which this rank has some.
        tied: Names of the parameters that the first and the last pipeline stage share, on different ranks.
        lent: Names of the parameters that another stage of this rank uses too.
        in_fp32: Names of the parameters that compute in fp32 whatever `dtype` is.
        unfilled: Names of the parameters that are not trained and whose values only `first_values` has.
        names: Names of the parameters that the strategy manages; None for all.
        entry: The module whose forward uses all these parameters; None for the model.
        storage: Where state is kept outside of the device; None if all is on it.
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    axes: Axes
    dtype: torch.dtype
    bucket: int
    first_values: FirstValues
    wire: torch.dtype = torch.float32
    compressing: Compressing | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    narrowed: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()
    tied: frozenset[str] = frozenset()
    lent: frozenset[str] = frozenset()
    in_fp32: frozenset[str] = frozenset()
    unfilled: frozenset[str] = frozenset()
    names: frozenset[str] | None = None
    entry: nn.Module | None = None
    storage: Storage | None = None

    @property
    def named(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return the parameters that the strategy manages, with their names."""
        return [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if self.names is None or name in self.names
        ]

    @property
    def families(self) -> Sequence[tuple[Family, frozenset[str]]]:
        """Return the family of each kind of trained parameters, with the names of these parameters."""
        return [(family, names) for family, _, names in self._kinds(are_trained=True)]

    def _kinds(self, *, are_trained: bool) -> Sequence[tuple[Family, torch.dtype, frozenset[str]]]:
        """Return the family and compute type of each kind of parameters, with their names."""
        kinds: dict[tuple[Family, torch.dtype], set[str]] = {}
        for name, parameter in self.named:
            if parameter.requires_grad == are_trained and parameter.is_floating_point():
                kinds.setdefault((self._family(name, parameter), self.dtype_of(name)), set()).add(name)
        return [(family, dtype, frozenset(names)) for (family, dtype), names in kinds.items()]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type that a parameter computes in."""
        return torch.float32 if name in self.in_fp32 else self.dtype

    def take_frozen(self, *, floating: bool = True) -> list[Frozen]:
        """Fill the parameters that are neither trained nor in buckets; this rank has all of each.

        Args:
            floating: Whether to take those with floating values too.
        """
        return [
            self._frozen(name, parameter)
            for name, parameter in self.named
            if not parameter.requires_grad and (floating or not parameter.is_floating_point())
        ]

    def buckets(
        self, grouped: Callable[[Sequence[Run]], Sequence[Group]], *, resident: bool, are_trained: bool = True
    ) -> list[tuple[Group, Bucket]]:
        """Return buckets of one family and type each, in the order in which backward completes them.

        The last parameter of a bucket is the one that the model registers first and that forward uses first.

        Args:
            grouped: Makes the groups of a family.
            resident: See `Bucket`.
            are_trained: Whether to take the trained parameters; if not, the floating ones that are not
                trained.
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
                    first_values=self.first_values,
                    cuts=self.cuts,
                    wire=self.wire,
                    compressing=self.compressing,
                    storage=self.storage,
                ),
            )
            for number, (family, dtype, group) in enumerate(groups)
        ]

    def _frozen(self, name: str, parameter: nn.Parameter) -> Frozen:
        if name in self.unfilled:
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            self.first_values.fill(name, parameter.data)
        cut = self.cuts.get(name)
        family = self._family(name, parameter)
        is_first = family.shard.index == 0 and family.is_first
        shape = tuple(parameter.shape) if cut is None else cut.shape
        return Frozen(name, shape, 0, parameter, cut, is_first, family)

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


class Exchanging(Protocol):
    """A compressed exchange, which goes on from what it left out before."""

    def kept(self) -> dict[str, torch.Tensor]:
        """Return what its next result on this rank depends on, by name."""

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `kept` returned."""


class Strategy(ABC):
    """A way to share the state of training among data-parallel ranks.

    After a backward, the gradients of each rank's owned parameters are averages over all data-parallel ranks.
    In a forward, the weights are those that the owners' optimizers made.

    Attributes:
        compressing: How its ranks compress gradients; None if they do not. Each strategy counts its own
            steps.
        backwards: Number of steps whose last backward has ended.
    """

    compressing: Compressing | None = None
    backwards: int = 0

    def note_step(self) -> None:
        """Count a step, after its last backward."""
        self.backwards += 1
        if self.compressing is not None:
            self.compressing.step += 1

    def exchanges(self) -> Mapping[str, CompressedBucket]:
        """Return the exchanges whose next result depends on earlier ones, by name."""
        return {}

    def set_step(self, steps: int) -> None:
        """Set the number of steps made."""
        if self.compressing is not None:
            self.compressing.step = steps

    @property
    @abstractmethod
    def owned(self) -> Sequence[Owned]:
        """Return the parts of parameters that this rank's optimizer changes."""

    @property
    @abstractmethod
    def frozen(self) -> Sequence[Frozen]:
        """Return this rank's parts of the parameters that are not trained."""

    @property
    @abstractmethod
    def stale(self) -> str | None:
        """Return why the model's own parameters differ from their owners'; None if they do not."""

    @abstractmethod
    def start_step(self) -> None:
        """Begin the gathers for the first forward of a step; optional, as that forward would begin them."""

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Make backward add to the gradients, with as little communication as the strategy allows."""

    @property
    @abstractmethod
    def keeps_sums(self) -> bool:
        """Whether gradients are added up whole over micro-batches, and reduced once."""

    @abstractmethod
    def hold(self) -> AbstractContextManager[None]:
        """Make backward add to the gradients without communication, at any cost in memory."""

    @abstractmethod
    def start_reduction(self) -> None:
        """Begin to reduce the gradients that backwards within `hold` added up."""

    @abstractmethod
    def finish_reduction(self) -> None:
        """End the reductions that `start_reduction` began, as a backward would."""

    @abstractmethod
    def call_hooks(self) -> None:
        """Call users' hooks on parameters, once gradients are final.

        The last backward of a step does it, except in a pipeline, whose stages may share parameters.
        """

    @abstractmethod
    def gathered(self) -> AbstractContextManager[None]:
        """Keep every parameter of the model whole and up to date while this context lasts."""

    @abstractmethod
    def unchanged(self) -> AbstractContextManager[None]:
        """Promise that owned parameters do not change within it, so that forwards need not gather weights."""

    @abstractmethod
    def clear(self) -> None:
        """Forget accumulated gradients that were not yet given to the owned parameters."""

    @abstractmethod
    def changed(self) -> None:
        """Note that owned parameters were changed other than after a backward; callers must report this."""


@contextmanager
def in_all(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """Enter the contexts of all strategies."""
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield
