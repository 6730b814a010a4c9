"""Listeners to what runs, wherever tensors are: what GPUs would launch, and wait for."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = frozenset({"tolist", "item", "cpu", "__bool__", "__int__", "__float__", "nonzero"})
"""Methods for whose results the host has to wait."""


class Operators(TorchDispatchMode):
    """Listens while it is entered.

    Attributes:
        names: Name of each operator that ran.
        dtypes: Dtypes of the tensors that each operator on lists got.
    """

    def __init__(self):
        super().__init__()
        self.names = []
        self.dtypes = []

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        self.names.append(operator.name())
        if "_foreach_" in operator.name():
            lists = [each for each in arguments if isinstance(each, list)]
            scalars = [each for each in arguments if isinstance(each, torch.Tensor)]
            self.dtypes.append({each.dtype for tensors in (*lists, scalars) for each in tensors})
        return operator(*arguments, **(named or {}))


class Waits:
    """Notes how often the host would wait for a device, also within backward, while it is entered.

    Attributes:
        names: Name of the method of each wait.
    """

    def __init__(self):
        self.names = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self):
        for name in WAITING:
            self._listen(name, lambda arguments: True)
        for name in ("__getitem__", "__setitem__"):
            self._listen(name, lambda arguments: _copies_indices(arguments[0]))
        return self

    def __exit__(self, *_):
        self._patch.undo()

    def _listen(self, name, waits):
        method = getattr(torch.Tensor, name)

        def listened(tensor, *arguments, **named):
            if waits(arguments):
                self.names.append(name)
            return method(tensor, *arguments, **named)

        self._patch.setattr(torch.Tensor, name, listened)


def _copies_indices(index):
    """Whether an index has numbers of the host, which are copied to the device, or is a mask to count."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, list) or getattr(each, "dtype", None) == torch.bool for each in parts)
