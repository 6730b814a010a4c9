"""Arguments of the Trainer, of `shoal.save` and of `shoal.load` that cannot be used are refused by name."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import ConfigError, LayoutError, ModelError

DATA = TensorDataset(torch.randn(8, 2), torch.randn(8, 2))


def adam(model):
    return torch.optim.Adam(model.parameters())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": None}, ModelError, "a NoneType was given as the model"),
        ({"steps": 0}, ConfigError, "steps=0"),
        ({"loss": "mse"}, ConfigError, "loss='mse'"),
        ({"optimizer": "adamw"}, ConfigError, "a str was given as the optimizer"),
        ({"optimizer": adam(nn.Linear(2, 2))}, ConfigError, r"Optimization\(config, make="),
    ],
)
def test_a_trainer_refuses_arguments_that_it_cannot_use(changes, error, words):
    given = {"model": nn.Linear(2, 2), "steps": 1, "loss": nn.functional.mse_loss, **changes}
    with pytest.raises(error, match=words):
        shoal.Trainer(given.pop("model"), DATA, "dp=1", batch=4, **given)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (lambda laid: (nn.Linear(2, 2), None, 1), LayoutError, "not laid over ranks"),
        (lambda laid: (laid, torch.optim.Adam, 1), ConfigError, "Adam was given as the optimizer"),
        (lambda laid: (laid, adam(nn.Linear(2, 2)), 1), LayoutError, "none of the model's parameters"),
        (lambda laid: (laid, adam(laid), -1), ConfigError, "step=-1"),
        (lambda laid: (laid, adam(laid), "a"), ConfigError, "step='a'"),
    ],
)
def test_a_save_that_cannot_be_made_leaves_nothing(tmp_path, arguments, error, words):
    model, optimizer, step = arguments(shoal.parallelize(nn.Linear(2, 2), "dp=1"))
    with pytest.raises(error, match=words):
        shoal.save(tmp_path / "saved", model, optimizer, step=step)
    assert not (tmp_path / "saved").exists()


def test_a_load_into_a_model_that_is_not_laid_out_is_refused(tmp_path):
    with pytest.raises(LayoutError, match="not laid over ranks"):
        shoal.load(tmp_path, nn.Linear(2, 2))
