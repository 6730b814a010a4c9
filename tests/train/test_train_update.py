"""An optimizer's step that the device clips or leaves out, beside torch's own clipping."""

import pytest
import torch
from torch import nn

from shoal.parallel import parallelize
from shoal.train.optimizer_step import Update

CLIP = 0.5


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3, float("nan"), float("inf")])
def test_gradients_above_the_limit_are_scaled_down_and_those_that_are_not_finite_change_nothing(fused, size):
    """SGD's step is as long as its gradient, so that it shows what the gradient was scaled by."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    parallel = parallelize(model, "dp=1")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, fused=fused) for each in (parallel, plain)]
    for each in (parallel, plain):
        (each(torch.ones(4, 3)).sum() * size).backward()
    update = Update(parallel, optimizers[0], CLIP)
    assert update.is_on_device is fused
    norm = parallel.measure_gradient().whole
    is_finite = update.make(torch.tensor(1.0), norm)
    if size == size and size != float("inf"):
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizers[1].step()
    assert is_finite.item() is bool(torch.isfinite(torch.tensor(size)))
    for name, value in plain.named_parameters():
        # torch adds 1e-6 to the norm that it divides by
        torch.testing.assert_close(model.get_parameter(name), value, rtol=1e-5, atol=1e-6)
    assert not {"found_inf", "grad_scale"} & set(vars(optimizers[0]))
