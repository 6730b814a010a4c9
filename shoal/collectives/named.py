"""What c10d asks of every process group that is written in Python: who it is."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["NamedGroup"]

_Base: Any = dist.ProcessGroup  # overloaded for many ways to call, of which c10d uses one each


class NamedGroup(_Base):
    """A group's rank, size, name and purpose.

    Args:
        rank: This process within the group.
        size: Ranks in the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank = rank
        self._size = size
        self._name = self._description = ""
        self._sequence_number = 0

    def rank(self) -> int:
        """This process within the group."""
        return self._rank

    def size(self) -> int:
        """Ranks in the group."""
        return self._size

    getRank, getSize = rank, size  # noqa: N815

    def name(self) -> str:
        """The backend's name."""
        return "shoal"

    getBackendName = name  # noqa: N815

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> NamedGroup:
        return self

    def getGroupName(self) -> str:  # noqa: N802
        """The group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Names the group."""
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Says what the group is for."""
        self._description = description

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence_number

    def _set_sequence_number_for_group(self) -> None:
        self._sequence_number = 0
