"""Listeners to what runs, wherever tensors are: what GPUs would launch, and wait for."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = frozenset({"tolist", "item", "cpu", "__bool__", "__int__", "__float__", "nonzero"})
"""Methods for whose results the host has to wait."""

INDICES = frozenset({"aten::index.Tensor", "aten::index_put_", "aten::nonzero"})
"""Operators of indices: those of the host are copied to the device, and a mask is counted first."""


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

    Indices are not heard: once `Tensor.__getitem__` was replaced, torch takes tensors for sequences,
    even when it is restored. `Operators` has them, by the names in `INDICES`.

    Attributes:
        names: Name of the method of each wait.
    """

    def __init__(self):
        self.names = []
        self._patch = pytest.MonkeyPatch()

    def __enter__(self):
        for name in WAITING:
            self._listen(name)
        return self

    def __exit__(self, *_):
        self._patch.undo()

    def _listen(self, name):
        method = getattr(torch.Tensor, name)

        def listened(tensor, *arguments, **named):
            self.names.append(name)
            return method(tensor, *arguments, **named)

        self._patch.setattr(torch.Tensor, name, listened)
