"""The identity that c10d asks of every process group written in Python: rank, size, name and purpose."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_Base: Any = dist.ProcessGroup  # it has many overloads; c10d uses one of each


class NamedGroup(_Base):
    """A process group with its rank, size, name and purpose.

    Args:
        rank: This process's rank in the group.
        size: Number of ranks in the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._name = self._description = ""
        self._sequence_number = 0

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815

    def name(self) -> str:
        """Return the backend's name."""
        return "shoal"

    getBackendName = name  # noqa: N815

    supports_splitting = False
    supports_coalescing = False

    @property
    def _device_types(self) -> list[torch.device]:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(device) for device in devices]

    def _get_backend(self, device: torch.device) -> NamedGroup:
        return self

    def getGroupName(self) -> str:  # noqa: N802
        """Return the group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the group's name."""
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the group's purpose."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the group's purpose."""
        self._description = description

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence_number

    def _set_sequence_number_for_group(self) -> None:
        self._sequence_number = 0
