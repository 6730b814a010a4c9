"""Measures the memory of a rank in one step: what there is of each part of the model, and the peak.

On a CPU the peak is that of live storages (`shoal.record.LiveStorages`), on a GPU what torch's allocator
counts. The bytes that a block's forward leaves behind are the difference before and after it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shoal.models.task import find_blocks
from shoal.parallel import Parallel, local_part
from shoal.parallel.device import memory_of_steps
from shoal.record import LiveStorages, MappedFiles, spanned
from shoal.spec.run import OUTSIDE, MeasuredMemory, UnitMemory, write_memory


@final
class StepMemory:
    """Measures the step that is made while it is entered, after another one has made the optimizer's state.

    Args:
        parallel: The model.
        optimizer: Its optimizer.
    """

    def __init__(self, parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
        self._parallel = parallel
        self._optimizer = optimizer
        self._device = parallel.device
        self._unit_of = _units(parallel.module)
        self._files = MappedFiles()
        # Listed now: within a step, zero3 takes the listing of parameters for their use.
        self._having_gradients = list(self._parameters())
        self._buffers, self._gathered = self._kept_by_sharding()
        self._gradients = spanned(self._buffers)
        self._activations: Counter[str] = Counter()
        self._in: list[str] = []  # the units whose forwards run, outermost first
        self._moment = ""
        self._live: LiveStorages | None = None
        self._reading: Callable[[], int]
        self._entered = ExitStack()
        self.is_possible = parallel.plan.compile != "blocks" or self._device.type == "cuda"
        """Whether the step can be measured: storages cannot be counted within compiled code."""

    def __enter__(self) -> Self:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._reading = lambda: torch.cuda.memory_allocated(self._device)
        else:
            self._live = self._entered.enter_context(LiveStorages(self._note_peak))
            for tensor in self._states():
                self._live.take_up(tensor)
            self._live.peak = self._live.bytes()
            self._reading = self._live.bytes
        if self._parallel.plan.compile != "blocks":  # hooks would be compiled with the blocks
            for name, module in self._hooked():
                for handle in self._hook(name, module):
                    self._entered.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def measured(self, rank: int, step: int) -> MeasuredMemory:
        """Return what was measured.

        Args:
            rank: Number of this rank.
            step: The step, from 1.
        """
        weights, gradients, optimizer = self._weights(), self._gradient_bytes(), self._optimizer_bytes()
        names = dict.fromkeys([*self._unit_of.values(), OUTSIDE])
        self._activations[OUTSIDE] -= sum(
            count for name, count in self._activations.items() if name != OUTSIDE
        )
        units = (
            UnitMemory(name, weights[name], gradients[name], optimizer[name], max(0, self._activations[name]))
            for name in names
        )
        return MeasuredMemory(
            rank=rank,
            step=step,
            peak=torch.cuda.max_memory_allocated(self._device) if self._live is None else self._live.peak,
            moment=self._moment,
            buffers=sum(each.nbytes for each in self._parallel.module.buffers()),
            units=tuple(unit for unit in units if any((unit.weights, unit.optimizer, unit.activations))),
            resident=memory_of_steps()[0] or None,
            reserved=torch.cuda.max_memory_reserved(self._device) if self._live is None else None,
        )

    def _note_peak(self) -> None:
        """Note the gradients that there are, and where the step is."""
        given = (each.grad for each in self._having_gradients)
        gradients = [each for each in given if each is not None and not self._files.hold(each)]
        self._gradients = spanned([*self._buffers, *gradients])
        where = self._in[-1] if self._in else OUTSIDE
        self._moment = f"backward, {where}" if _is_in_backward() else f"forward, {where}"

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that have gradients: those that compute, and those of the optimizer."""
        seen: set[int] = set()
        owned = (each.parameter for each in self._parallel.owned)
        for parameter in (*self._parallel.module.parameters(), *owned):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter

    def _states(self) -> Iterator[torch.Tensor]:
        for parameter in self._having_gradients:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._parallel.module.buffers()
        yield from _reached(self._parallel.strategies)
        for state in self._optimizer.state.values():
            yield from _tensors(state)

    def _weights(self) -> Counter[str]:
        """Return the bytes of the weights that compute, or of the shards that they are gathered from."""
        found: Counter[str] = Counter()
        if self._parallel.plan.sharding.cuts_weights:
            parts = [(each.name, each.local) for each in self._parallel.owned]
            parts += [(each.name, each.local) for each in self._parallel.frozen]
            for name, local in parts:
                found[self._unit(name)] += self._nbytes(local)
        else:
            for name, parameter in self._parallel.module.named_parameters():
                found[self._unit(name)] += self._nbytes(parameter)
        return found

    def _kept_by_sharding(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors in which gradients stay from step to step, and those for gathered weights.

        The latter have no memory between two steps.
        """
        others = {
            _place(each) for each in (*self._parallel.module.parameters(), *self._parallel.module.buffers())
        }
        others |= {_place(each.local) for each in self._parallel.owned}
        others |= {_place(each.parameter) for each in self._parallel.owned}
        others |= {_place(each.local) for each in self._parallel.frozen}
        reached = [
            each
            for each in _reached(self._parallel.strategies)
            if _place(each) not in others and not self._files.hold(each)
        ]
        gathered = [each for each in reached if _place(each)[1] == 0]
        return [each for each in reached if _place(each)[1] > 0], gathered

    def _gradient_bytes(self) -> Counter[str]:
        """Return the bytes of gradients at the peak; each unit's share is that of its trained parameters."""
        elements: Counter[str] = Counter()
        for each in self._parallel.owned:
            elements[self._unit(each.name)] += math.prod(each.shape)
        total = max(1, elements.total())
        return Counter({name: self._gradients * count // total for name, count in elements.items()})

    def _optimizer_bytes(self) -> Counter[str]:
        """Return the bytes of the optimizer's state, and of its own copies of weights."""
        found: Counter[str] = Counter()
        storages = [parameter.untyped_storage() for parameter in self._parallel.module.parameters()]
        own = {each.data_ptr(): each.data_ptr() + each.nbytes() for each in storages}
        for each in self._parallel.owned:
            unit = self._unit(each.name)
            state = self._optimizer.state.get(each.parameter, {})
            found[unit] += sum(self._nbytes(tensor) for tensor in _tensors(state))
            place = each.local.data_ptr()
            is_copy = not any(start <= place < stop for start, stop in own.items())
            if is_copy and not self._parallel.plan.sharding.cuts_weights:
                found[unit] += self._nbytes(each.local)
        return found

    def _hooked(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the units with a forward of their own, and the model as a whole."""
        names = {id(module): name for name, module in self._parallel.module.named_modules()}
        yield OUTSIDE, self._parallel.module
        for block in find_blocks(self._parallel.module):
            yield names[id(block)], block

    def _hook(self, name: str, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        before: list[int] = []

        def enter(module: nn.Module, arguments: Any) -> None:
            self._in.append(name)
            before.append(self._reading() - spanned(self._gathered))

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            self._in.pop()
            left = self._reading() - spanned(self._gathered) - before.pop()
            if not _is_in_backward():  # there, recompute makes the forward again
                self._activations[name] = max(self._activations[name], left)

        # The hooks of sharding gather weights within, and let go of them.
        first = module.register_forward_pre_hook(enter, prepend=True)
        return first, module.register_forward_hook(leave)

    def _nbytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a tensor's local part in memory."""
        return 0 if self._files.hold(tensor) else local_part(tensor).nbytes

    def _unit(self, parameter: str) -> str:
        return self._unit_of.get(parameter, OUTSIDE)


@final
class MemoryRecord:
    """Measures the second step of this process: the first one makes the optimizer's state.

    Args:
        path: The file that it is written to; None measures nothing.
        rank: Number of this rank.
        say: Called with a line if the file cannot be written.
    """

    def __init__(self, path: Path | None, rank: int, say: Callable[[str], object]) -> None:
        self._path = path
        self._rank = rank
        self._say = say
        self._began = 0

    @contextmanager
    def step(self, parallel: Parallel, optimizer: torch.optim.Optimizer, number: int) -> Iterator[None]:
        """Measure the step that is made within it, if it is the second.

        Args:
            parallel: The model.
            optimizer: Its optimizer.
            number: The step, from 1.
        """
        self._began += 1
        memory = StepMemory(parallel, optimizer) if self._path is not None and self._began == 2 else None
        if memory is None or not memory.is_possible:
            yield
            return
        with memory:
            yield
        assert self._path is not None
        try:
            write_memory(self._path, memory.measured(self._rank, number))
        except OSError as error:
            self._say(f"warning: {self._path} was not written: {error.strerror}")


def _units(model: nn.Module) -> dict[str, str]:
    """Return the block of each parameter that is in one, by name."""
    names = {id(module): name for name, module in model.named_modules()}
    return {
        f"{names[id(block)]}.{name}": names[id(block)]
        for block in find_blocks(model)
        for name, _ in block.named_parameters()
    }


def _reached(root: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that objects of shoal.parallel hold, each once."""
    seen, left = set(), [root]
    while left:
        here = left.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here, torch.Tensor):
            yield here
        elif isinstance(here, dict):
            left.extend(here.values())
        elif isinstance(here, (list, tuple, set, frozenset)):
            left.extend(here)
        elif type(here).__module__.startswith("shoal.parallel"):
            left.extend(vars(here).values() if hasattr(here, "__dict__") else ())
            slots = (name for kind in type(here).__mro__ for name in getattr(kind, "__slots__", ()))
            left.extend(getattr(here, name) for name in slots if hasattr(here, name))


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the storage of a tensor's local part begins, and its bytes."""
    storage = local_part(tensor).untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _tensors(state: Any) -> Iterable[torch.Tensor]:
    return [each for each in state.values() if isinstance(each, torch.Tensor)]


def _is_in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
