"""What `compile=auto` means on a device, and the time that torch.compile takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch._dynamo.callback import callback_handler

from shoal.errors import ClusterError
from shoal.models import Transformer
from shoal.predict.cost.time import settled_compile, workload_on
from shoal.signals import take_signals, withhold_signals
from shoal.spec.cluster import Cluster, Device, Level
from shoal.spec.plan import SettledPlan
from shoal.spec.workload import transformer_shape
from shoal.units import format_seconds


def with_compile(
    plan: SettledPlan, model: nn.Module, sequence: int | None, device: torch.device
) -> SettledPlan:
    """Return a Plan whose `compile=auto` is settled by the cost model, if it knows model and device.

    Otherwise it stays auto: `shoal.parallelize` then compiles blocks on a GPU, and nothing on a CPU.

    Args:
        plan: The Plan.
        model: The model, before it is laid over ranks.
        sequence: Tokens of a sample; None if not known.
        device: Device on which this rank computes.
    """
    if plan.compile != "auto" or device.type != "cuda" or not isinstance(model, Transformer) or not sequence:
        return plan
    try:
        known = Device.preset(torch.cuda.get_device_name(device))
    except ClusterError:
        return plan
    links = Level(name="links", devices=plan.ranks, bandwidth=known.bandwidth)  # they do not matter here
    cluster = Cluster(name="here", device=known, levels=(links,))
    shape = transformer_shape(model.config.model_dump()).replace(seq=sequence)
    return plan.replace(compile=settled_compile(workload_on(cluster, shape), cluster, plan))


@final
class Compiling:
    """Watch what torch compiles in this process, and keep signals from the compilers that it starts.

    Args:
        say: Called with one line when the steps that compile are over, and for each later step that does.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._began = 0.0
        self._seconds = 0.0  # of the current step
        self._total = 0.0
        self._last = 0  # the last of the first steps that compiled
        self._is_told = False
        # Bound methods are made anew by each access: keep the two that are registered.
        self._start, self._end = self._note_start, self._note_end
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def begin_step(self) -> None:
        """Take note that a step begins: what a validation before it compiled is expected."""
        self._total += self._seconds
        self._seconds = 0.0

    def stepped(self, step: int) -> float:
        """Take note that a step has ended; return the seconds that compiling took of it."""
        take_signals()  # whichever thread ended the compilation
        seconds, self._seconds = self._seconds, 0.0
        self._total += seconds
        if seconds and self._is_told:
            self._say(
                f"step {step} compiled again, for {format_seconds(seconds)}: "
                "a shape of the data or a setting of the model has changed"
            )
        elif seconds:
            self._last = step
        elif self._last and not self._is_told:
            self._is_told = True
            through = "step 1" if self._last == 1 else f"steps 1 to {self._last}"
            self._say(f"compiling the model took {format_seconds(self._total)} of {through}")
        return seconds

    def close(self) -> None:
        """Watch no longer."""
        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._end)

    def _note_start(self, _: Any) -> None:
        withhold_signals()  # until this thread takes them again, and compilers inherit that
        self._began = time.perf_counter()

    def _note_end(self, _: Any) -> None:
        self._seconds += time.perf_counter() - self._began
        take_signals()
