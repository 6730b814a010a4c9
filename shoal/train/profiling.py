"""Profiles of some steps with torch.profiler: of those that were asked for, and after a signal.

Each rank writes `RUN/profile/rank-00000-steps-100-105.json.gz`, a trace for Perfetto, chrome://tracing or
Holistic Trace Analysis, in which the spans of the Timeline are marked. On a GPU the history of its memory can
be kept too, for https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.record import Marks

_STEPS = 5
"""Steps that a signal asks for."""
_EVENTS = 1_000_000
"""Most changes of memory that are kept."""


@final
class Profiling:
    """Profile steps of a rank. A failure costs the profile, not the training.

    SIGUSR2 asks for the next five steps, until `close`.

    Args:
        steps: The first and the last step to profile; None for none.
        folder: Folder for the traces.
        rank: The global rank.
        device: Device on which this rank computes.
        marks: The marks of the rank's recorder.
        memory: Whether the history of a GPU's memory is kept too.
        say: Called with one line about each profile.
    """

    def __init__(
        self,
        steps: tuple[int, int] | None,
        folder: Path,
        rank: int,
        device: torch.device,
        marks: Marks,
        *,
        memory: bool,
        say: Callable[[str], object],
    ) -> None:
        self._steps = steps
        self._folder = folder
        self._rank = rank
        self._device = device
        self._marks = marks
        self._keeps_memory = memory and device.type == "cuda"
        self._say = say
        self._is_asked = False
        self._running: profile | None = None
        self._first = self._last = self._made = 0
        self._marks_before = marks.new
        self._handler_before = None
        self._heeds = threading.current_thread() is threading.main_thread()
        if self._heeds:
            self._handler_before = signal.signal(signal.SIGUSR2, self._ask)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Return the context of a step, from 1; it is profiled if it was asked for."""
        self._begin_if_asked(number)
        if self._running is None:
            yield
            return
        self._made = number
        with record_function(f"step {number}"):
            yield
        if number >= self._last:
            self._end()

    def close(self) -> None:
        """End a profile that is still running, and give the signal back."""
        if self._running is not None:
            self._end()
        if self._heeds:
            self._heeds = False
            signal.signal(signal.SIGUSR2, self._handler_before or signal.SIG_IGN)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def _begin_if_asked(self, number: int) -> None:
        if self._running is not None:
            return
        if self._steps is not None and self._steps[0] <= number <= self._steps[1]:
            self._last = self._steps[1]
        elif self._is_asked:
            self._last = number + _STEPS - 1
        else:
            return
        self._is_asked, self._first = False, number
        with self._failing_quietly():
            is_cuda = self._device.type == "cuda"
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
            running = profile(activities=activities, record_shapes=True)
            running.start()
            self._running = running
            self._marks_before, self._marks.new = self._marks.new, record_function
            if self._keeps_memory:
                torch.cuda.memory._record_memory_history(max_entries=_EVENTS)

    def _end(self) -> None:
        running, self._running = self._running, None
        self._marks.new = self._marks_before
        assert running is not None
        with self._failing_quietly():
            running.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            stem = f"rank-{self._rank:05d}-steps-{self._first}-{self._made}"
            running.export_chrome_trace(str(self._folder / f"{stem}.json.gz"))
            if self._keeps_memory:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"{stem}-memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            self._say(f"steps {self._first} to {self._made} are profiled in {self._folder}")

    @contextlib.contextmanager
    def _failing_quietly(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._steps = None
            self._say(f"the profile of steps {self._first} to {self._last} failed: {error}")
