"""A rank that leaves a group of ranks keeps nothing of it."""

from __future__ import annotations

import weakref

import torch
from torch.distributed import HashStore

from shoal.errors import CommunicationError
from shoal.launch.elastic import Membership
from shoal.train.elastic import _leave


class Held:
    """Stands for the tensors that a frame or a node holds."""


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        raise CommunicationError("a rank is gone")


def broken_backward():
    """A backward that an error ends in one branch while another one waits in autograd's queue."""
    of_node, of_frame = Held(), Held()
    source = torch.zeros(8, requires_grad=True)
    waits = source * 2
    waits.register_hook(lambda gradient, held=of_node: None)
    total = waits.sum() + Fails.apply(source * 3).sum()

    def called_in_backward(gradient):
        raise CommunicationError(f"with {type(of_frame).__name__}")

    last = torch.zeros((), requires_grad=True) * 1
    last.register_hook(called_in_backward)
    failures = []
    for each in (last, total):
        try:
            each.backward()
        except CommunicationError as error:
            failures.append(error)
    first, second = failures
    second.__cause__ = first
    return second, weakref.ref(of_node), weakref.ref(of_frame)


def test_nothing_of_a_broken_backward_is_kept_but_the_text_of_its_errors():
    failure, *held = broken_backward()
    membership = Membership(0, HashStore, -1, lambda: None)
    _leave(failure, membership)
    assert [each() for each in held] == [None, None]
    assert "called_in_backward" in "".join(failure.__cause__.__notes__)
