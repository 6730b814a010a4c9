"""The pieces of a checkpoint: together the ranks save each element once, under any layout."""

from __future__ import annotations

import collections
import math
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.checkpoint import TensorRecord
from shoal.train.snapshot import random_state, set_random_state
from shoal.train.state import optimizer_to_load, pieces_to_load, pieces_to_save

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6)


class Place:
    """A rank's place on an axis."""

    def __init__(self, size, index):
        self.size, self.index = size, index


class FrozenPart(nn.Module):
    """Of the two kinds of tensors that are saved and not trained."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2, 2))


def rank_of(shapes, shards, replicas, shard, replica):
    """A rank's rows of parameters of these shapes, as `Parallel` tells of them, and its optimizer."""
    family = SimpleNamespace(replicate=Place(replicas, replica), tied_ranks=None)
    owned = []
    for number, shape in enumerate(shapes):
        rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        first, last = (min(place * -(-rows // shards), rows) for place in (shard, shard + 1))
        held = nn.Parameter(torch.zeros(last - first, *shape[1:]) if shape else torch.zeros(last - first))
        owned.append(
            SimpleNamespace(
                name=f"parameter{number}",
                shape=shape,
                start=first * row,
                stop=last * row,
                parameter=held,
                local=held.detach(),
                family=family,
                cut=None,
                is_first=first == 0,
            )
        )
    is_first = shard == replica == 0
    parameters = [each.parameter for each in owned]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    module = FrozenPart()
    frozen = SimpleNamespace(
        name="scale",
        shape=(3,),
        start=0,
        parameter=module.scale,
        local=module.scale.detach(),
        cut=None,
        is_first_copy=is_first,
    )
    buffers = {"mean": module.mean}
    parallel = SimpleNamespace(
        owned=owned,
        frozen=[frozen],
        module=module,
        buffers_to_save=lambda: buffers if is_first else {},
        saved_buffers=lambda: buffers,
    )
    return parallel, optimizer


@given(SHAPES, st.integers(1, 4), st.integers(1, 3))
def test_the_ranks_save_each_element_of_the_state_once(shapes, shards, replicas):
    saved = collections.defaultdict(list)
    sizes = {}
    for shard in range(shards):
        for replica in range(replicas):
            for piece in pieces_to_save(*rank_of(shapes, shards, replicas, shard, replica)):
                saved[piece.name].append((piece.start, piece.stop))
                assert sizes.setdefault(piece.name, piece.shape) == piece.shape

    wanted = {"fixed/scale": (3,), "fixed/mean": (2, 2)}
    for number, shape in enumerate(shapes):
        wanted[f"optimizer-tensor/step/parameter{number}"] = ()
        for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            wanted[f"{kind}/parameter{number}"] = shape
    assert sizes == wanted
    for name, intervals in saved.items():
        bounds = [
            0,
            *(bound for interval in sorted(intervals) for bound in interval),
            math.prod(wanted[name]),
        ]
        assert bounds[::2] == bounds[1::2]  # each interval begins where the one before ends


@given(SHAPES, st.integers(1, 4), st.integers(1, 3))
def test_every_rank_reads_back_all_that_it_owns(shapes, shards, replicas):
    for shard in range(shards):
        parallel, optimizer = rank_of(shapes, shards, replicas, shard, replicas - 1)
        saved = {}
        for number, shape in enumerate(shapes):
            saved[f"optimizer-tensor/step/parameter{number}"] = TensorRecord("F32", (), ())
            saved[f"optimizer/exp_avg/parameter{number}"] = TensorRecord("F32", shape, ())
            saved[f"optimizer-number/beats/parameter{number}"] = TensorRecord("I64", (), ())
        wanted = optimizer_to_load(parallel, optimizer, saved)
        model = pieces_to_load(parallel)
        assert [*model.fresh, *wanted.in_use] == []
        read = {
            (piece.name, piece.start, piece.stop): piece.tensor for piece in [*model.in_use, *wanted.fresh]
        }
        assert all("beats" not in state for state in optimizer.state.values())  # until it is read
        wanted.finish()
        for owned in filter(lambda owned: owned.start < owned.stop, parallel.owned):
            state = optimizer.state[owned.parameter]
            for kind, tensor in (("model", owned.parameter), ("optimizer/exp_avg", state["exp_avg"])):
                piece = read[f"{kind}/{owned.name}", owned.start, owned.stop]
                assert piece.data_ptr() == tensor.data_ptr()
            step = read[f"optimizer-tensor/step/{owned.name}", 0, 1]
            assert step.data_ptr() == state["step"].data_ptr()
            assert state.keys() == {"step", "exp_avg", "beats"}
            assert type(state["beats"]) is int
        assert ("fixed/scale", 0, 3) in read


@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_random_generators_go_on_from_where_they_were(seed, odd):
    import random

    def draw():
        return random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3).tolist()

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    for _ in range(odd):  # of the two normals that a generator makes at a time, one may be kept
        random.gauss(0, 1)
        np.random.standard_normal()
    state = {name: tensor.clone() for name, tensor in random_state().items()}
    expected = draw()
    draw()
    set_random_state(state)
    assert draw() == expected


def test_the_state_of_generators_has_the_same_shapes_at_all_times():
    before = {name: (tensor.shape, tensor.dtype) for name, tensor in random_state().items()}
    torch.rand(1000)
    np.random.standard_normal(3)
    assert before == {name: (tensor.shape, tensor.dtype) for name, tensor in random_state().items()}
