"""Tensors in any nesting, and a module cast to another type."""

from collections import namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from shoal.errors import ModelError
from shoal.models import (
    SingleDevice,
    Task,
    build,
    build_or_task,
    cast_module,
    map_tensors,
    rows,
    sample_count,
)

Two = namedtuple("Two", "left right")


@dataclass
class Held:
    tensor: torch.Tensor
    more: list = field(default_factory=list)
    name: str = ""


def a_task():
    return Task(build=nn.ReLU, batch=lambda number: torch.ones(2), loss=lambda model, batch: batch.sum())


def test_tensors_are_mapped_in_any_nesting_and_all_else_is_kept():
    tensor = torch.arange(4)
    value = {"a": [tensor, (tensor, None)], "b": Held(tensor, [Two(tensor, 3)], "x"), "c": "word", "d": Held}
    mapped = map_tensors(lambda each: each + 1, value)
    assert torch.equal(mapped["a"][0], tensor + 1)
    assert torch.equal(mapped["a"][1][0], tensor + 1)
    assert mapped["a"][1][1] is None
    assert torch.equal(mapped["b"].tensor, tensor + 1)
    assert torch.equal(mapped["b"].more[0].left, tensor + 1)
    assert isinstance(mapped["b"].more[0], Two)
    assert (mapped["b"].name, mapped["c"], mapped["d"]) == ("x", "word", Held)
    assert torch.equal(value["b"].tensor, tensor)


def test_rows_are_taken_and_counted_along_the_first_dim():
    batch = {"x": torch.arange(6).view(3, 2), "name": "a", "y": [torch.arange(3)]}
    assert sample_count(batch) == 3
    assert sample_count({"name": "a"}) == 0
    assert torch.equal(rows(batch, 1, 3)["x"], batch["x"][1:])


def test_a_module_computes_in_a_wider_type_as_a_whole():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    cast_module(module, torch.float64)
    assert SingleDevice(module, torch.float64)(torch.ones(3, 2)).dtype == torch.float64
    assert module[1].running_mean.dtype == torch.float64
    assert module[1].num_batches_tracked.dtype == torch.int64


def test_in_a_narrower_type_buffers_and_batch_normalization_stay_as_they_are():
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("places", torch.arange(2.0))
            self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))

        def forward(self, inputs):
            return self.layers(inputs + self.places)

    module = Placed()
    weight = module.layers[0].weight
    cast_module(module, torch.bfloat16)
    assert SingleDevice(module, torch.bfloat16)(torch.ones(3, 2)).dtype == torch.bfloat16
    assert module.layers[0].weight is weight
    kept = (module.places, module.layers[1].weight, module.layers[1].running_var)
    assert {each.dtype for each in kept} == {torch.float32}


def test_a_factory_may_give_a_task_to_those_who_take_one():
    assert isinstance(build_or_task(f"{__name__}:a_task"), Task)
    with pytest.raises(ModelError, match="returned Task, which is not a"):
        build(f"{__name__}:a_task")
