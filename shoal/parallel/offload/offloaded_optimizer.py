"""An optimizer whose state is outside of the device: its step passes over the parameters block by block.

For each block the state is read ahead, another optimizer makes the step of the block's elements on the CPU,
and the state is written behind. Gradients and parameters come from where they are: from files with the state,
from the CPU's memory in place, from a GPU by copies, back to which the new values go. With N elements and
Adam's two moments in files, a step reads 8 N bytes and writes 8 N; with gradients in files it reads 4 N more,
and with parameters it reads and writes 4 N more. Results are those of the other optimizer, bit for bit.

The blocks in which an optimizer passes over the parameters of a rank.

A rank's parameters lie one after another in packs: those of each stored shard, and all others. A pack is cut
into blocks of equal size, so that a large parameter lies in several. A part of a parameter begins at a
multiple of 16 elements, so that vectorised kernels treat its elements as in the whole parameter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.errors import CheckpointError, ConfigError, LayoutError
from shoal.parallel.local_shards import ALIGNMENT, Owned, like, local_part
from shoal.parallel.offload.storage import HostSegment, Segment, Storage, StoredShard, aligned_buffer
from shoal.parallel.optimizer.joined_optimizers import (
    Composed,
    OptimizerPart,
    copy_settings,
    loss_of,
    title_of,
)
from shoal.parallel.parallel import Parallel
from shoal.spec.plan import BLOCK_ELEMENTS, BUFFERS, GRANULE


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of a parameter in a block.

    Attributes:
        owned: The parameter.
        first: Its first element in the block, in the flattened part of this rank.
        stop: End of these elements.
        at: Place of the first one in the block.
    """

    owned: Owned
    first: int
    stop: int
    at: int

    @property
    def is_last(self) -> bool:
        """Whether the parameter ends here."""
        return self.stop == self.owned.local.numel()


@dataclass(frozen=True, slots=True)
class Pack:
    """Parameters that lie one after another.

    Attributes:
        places: The parameters, with their first elements in the pack.
        elements: Length of the pack.
        shard: The stored shard that they lie in; None if they are in memory.
    """

    places: Sequence[tuple[Owned, int]]
    elements: int
    shard: StoredShard | None = None

    def blocks(self, capacity: int) -> Iterator[tuple[int, int, tuple[Part, ...]]]:
        """Yield first element, number of elements and parts of each block of up to `capacity` elements."""
        for first in range(0, self.elements, capacity):
            stop = min(first + capacity, self.elements)
            parts = []
            for owned, offset in self.places:
                begin, end = max(first, offset), min(stop, offset + owned.local.numel())
                if begin < end:
                    parts.append(Part(owned, begin - offset, end - offset, begin - first))
            if parts:
                yield first, stop - first, tuple(parts)


def packs_of(owned: Sequence[Owned]) -> list[Pack]:
    """Return the packs of a rank's parameters, in their order; those of no elements are left out."""
    stored: dict[int, tuple[StoredShard, list[tuple[Owned, int]]]] = {}
    places: list[tuple[Owned, int]] = []
    end = 0
    for each in owned:
        if not each.local.numel():
            continue
        if each.stored is not None:
            shard = each.stored.shard
            stored.setdefault(id(shard), (shard, []))[1].append((each, each.stored.offset))
            continue
        places.append((each, end))
        end += -(-each.local.numel() // ALIGNMENT) * ALIGNMENT
    packs = [Pack(held, shard.elements, shard) for shard, held in stored.values()]
    return [*packs, Pack(places, end)] if places else packs


_ROWS, _COLUMNS = 8, 16
_STEPS = 2


def element_states(
    make: Callable[..., Optimizer], settings: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> dict[str, torch.dtype]:
    """Return the names and types of the states that an optimizer keeps for each element.

    Args:
        make: Makes the optimizer, from groups and options.
        settings: The settings of each of its groups.
        options: Its options.

    Raises:
        ConfigError: It cannot make its step from parts of a parameter, one part after another.
    """
    found: dict[str, torch.dtype] = {}
    for each in settings:
        try:
            whole, states = _trained(make, each, options, parts=1)
            parts, _ = _trained(make, each, options, parts=2)
        except Exception as error:
            raise _refused(make, f"it raised {type(error).__name__}: {error}") from error
        if not torch.equal(whole, parts):
            raise _refused(make, "a matrix gets other values when it is updated in two parts")
        found.update(states)
    return found


def _trained(
    make: Callable[..., Optimizer], settings: Mapping[str, Any], options: Mapping[str, Any], *, parts: int
) -> tuple[torch.Tensor, dict[str, torch.dtype]]:
    """Return a matrix after some steps, whole or as flat parts in turn, and its states for each element."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(_ROWS, _COLUMNS, generator=generator)
    held = [nn.Parameter(part, requires_grad=False) for part in _cut(value, parts)]
    optimizer = make([{**settings, "params": held}], **options)
    for _ in range(_STEPS):
        gradient = torch.randn(_ROWS, _COLUMNS, generator=generator)
        for parameter, part in zip(held, _cut(gradient, parts), strict=True):
            parameter.grad = part
            optimizer.param_groups[0]["params"] = [parameter]
            optimizer.step()
    states = {
        key: state.dtype
        for key, state in optimizer.state[held[0]].items()
        if isinstance(state, torch.Tensor) and state.shape == held[0].shape
    }
    return value, states


def _cut(matrix: torch.Tensor, parts: int) -> Sequence[torch.Tensor]:
    """Return the matrix, or flat parts of it that share its memory."""
    return [matrix] if parts == 1 else matrix.view(-1).split(matrix.numel() // parts)


def _refused(make: Callable[..., Optimizer], reason: str) -> ConfigError:
    return ConfigError(
        f"{getattr(make, '__name__', repr(make))} cannot have its state offloaded: {reason}",
        possible="optimizers that change each element by itself, such as adamw, lion, or sgd with momentum",
        change="choose such an optimizer, or leave out offload",
    )


_Of = TypeVar("_Of")
_Buffers = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Block(Generic[_Of]):
    """A range of some arrays in files.

    Attributes:
        first: First element of the range; a multiple of GRANULE.
        elements: Number of elements.
        arrays: The arrays by name.
        changed: Names of the arrays that a visit changes.
        of: What the visitor wants to know of it.
    """

    first: int
    elements: int
    arrays: Mapping[str, Segment]
    changed: frozenset[str]
    of: _Of


@final
class Stream(Generic[_Of]):
    """Passes blocks through memory.

    Args:
        storage: Has the threads that move them.
        dtypes: The arrays that pass, by name, with the types of their elements.
        capacity: Elements of the largest block.
        pinned: Whether buffers are page-locked; they are then kept, as that takes long. Others are there
            during a visit alone.
    """

    def __init__(
        self, storage: Storage, dtypes: Mapping[str, torch.dtype], capacity: int, *, pinned: bool
    ) -> None:
        self._storage = storage
        self._dtypes = dtypes
        self._capacity = capacity
        self._pinned = pinned
        self._free: deque[_Buffers] = deque()

    def visit(self, blocks: Iterable[Block[_Of]], change: Callable[[_Of, _Buffers], None]) -> None:
        """Read each block, let `change` change it, and write what it changes; return once all is written.

        Args:
            blocks: The blocks; no two overlap.
            change: Called for each block in order, with its `of` and with buffers that begin with its arrays.

        Raises:
            OffloadError: A file could not be read or written.
        """
        coming = iter(blocks)
        while len(self._free) < BUFFERS:
            self._free.append(
                {
                    name: aligned_buffer(self._capacity, dtype, pinned=self._pinned)
                    for name, dtype in self._dtypes.items()
                }
            )
        reading: deque[tuple[Block[_Of], _Buffers, list[Future[None]]]] = deque()
        writing: deque[tuple[_Buffers, list[Future[None]]]] = deque()
        try:
            self._read_next(coming, reading, writing)
            while reading:
                self._read_next(coming, reading, writing)
                block, buffers, moves = reading[0]
                self._finish(moves, "read:block")
                change(block.of, buffers)
                writing.append((buffers, self._start(block, buffers, "write")))
                reading.popleft()
        finally:
            for _, buffers, moves in reading:
                writing.append((buffers, moves))
            while writing:
                self._take_back(writing)
            if not self._pinned:
                self._free.clear()

    def _read_next(
        self,
        coming: Iterator[Block[_Of]],
        reading: deque[tuple[Block[_Of], _Buffers, list[Future[None]]]],
        writing: deque[tuple[_Buffers, list[Future[None]]]],
    ) -> None:
        block = next(coming, None)
        if block is not None:
            if not self._free:
                self._take_back(writing)
            buffers = self._free.popleft()
            reading.append((block, buffers, self._start(block, buffers, "read")))

    def _take_back(self, writing: deque[tuple[_Buffers, list[Future[None]]]]) -> None:
        """Wait for the oldest write, and free its buffers."""
        buffers, moves = writing.popleft()
        self._free.append(buffers)
        self._finish(moves, "write:block")

    def _start(self, block: Block[_Of], buffers: _Buffers, action: str) -> list[Future[None]]:
        elements = -(-block.elements // GRANULE) * GRANULE
        return [
            self._storage.start(getattr(segment, action), block.first, buffers[name][:elements])
            for name, segment in block.arrays.items()
            if action == "read" or name in block.changed
        ]

    def _finish(self, moves: Iterable[Future[None]], name: str) -> None:
        for move in moves:
            self._storage.wait(move, name)


_VALUE, _GRADIENT = "parameters", "gradients"


@final
class _Range:
    """A block of a pack, with the arrays that stay in memory."""

    def __init__(self, first: int, parts: Sequence[Part], held: Mapping[str, torch.Tensor]) -> None:
        self.parts = parts
        self.held = {name: tensor[first:] for name, tensor in held.items()}


@final
class OffloadedOptimizer(Composed):
    """Step another optimizer, block by block, with its state where the Plan's `offload` says.

        adamw = OffloadedOptimizer(parallel, parallel.parameters(), torch.optim.AdamW, lr=1e-3)

    Args:
        parallel: The model, laid out under a Plan with `offload`.
        params: Parameters of the model, or groups of them, as torch optimizers take them.
        make: Makes the optimizer, such as `torch.optim.AdamW`; called with groups, and the options. It has to
            change each element by itself.
        block: Elements of a block; a multiple of 4,096.
        options: Options of `make`.

    Raises:
        ConfigError: The optimizer does not change each element by itself, or the folder has no space.
        LayoutError: The Plan offloads nothing, or a parameter does not belong to `parallel`.
    """

    def __init__(
        self,
        parallel: Parallel,
        params: Any,
        make: Callable[..., Optimizer],
        *,
        block: int = BLOCK_ELEMENTS,
        **options: Any,
    ) -> None:
        super().__init__(params, dict(options))
        if parallel.storage is None:
            raise LayoutError(
                f"OffloadedOptimizer was given the Plan {parallel.plan}, under which all state stays here",
                possible="a Plan with offload=optimizer:file, or on GPUs optimizer:host",
                change="add offload to the Plan, or use the optimizer itself",
            )
        storage = parallel.storage
        settings = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in self.param_groups
        ]
        self._states = element_states(make, settings, options)
        if not self._states and storage.tiers.optimizer != "device" and len(storage.tiers.moved) == 1:
            raise ConfigError(
                f"offload={storage.tiers} was given, and {getattr(make, '__name__', make)} keeps no state",
                possible="optimizers with state, such as adamw, lion, or sgd with momentum",
                change="leave out offload, or set optimizer.options={momentum=0.9} for sgd",
            )
        self._optimizer = _made(make, self.param_groups, settings, options)
        self.defaults.update(self._optimizer.defaults)
        copy_settings(self._optimizer.param_groups, self.param_groups)
        self._groups = self._optimizer.param_groups
        self._step_supports_amp_scaling = getattr(self._optimizer, "_step_supports_amp_scaling", False)
        self._group_of = {
            parameter: number
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        self._is_on_cpu = parallel.device.type == "cpu"
        self._shown: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        chosen = self._chosen(parallel)
        self._blocks = [found for pack in packs_of(chosen) for found in self._blocks_of(pack, storage, block)]
        dtypes = {**self._states, _VALUE: torch.float32, _GRADIENT: torch.float32}
        passing = {name for each in self._blocks for name in each.arrays}
        if not self._is_on_cpu:
            passing |= {_VALUE, _GRADIENT}
        self._stream: Stream[_Range] = Stream(
            storage,
            {name: dtypes[name] for name in sorted(passing)},
            max((each.elements for each in self._blocks), default=0),
            pinned=not self._is_on_cpu,
        )

    @property
    def title(self) -> str:
        """See `Composed.title`."""
        return title_of(self._optimizer)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step with the present gradients.

        As torch's fused optimizers do, it divides gradients by an attribute `grad_scale` and changes nothing
        if an attribute `found_inf` is not 0.

        Raises:
            OffloadError: A file could not be read or written.
            LayoutError: A group was added after construction.
        """
        loss = loss_of(closure)
        told = vars(self)
        if "found_inf" in told and told["found_inf"].item():
            return loss
        copy_settings(self.param_groups, self._groups)
        if "grad_scale" in told:
            setattr(self._optimizer, "grad_scale", told["grad_scale"].cpu())  # noqa: B010
        try:
            self._stream.visit(
                (block for block in self._blocks if _has_gradient(block.of.parts)), self._update
            )
        finally:
            vars(self._optimizer).pop("grad_scale", None)
            self._optimizer.param_groups = self._groups
            self._optimizer.state.clear()
        return loss

    def parts(self, owned: Sequence[Owned]) -> Sequence[OptimizerPart]:
        """See `Composed.parts`: the optimizer itself, whose `state` holds mappings of the files."""
        return [(self, owned)]

    def show(self) -> None:
        """See `Composed.show`; `state` always shows the state."""

    def take(self) -> None:
        """See `Composed.take`."""
        for parameter, shown in self._shown.items():
            state = self.state.get(parameter, {})
            for key, mapped in shown.items():
                if key in state and state[key] is not mapped:
                    local_part(mapped).copy_(local_part(state[key]))
                    state[key] = mapped

    def place_of(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of a state that is about to be loaded, shaped as the parameter.

        Raises:
            CheckpointError: The optimizer has no such state.
        """
        if self._states.get(key) != dtype:
            kept = ", ".join(f"{name} ({kind})" for name, kind in self._states.items())
            raise CheckpointError(
                f"the checkpoint has the state {key} ({dtype}) for each element, and {self.title} with these "
                f"options keeps {kept}"
            )
        return self._shown[parameter][key]

    def _chosen(self, parallel: Parallel) -> list[Owned]:
        """Return this rank's parts of the parameters that the optimizer was given."""
        owned_of = {each.parameter: each for each in parallel.owned}
        for parameter in self._group_of:
            if parameter.requires_grad and parameter not in owned_of:
                raise LayoutError(
                    f"a parameter of shape {list(parameter.shape)} was given that the model does not have",
                    possible="parameters() of the object that shoal.parallelize returned",
                    change="give these parameters",
                )
        return [each for each in parallel.owned if each.parameter in self._group_of]

    def _blocks_of(self, pack: Pack, storage: Storage, capacity: int) -> list[Block[_Range]]:
        """Reserve the space of a pack's state, and return its blocks."""
        arrays: dict[str, Segment] = {}
        held: dict[str, torch.Tensor] = {}
        for key, dtype in self._states.items():
            segment = storage.add("optimizer", f"the optimizer's {key}", pack.elements, dtype)
            if isinstance(segment, HostSegment):
                held[key] = segment.tensor
            else:
                arrays[key] = segment
            for owned, offset in pack.places:
                local = segment.tensor[offset : offset + owned.local.numel()]
                shaped = local.as_strided(owned.local.shape, owned.local.stride())
                shown = like(owned.parameter, shaped) if self._is_on_cpu else shaped
                self._shown.setdefault(owned.parameter, {})[key] = shown
        changed = {*self._states, _VALUE}
        if pack.shard is not None:
            if pack.shard.parameters is not None:
                arrays[_VALUE] = pack.shard.parameters
            if pack.shard.gradients is not None:
                arrays[_GRADIENT] = pack.shard.gradients
        return [
            Block(first, elements, arrays, frozenset(changed), _Range(first, parts, held))
            for first, elements, parts in pack.blocks(capacity)
        ]

    def _update(self, block: _Range, buffers: Mapping[str, torch.Tensor]) -> None:
        """Make the step of a block whose arrays are at the beginning of buffers."""
        optimizer = self._optimizer
        optimizer.state.clear()
        stand_ins: list[tuple[Part, nn.Parameter]] = []
        groups: list[list[nn.Parameter]] = [[] for _ in self._groups]
        for part in block.parts:
            owned, elements = part.owned, slice(part.at, part.at + part.stop - part.first)
            if owned.gradient is None:
                continue
            value = self._on_cpu(owned, owned.local, part, buffers.get(_VALUE), elements)
            stand_in = nn.Parameter(value, requires_grad=False)
            stand_in.grad = self._on_cpu(owned, owned.gradient, part, buffers.get(_GRADIENT), elements)
            if owned.parameter in self.state:
                optimizer.state[stand_in] = self._state_of(owned) | {
                    key: (block.held[key] if key in block.held else buffers[key])[elements]
                    for key in self._states
                }
            stand_ins.append((part, stand_in))
            groups[self._group_of[owned.parameter]].append(stand_in)
        for group, parameters in zip(self._groups, groups, strict=True):
            group["params"] = parameters
        optimizer.param_groups = [group for group in self._groups if group["params"]]
        optimizer.step()
        for part, stand_in in stand_ins:
            elements = slice(part.at, part.at + part.stop - part.first)
            state = dict(optimizer.state[stand_in])
            for key in self._states:
                place = (block.held[key] if key in block.held else buffers[key])[elements]
                if state[key].data_ptr() != place.data_ptr():  # the first step makes new tensors
                    place.copy_(state[key])
            if not self._is_on_cpu:
                _flat(part.owned.local)[part.first : part.stop].copy_(stand_in)
            if part.is_last:
                self.state[part.owned.parameter] = state | self._shown[part.owned.parameter]

    def _state_of(self, owned: Owned) -> dict[str, Any]:
        """Return copies of a parameter's states that are not kept for each element, such as a count."""
        return {
            key: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for key, value in self.state[owned.parameter].items()
            if key not in self._states
        }

    def _on_cpu(
        self, owned: Owned, tensor: torch.Tensor, part: Part, buffer: torch.Tensor | None, elements: slice
    ) -> torch.Tensor:
        """Return a part of a parameter or of its gradient, flat, in the CPU's memory."""
        if buffer is not None and self._is_on_cpu:
            return buffer[elements]
        if tensor.stride() != owned.local.stride():
            tensor = torch.empty_like(owned.local).copy_(tensor)
        flat = _flat(tensor)[part.first : part.stop]
        return flat if buffer is None else buffer[elements].copy_(flat)


def _made(
    make: Callable[..., Optimizer],
    groups: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> Optimizer:
    """Return an optimizer of equal groups whose parameters take no memory."""
    absent = torch.full((), torch.nan)
    return make(
        [
            {**each, "params": [nn.Parameter(absent.expand(held.shape)) for held in group["params"]]}
            for group, each in zip(groups, settings, strict=True)
        ],
        **options,
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order in which they lie in memory, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _has_gradient(parts: Sequence[Part]) -> bool:
    return any(part.owned.gradient is not None for part in parts)
