"""What cannot be laid over ranks, and a step that cannot be run, are refused by name."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from shoal.errors import ConfigError, LayoutError, ModelError, PlanError
from shoal.parallel import parallelize


def net():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


@pytest.mark.parametrize("model", [None, [net()], nn.Linear])
def test_a_model_is_a_module(model):
    with pytest.raises(ModelError, match="as the model"):
        parallelize(model, "dp=1")


@pytest.mark.parametrize("plan", [None, {"dp": 1}, 1, "auto"])
def test_a_plan_is_a_plan_or_its_text(plan):
    with pytest.raises(PlanError, match="was given"):
        parallelize(net(), plan)


@pytest.mark.parametrize("again", [lambda laid: laid, lambda laid: laid.module, lambda laid: laid.module[0]])
def test_a_model_is_laid_over_ranks_once(again):
    laid = parallelize(net(), "dp=1")
    with pytest.raises(LayoutError, match="is laid over ranks already"):
        parallelize(nn.Sequential(again(laid)), "dp=1")


def test_a_model_that_torch_wraps_is_refused():
    with pytest.raises(LayoutError, match="by DataParallel"):
        parallelize(nn.DataParallel(net()), "dp=1")


@pytest.mark.parametrize("blocks", [["0"], [nn.Linear(2, 2)]])
def test_blocks_are_modules_of_the_model(blocks):
    with pytest.raises(ModelError, match="no module of the Sequential"):
        parallelize(net(), "dp=1", blocks=blocks)


@pytest.mark.parametrize("device", ["mps", "gpu"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ConfigError, match=f"device={device} was given"):
        parallelize(net(), "dp=1", device=device)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, targets: output - targets, r"shape \[2, 2\]"),
        (lambda output, targets: None, "a NoneType"),
        (lambda output, targets: 1.0, "a float"),
        (lambda output, targets: mse_loss(output.detach(), targets), "without a gradient"),
        ("mse", "cannot be called"),
    ],
)
def test_a_loss_is_one_number_with_a_gradient(loss, words):
    inputs = torch.randn(2, 2)
    with pytest.raises(ModelError, match=words):
        parallelize(net(), "dp=1").forward_backward(iter([(inputs, inputs)]), 1, loss)


@pytest.mark.parametrize(("count", "words"), [(0, "a step of 0"), (2, "more micro-batches than the 1")])
def test_a_step_has_as_many_micro_batches_as_it_takes(count, words):
    inputs = torch.randn(2, 2)
    with pytest.raises(ModelError, match=words):
        parallelize(net(), "dp=1").forward_backward(iter([(inputs, inputs)]), count, mse_loss)
