"""Local updates: workers step by themselves, and every so many steps merge what their steps changed.

For each fragment of the model, with x the values that all workers had after the last merge and y_i those of
worker i now:

    d = mean_i (x - y_i)         the outer gradient, sent compressed if the Plan says so
    m = momentum m + d
    x = x - rate (d + momentum m)
    y_i = x

The momentum grows in the first rounds (`merge_schedule.py`).

It is DiLoCo (Douillard et al., arXiv:2311.08105), with SparseLoCo's compression (Sarfi et al.,
arXiv:2508.15706). With rate 1 and momentum 0 it is local SGD (Stich, arXiv:1805.09767). Fragments are merged
in different steps (Streaming DiLoCo: Douillard et al., arXiv:2501.18512). If a merge takes `delay` steps,
workers go on meanwhile, and y_i keeps what these steps changed: y_i = y_i + (new x - y_i when it began).

The mean over workers of what their optimizers keep.

Workers may keep unlike things: an optimizer has a state of the parameters that got a gradient, and workers
that route tokens otherwise use other experts. So they first tell each other what they have.

    for each element    the mean over all workers; zeros where a worker has no such state, as before the first
                        gradient
    counts              the largest: a worker that did not use a parameter has seen zeros in as many steps
    other numbers       the mean over the workers that have one
    other tensors       those of the first worker that has them, such as codes of 8 bits
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, final

import torch
from torch.optim import Optimizer

from shoal.collectives.values import all_gather_value
from shoal.errors import TrainingError
from shoal.parallel.communication import Axis, Pending, new_buffer
from shoal.parallel.device import on_device
from shoal.parallel.exchange.compressed_sums import CompressedSum
from shoal.parallel.exchange.merge_schedule import (
    Merges,
    Outer,
    OuterState,
    Rounds,
    outer_settings,
    vectors_of,
)
from shoal.parallel.exchange.worker_exchange import STEPS, WorkerUpdates
from shoal.parallel.local_shards import Owned, checksum, local_part
from shoal.parallel.offload.offloaded_optimizer import OffloadedOptimizer
from shoal.parallel.optimizer.joined_optimizers import parts_of
from shoal.parallel.parallel import Parallel
from shoal.spec.plan import Exchange


@torch.no_grad()
def average_gradients(parallel: Parallel) -> None:
    """Average the gradients over the workers; all ranks call it together.

    A parameter that a worker did not use counts as zero there, and gets the mean too. A parameter that no
    worker used keeps no gradient. Only a worker that lacks a gradient looks at how many have it.

    Args:
        parallel: The model, whose backward summed the gradients of one worker.
    """
    axis = parallel.axes.workers
    if axis.size == 1:
        return
    begun = []
    for each in vectors_of(parallel, parallel.owned):
        elements, gradients = each.elements, [owned.gradient for owned in each.owned]
        packed = new_buffer(elements + len(gradients), dtype=torch.float32, device=each.device)
        views, presence = each.views(packed[:elements]), packed[elements:]
        for view, gradient in zip(views, gradients, strict=True):
            view.zero_() if gradient is None else view.copy_(gradient)
        presence.copy_(on_device(tuple(float(gradient is not None) for gradient in gradients), each.device))
        begun.append((each.owned, views, presence, packed, axis.all_reduce(packed, "gradients")))
    for parts, views, presence, packed, pending in begun:
        pending.wait()
        absent = any(owned.gradient is None for owned in parts)
        counts = presence.tolist() if absent else [axis.size] * len(parts)
        packed.div_(axis.size)
        for owned, view, count in zip(parts, views, counts, strict=True):
            if owned.gradient is not None:
                owned.gradient.copy_(view)
            elif count and owned.parameter.requires_grad:
                owned.give(view.clone())


_COUNT = "step"
"""Key of a count of steps in torch's optimizers."""


@torch.no_grad()
def average_states(parallel: Parallel, optimizer: Optimizer) -> None:
    """Give the optimizers of all workers one state; all ranks call it together.

    Args:
        parallel: The model.
        optimizer: The optimizer of this rank's worker.
    """
    axis = parallel.axes.workers
    if axis.size == 1:
        return
    places = [(part, each) for part, owned in parts_of(optimizer, parallel.owned) for each in owned]
    own = [_described(owned, part.state.get(owned.parameter, {})) for part, owned in places]
    told = all_gather_value(own, axis.process_group)
    summed = []
    for (part, owned), of_workers in zip(places, zip(*told, strict=True), strict=True):
        keys = dict.fromkeys(key for each in of_workers for key in each)
        state = part.state[owned.parameter] if keys else {}
        for key in keys:
            having = [number for number, each in enumerate(of_workers) if key in each]
            found = [of_workers[number][key] for number in having]
            held = _held(part, owned, state, key, found[0])
            if "value" in found[0]:
                _set(state, key, _joined(key, [each["value"] for each in found]))
            elif held.numel() and held.is_floating_point():
                sent = held.to(parallel.device, torch.float32, copy=True).contiguous()
                summed.append((held, sent, axis.all_reduce(sent, f"state {key}")))
            elif held.numel():
                sent = held.to(parallel.device, copy=True).contiguous()
                axis.broadcast(sent, f"state {key}", having[0]).wait()
                held.copy_(sent)
    for held, sent, pending in summed:
        pending.wait()
        held.copy_(sent.div_(axis.size))


def _described(owned: Owned, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the values of a state that are numbers, and the forms of its tensors."""
    described: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            local = local_part(value)
            form = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(local.shape)}
            described[key] = {**form, "device": value.device.type}
            is_of_element = key != _COUNT and value.is_floating_point() and not owned.shape
            if not value.dim() and not is_of_element:
                described[key]["value"] = local.item()
        elif isinstance(value, (bool, int, float)):
            described[key] = {"value": value}
    return described


def _held(part: Optimizer, owned: Owned, state: dict[str, Any], key: str, form: Mapping[str, Any]) -> Any:
    """Return this rank's part of a state, made of zeros if this worker has none; None for a number."""
    if "dtype" not in form:
        return None
    if not isinstance(state.get(key), torch.Tensor):
        dtype, shape = getattr(torch, form["dtype"]), form["shape"]
        if isinstance(part, OffloadedOptimizer):
            state[key] = part.place_of(owned.parameter, key, dtype).zero_()
        elif shape == list(owned.local.shape) and key != _COUNT:
            state[key] = torch.zeros_like(owned.parameter, dtype=dtype, requires_grad=False)
        else:
            device = "cpu" if form["device"] == "cpu" else owned.local.device
            state[key] = torch.zeros(shape, dtype=dtype, device=device)
    return local_part(state[key])


def _set(state: dict[str, Any], key: str, value: float) -> None:
    if isinstance(state.get(key), torch.Tensor):
        local_part(state[key]).fill_(value)
    else:
        state[key] = value


def _joined(key: str, values: Sequence[float]) -> float:
    is_count = key == _COUNT or isinstance(values[0], int)
    return max(values) if is_count else fmean(values)


_RATES = "local_updates_rates"
"""Key of `LocalUpdates.rates`, in a checkpoint's state."""

_PROGRESS = "local_updates"
"""Key of the steps made, in `state_dict()`."""


@final
class LocalUpdates(WorkerUpdates):
    """Step an optimizer on each worker by itself, and merge the workers' values in rounds.

        optimizer = LocalUpdates(parallel, torch.optim.AdamW(parallel.parameters(), lr=4e-4))

    All workers call `step` or `pass_over` equally often. Weights that all workers load alike are those that
    the next merges begin with. Call `settle` before `state_dict()` if merges take steps or are compressed.

    Args:
        parallel: The model; its Plan has `exchange=local` or `auto`.
        optimizer: The optimizer of each worker.
        outer: Settings of the outer optimizer; None: see `outer_settings`.
        exchange: When and how workers merge; None for what the Plan says.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: Optimizer,
        *,
        outer: Outer | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(parallel, optimizer)
        exchange = parallel.plan.exchanged if exchange is None else exchange
        self._axis: Axis = parallel.axes.workers
        self._rounds = Rounds(exchange)
        self._merges = Merges(parallel, exchange, outer_settings(exchange) if outer is None else outer)
        self._has_begun = self._has_ended = False  # a merge, since `agree` was called
        self._told: tuple[torch.Tensor, Pending] | None = None
        self._loads, self._chances = Counter(parallel.loads), parallel.chances_to_load
        self._has_state = False  # whether this state was loaded, and no step was made since
        self._is_settled = True  # since the last step
        self._merges.remember()
        self.register_state_dict_pre_hook(_require_whole_state)
        self.register_state_dict_post_hook(_with_progress)
        self.register_load_state_dict_pre_hook(_take_progress)

    @property
    def outer(self) -> OuterState:
        """See `WorkerUpdates.outer`."""
        return self._merges.outer

    @property
    def is_dense(self) -> bool:
        """Whether workers average gradients in the next step: call `average_gradients` after its backward."""
        return self._rounds.is_dense

    @property
    def has_merged(self) -> bool:
        """Whether all workers have equal values: after a dense step, and after a merge of the whole model."""
        return self._merges.ends is None and not self._merges.apart

    @property
    def steps(self) -> int:
        """Steps made."""
        return self._rounds.step

    @property
    def rates(self) -> tuple[float, float]:
        """The learning rate of the last step, and the highest so far: `stretch` depends on them."""
        return self._rounds.rates

    def average_gradients(self) -> None:
        """Average the gradients over the workers; all ranks call it together."""
        average_gradients(self._parallel)

    def take_moved(self) -> torch.Tensor:
        """Return how far workers moved since the last call, on this rank's parts, `[2]`, fp64.

        The first number is the sum of squares of what this worker changed between merges, the second one that
        of the mean over workers, as it was sent. If workers moved alike they are equal; if each moved another
        way, the second is the first over the number of workers. Compression that leaves elements out makes
        the second one smaller.
        """
        return self._merges.take_moved()

    def exchanges(self) -> Mapping[str, CompressedSum]:
        """Return the compressed sums of merges, by name; none if merges are whole."""
        return self._merges.exchanges()

    def left_out(self) -> torch.Tensor:
        """Return the sum of squares of what compression left out on this rank, a scalar."""
        lefts = [each.left_out() for each in self.exchanges().values()]
        return sum(lefts, torch.zeros((), device=self._parallel.device))

    def agree(self, flags: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small tensor over the workers if a merge has ended in this step; else zeros.

        Workers that stop must stop after the same step, and only merges tell them of each other. If merges
        take steps, the sum is that of the step in which this one began, and workers do not wait for it.
        """
        if self._has_begun:
            if self._told is not None:
                self._told[1].wait()
            summed = flags.clone()
            self._told = summed, self._axis.all_reduce(summed, "flags")
        told = self._told if self._has_ended else None
        self._has_begun = self._has_ended = False
        if told is None:
            return torch.zeros_like(flags)
        self._told = None
        told[1].wait()
        return told[0]

    def make_step(self) -> None:
        """Step this worker's optimizer, and merge what is due."""
        self._take_loaded()
        self._inner.step()
        self._advance()

    @torch.no_grad()
    def pass_over(self) -> None:
        """Count a step that this worker leaves out, and merge what is due: other workers wait for it."""
        self._take_loaded()
        self._advance()
        self._parallel.changed()

    @torch.no_grad()
    def settle(self) -> None:
        """Make all workers equal: merge what they changed, and average their optimizers' states.

        Call it on all ranks before the state is saved. What compression left out is shared out equally.
        """
        self._take_loaded()
        self._finish()
        for number in sorted(self._merges.apart):
            self._start(number)
            self._finish()
        self._rounds.begin()
        self._has_begun = self._has_ended = True
        average_states(self._parallel, self._inner)
        self._merges.share_errors()
        self._is_settled = True
        self._parallel.changed()
        self.show()

    @torch.no_grad()
    def set_step(self, steps: int, rates: tuple[float, float] = (0.0, 0.0)) -> None:
        """Go on after this many steps, with the state that was loaded, and what `rates` was then.

        All workers have equal values.
        """
        self._merges.drop()
        self._rounds.set_step(steps, rates)
        self._loads, self._chances = Counter(self._parallel.loads), self._parallel.chances_to_load
        self._merges.remember()
        self._merges.take_state()

    def end(self) -> None:
        """See `WorkerExchange.end`."""
        self.settle()

    def to_save(self) -> dict[str, Any]:
        """See `WorkerExchange.to_save`: merges are due after numbers of steps."""
        return {STEPS: self.steps, _RATES: self.rates}

    def load(self, steps: int, state: Mapping[str, Any]) -> None:
        """See `WorkerExchange.load`."""
        rate, highest = state.get(_RATES, (0.0, 0.0))
        self.set_step(steps, (rate, highest))

    def begin(self) -> None:
        """See `WorkerExchange.begin`: what workers change is counted from these weights."""
        self.set_step(0)

    def take(self) -> None:
        """See `Composed.take`."""
        super().take()
        self._merges.drop()
        self._merges.part()
        self._merges.take_state()
        self._has_state = True

    def _advance(self) -> None:
        """Count a step, end the merge that is due to end, and begin the one that is due to begin."""
        was_dense = self._rounds.is_dense
        self._has_state = self._is_settled = False
        self._rounds.note(float(self.param_groups[0]["lr"]))
        due = self._rounds.advance()
        if was_dense:
            self._merges.remember()
            self._has_begun = self._has_ended = True
            return
        self._merges.part()
        self._finish_due()
        if due is not None:
            self._finish()
            self._start(due)
            self._finish_due()
        if self._rounds.is_at_end:
            self._rounds.begin()

    def _start(self, number: int) -> None:
        self._merges.start(number, self._rounds.step)
        self._has_begun = True

    def _finish(self) -> None:
        """End the merge that is under way, if there is one."""
        self._has_ended |= self._merges.ends is not None
        self._merges.finish(self._rounds.step)

    def _finish_due(self) -> None:
        if self._merges.ends is not None and self._merges.ends <= self._rounds.step:
            self._finish()

    def _take_loaded(self) -> None:
        """Take weights that were loaded since the last step for those after a merge, if workers' are equal.

        What momentum and compression kept is of the weights before, and is forgotten unless it was loaded
        too. Where workers' are not equal, as when each gives back its own after an evaluation with others,
        they count as what it changed.
        """
        loads, before = self._parallel.loads, self._loads
        chances, chances_before = self._parallel.chances_to_load, self._chances
        if loads == before and chances == chances_before:
            return
        self._loads, self._chances = Counter(loads), chances
        owned = self._parallel.owned
        loaded = self._are_loaded([loads[each.name] != before[each.name] for each in owned])
        new = [
            (each, each.local.clone())
            for each, is_loaded in zip(owned, loaded, strict=True)
            if is_loaded and not torch.equal(each.local, self._merges.outer.anchor(each))
        ]
        self._finish()
        for each, values in new:
            self._merges.replace(each, values)
        if new and not self._has_state:
            self._merges.forget({each.name for each, _ in new})
        self._parallel.changed()

    def _are_loaded(self, loads_here: Sequence[bool]) -> list[bool]:
        """Return for each of this rank's parts whether a worker loaded it, and all have equal bits now.

        Args:
            loads_here: Whether this worker loaded it.
        """
        parts = self._parallel.owned
        if not parts:
            return []
        sums = torch.stack([checksum(each.local) for each in parts])
        gathered = sums.new_empty((self._axis.size, 2, len(parts)))
        gathered[self._axis.index, 0] = sums
        gathered[self._axis.index, 1] = torch.tensor(loads_here, device=sums.device)
        self._axis.all_gather(gathered.view(-1), "loaded").wait()
        loaded: list[bool] = ((gathered[:, 0] == sums).all(dim=0) & gathered[:, 1].any(dim=0)).tolist()
        return loaded


def _require_whole_state(optimizer: Any) -> None:
    """Check that a `state_dict` has all that this worker goes on with.

    Raises:
        TrainingError: It would lack a merge that is under way, or what compression left out.
    """
    lefts = (exchange.kept() for exchange in optimizer.exchanges().values())
    if not optimizer._is_settled and (optimizer._merges.ends is not None or any(lefts)):
        raise TrainingError(
            "state_dict() of local updates was called between merges, and would lack a merge that is under "
            "way or what compression left out: call settle() on all ranks before it, or save with shoal.save"
        )


def _with_progress(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a `state_dict` with the steps made, `LocalUpdates.rates`, and the round."""
    rounds = optimizer._rounds
    return {**state, _PROGRESS: {"steps": rounds.step, "rates": rounds.rates, "round": rounds.span}}


def _take_progress(optimizer: Any, state: dict[str, Any]) -> None:
    """Go on after the steps of a `state_dict`."""
    if (progress := state.get(_PROGRESS)) is not None:
        optimizer._rounds.set_step(progress["steps"], tuple(progress["rates"]), tuple(progress["round"]))
