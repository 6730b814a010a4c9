"""Memory for copies of a state on a GPU: touched and locked beside training, and right before that."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from cuda_runtime_stand_in import CudaRuntime

from shoal.checkpoint import Piece, Staging


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def runtime(monkeypatch):
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return CudaRuntime().install(monkeypatch)


def pieces(value, elements=10_000):
    return [Piece.whole("a", torch.full((elements,), float(value)).as_subclass(OnGpu))]


def test_training_goes_on_while_a_thread_touches_and_locks_the_memory(runtime):
    may_lock, staging = threading.Event(), Staging()
    runtime.at_register = lambda: may_lock.wait(120)
    staging.reserve(pieces(1))
    staging.prepare()
    assert not runtime.locked  # and yet the call has returned
    may_lock.set()
    [copy] = staging.copy(pieces(2))
    assert torch.equal(copy.tensor, torch.full((10_000,), 2.0))
    assert runtime.threads == ["shoal touch"]
    assert len(runtime.locked) == 1


def test_a_save_that_comes_before_the_memory_is_ready_is_right(runtime):
    staging = Staging()
    runtime.at_register = lambda: threading.Event().wait(0.1)
    for value in range(1, 4):
        staging.reserve(pieces(value, 10_000 * value))  # it outgrows its memory
        staging.prepare()
        [copy] = staging.copy(pieces(value, 10_000 * value))
        assert copy.tensor.shape == (10_000 * value,)
        assert copy.tensor.eq(value).all()
    del copy
    assert len(runtime.locked) == 1


def test_a_save_for_which_nobody_prepared_is_locked_too_and_later_ones_are_not_again(runtime):
    staging = Staging()
    for value in (1, 2):
        staging.reserve(pieces(value))
        [copy] = staging.copy(pieces(value))
        staging.prepare()  # touches nothing that is in use
        staging._wait()
        assert copy.tensor.eq(value).all()
    assert runtime.threads == ["shoal touch"]
    del copy
    staging.release()
    assert not runtime.locked


def test_a_state_on_the_cpu_is_not_locked(runtime):
    staging, state = Staging(), [Piece.whole("a", torch.ones(1000))]
    staging.reserve(state)
    staging.prepare()
    staging.copy(state)
    assert not runtime.threads


def test_a_copy_of_a_state_on_the_cpu_waits_until_its_memory_is_touched():
    staging, state = Staging(), [Piece.whole("a", torch.full((1000,), 3.0))]
    staging.reserve(state)

    def touch_late(pages):
        threading.Event().wait(0.1)
        pages.tensor.zero_()

    staging._touch_and_lock = touch_late
    staging.prepare()
    [copy] = staging.copy(state)
    staging.release()
    assert copy.tensor.eq(3).all()
