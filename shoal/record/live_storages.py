"""The bytes of tensors that live on this rank, counted by storage; those in files count as none."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OWN_OPERATORS = "shoal"
_IN_MEMORY = ("/dev/", "/memfd:", "/SYSV")
"""Beginnings of the names that Linux gives to shared memory which is no file, and to devices such as GPUs."""


@final
class MappedFiles:
    """The files that are mapped into this process when it is made; their pages are the system's to drop."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        try:
            lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # a system that does not say
            return
        for line in lines:
            place, access, _, _, _, *name = line.split(maxsplit=5)
            if access.endswith("s") and name and not name[0].startswith(_IN_MEMORY):
                start, stop = (int(each, 16) for each in place.split("-"))
                self._starts.append(start)
                self._stops.append(stop)

    def hold(self, tensor: Tensor) -> bool:
        """Return whether the storage of a tensor is in one of them."""
        return self.hold_storage(_storage(tensor))

    def hold_storage(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is in one of them, which one on a device never is."""
        if storage.device.type != "cpu":
            return False
        address = storage.data_ptr()
        place = bisect(self._starts, address) - 1
        return place >= 0 and address < self._stops[place]


@final
class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operators made while it was entered, and that still exist.

    It sees what every operator returns, in forward, backward and optimizer, and keeps a weak reference to
    each storage. So it does not matter which thread frees one, nor that sharding empties one. It reads after
    every operator: it does not see what an operator allocates and frees within itself, nor what is allocated
    without an operator.

    Args:
        at_peak: Called at each new peak.

    Attributes:
        peak: The most that was live after an operator, if that was more than the caller set it to.
    """

    def __init__(self, at_peak: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._at_peak = at_peak
        self._files = MappedFiles()
        self._storages: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}
        self._bound = 0  # what would be live if nothing had been freed since it was counted
        self.peak = 0

    def bytes(self) -> int:
        """Return the bytes that are live now."""
        found, sizes, places = {}, {}, []
        for key, reference in self._storages.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                found[key] = reference
                sizes[key] = storage.nbytes()
                places.append((storage.data_ptr(), sizes[key]))
        self._storages, self._sizes = found, sizes
        self._bound = _union(places)
        return self._bound

    def take_up(self, tensor: Tensor) -> None:
        """Count the storage of a tensor too, which may have been made before."""
        storage = _storage(tensor)
        key, size = storage._cdata, storage.nbytes()
        if self._files.hold_storage(storage):
            return
        # While a weak reference is held, no other storage gets its address.
        if key not in self._storages:
            self._storages[key] = StorageWeakRef(storage)
        self._bound += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Call the operator, and take up the storages that it returns; look into Shoal's own operators."""
        if function.namespace == _OWN_OPERATORS:
            with self:
                result = OPDEFS[function.name()]._init_fn(*arguments, **(named or {}))
        else:
            result = function(*arguments, **(named or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.take_up(leaf)
        if self._bound > self.peak and self.bytes() > self.peak:
            self.peak = self._bound
            self._at_peak()
        return result


def spanned(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors; what several share counts once."""
    return _union([(each.data_ptr(), each.nbytes()) for each in map(_storage, tensors)])


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()


def _union(places: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of intervals, given by their begin and length.

    A parameter's local tensor, through dlpack, has a storage that is a part of another one.
    """
    total = reached = 0
    for start, size in sorted(places):
        total += max(0, start + size - max(start, reached))
        reached = max(reached, start + size)
    return total
