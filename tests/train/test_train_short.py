"""A training that is shorter than its warm-up is said."""

import warnings

import pytest
import torch

from shoal.train import OptimizerConfig
from shoal.train.learning_rate import RateCourse, learning_rate


def course(warmup: int, steps: int, **options: object) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    RateCourse(optimizer, OptimizerConfig(warmup=warmup), steps=steps, batch=16, **options)


def test_a_training_that_ends_within_its_warm_up_is_said() -> None:
    config = OptimizerConfig(warmup=50)
    share = learning_rate(config, step=29, steps=30, batch=16) / config.learning_rate
    with pytest.warns(UserWarning, match=f"steps=30 end within optimizer.warmup=50.*{share:.0%}"):
        course(50, 30)


def test_other_trainings_are_not() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        course(10, 30)
        course(50, 30, schedule=lambda step: 1.0)
