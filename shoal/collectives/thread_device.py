"""The GPU of a new thread: that of the thread that starts it.

CUDA begins every thread on the first GPU. The thread's first call, even to wait for an event, then makes a
context there, of half a gigabyte, also if the process is a rank of another GPU. So a thread that may touch
CUDA first sets the device; a test finds threads that do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["callers_device", "on_callers_device"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def callers_device() -> Callable[[], None]:
    """Return a function that gives the thread that calls it this thread's current GPU.

    It is the `initializer` of a pool. In a process that has not used CUDA so far it does nothing.
    """
    if not torch.cuda.is_initialized():
        return _nothing
    return functools.partial(torch.cuda.set_device, torch.cuda.current_device())


def on_callers_device(work: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return the function as the target of a thread, which then starts on this thread's current GPU."""
    set_device = callers_device()

    @functools.wraps(work)
    def begun(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        set_device()
        return work(*arguments, **named)

    return begun


def _nothing() -> None:
    pass
