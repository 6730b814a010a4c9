"""The first uses of NCCL's groups, in one order on all ranks.

NCCL makes a communicator with its group, and connects the ranks later: for collectives when one of them first
runs an algorithm (`NCCL_RUNTIME_CONNECT`), and for messages when two ranks first send to each other. Then a
rank's host waits for the others. If one rank uses group A first and another one group B, each waits for the
other forever. So each group is used as soon as it is made: all ranks make all groups in one order.
"""

from __future__ import annotations

from typing import final

import torch
import torch.distributed as dist

from shoal.parallel.communication import Axis
from shoal.record import NullRecorder

_SIZES = (1, 64 << 10, 4 << 20)
"""Elements of a number, a tensor and a bucket: NCCL chooses the algorithm by size, collective and machine."""


@final
class Connections:
    """Connect the groups that this rank is in; all ranks of a group call the same method for it.

    Args:
        rank: This process's global rank.
        device: The device of the groups' tensors; None if the groups need not be connected.
    """

    def __init__(self, rank: int, device: torch.device | None) -> None:
        self._rank = rank
        self._device = device

    def for_collectives(self, members: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        """Do each collective of an axis with few elements and with many.

        A broadcast always takes the ring, a small sum often the tree, and a large one what switches offer.
        """
        axis = self._axis(members, group)
        if axis is None:
            return
        for elements in _SIZES:
            whole = torch.zeros(-(-elements // axis.size) * axis.size, device=self._device)
            axis.broadcast(whole, "first use").wait()
            axis.all_reduce(whole, "first use").wait()
            axis.all_gather(whole, "first use").wait()
            axis.reduce_scatter(whole.chunk(axis.size)[axis.index], whole, "first use").wait()
        self._finish()

    def for_all_pairs(self, members: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
        """Send something from each rank to each, for shifts and for all-to-alls."""
        axis = self._axis(members, group)
        if axis is None:
            return
        sent = torch.zeros(axis.size, device=self._device)
        axis.all_to_all(torch.empty_like(sent), sent, "first use").wait()
        self._finish()

    def for_messages(self, members: tuple[int, int], group: dist.ProcessGroup | None) -> None:
        """Send something each way between two ranks."""
        axis = self._axis(members, group)
        if axis is None:
            return
        sent, received = torch.zeros(2, 1, device=self._device)
        for sender in (0, 1):  # one after the other: NCCL runs the messages of a group in the order of calls
            if axis.index == sender:
                axis.send(sent, 1 - sender, "first use").wait()
            else:
                axis.receive(received, sender, "first use").wait()
        self._finish()

    def _axis(self, members: tuple[int, ...], group: dist.ProcessGroup | None) -> Axis | None:
        if self._device is None or self._rank not in members or len(members) == 1:
            return None
        return Axis("first use", members, self._rank, group, NullRecorder())

    def _finish(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
