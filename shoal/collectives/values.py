"""Collectives of values: what `torch.distributed` does with objects, without a pickle (see `shoal.values`).

All ranks of a group call one of these together. Each is two collectives of bytes: the lengths, and the values
padded to the longest. Prefer a group whose backend works on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import CommunicationError
from shoal.values import decode, encode

_MOST = 1 << 34
"""Bytes of a value; a rank that names more is wrong."""


def all_gather_value(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order.

    Args:
        value: This rank's value, of the kinds that `shoal.values.encode` takes.
        group: The ranks; None for the default group.

    Raises:
        CommunicationError: A rank is gone, or its bytes hold no value.
        TypeError: The value is of no such kind.
    """
    size, mine = dist.get_world_size(group), _bytes_of(value, group)
    lengths = _lengths(mine, group)
    padded = _padded(mine, max(lengths))
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return [_value_of(part, length) for part, length in zip(parts, lengths, strict=True)]


def gather_value(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Return the values of all ranks on the group's first rank, and None on the others.

    Arguments and errors are as in `all_gather_value`.
    """
    is_first, mine = dist.get_rank(group) == 0, _bytes_of(value, group)
    lengths = _lengths(mine, group)
    padded = _padded(mine, max(lengths))
    parts = [torch.empty_like(padded) for _ in lengths] if is_first else None
    dist.gather(padded, parts, group=group, group_dst=0)
    if parts is None:
        return None
    return [_value_of(part, length) for part, length in zip(parts, lengths, strict=True)]


def broadcast_value(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of the first rank on all ranks; arguments and errors are as in `all_gather_value`."""
    is_first = dist.get_rank(group) == 0
    mine = _bytes_of(value if is_first else None, group)
    length = torch.tensor([len(mine)], device=mine.device)
    dist.broadcast(length, group=group, group_src=0)
    count = _checked(int(length))
    data = mine if is_first else torch.empty(count, dtype=torch.uint8, device=mine.device)
    dist.broadcast(data, group=group, group_src=0)
    return value if is_first else _value_of(data, count)


def _bytes_of(value: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    return data.to(_device_of(dist.group.WORLD if group is None else group))


def _device_of(group: Any) -> torch.device:
    """Return a device whose tensors the group takes."""
    if any(device.type == "cpu" for device in group._device_types):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _lengths(mine: torch.Tensor, group: dist.ProcessGroup | None) -> list[int]:
    length = torch.tensor([len(mine)], device=mine.device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    return [_checked(int(each)) for each in lengths]


def _checked(length: int) -> int:
    if not 0 < length <= _MOST:
        raise CommunicationError(f"another rank tells a value of {length} bytes, and at most {_MOST} may be")
    return length


def _padded(data: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(data, (0, length - len(data)))


def _value_of(data: torch.Tensor, length: int) -> Any:
    return decode(data[:length].cpu().numpy().tobytes())
