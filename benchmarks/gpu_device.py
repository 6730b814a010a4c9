"""What checks and rows ask of a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["finish", "no_waits"]


def finish(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def no_waits(device: torch.device, what: str) -> Iterator[None]:
    """Require that the host waits for the device nowhere in the context; a CPU is not asked.

    Args:
        device: The device, which is idle.
        what: What must not wait.

    Raises:
        AssertionError: The host waited; the message names the call.
    """
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        raise AssertionError(f"{what} waited for the device: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
