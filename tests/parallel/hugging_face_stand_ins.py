"""Small Hugging Face models, and their training under a Plan beside that in one process."""

import pytest
import torch
from parallel_stand_ins import assembled, owned_parts
from torch import nn

from shoal.models import next_token_loss
from shoal.parallel import parallelize
from shoal.spec.plan import Plan

transformers = pytest.importorskip("transformers")

STEPS, BATCH, SEQ = 3, 4, 16
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ,
    "use_cache": False,
}


def build(kind, changes):
    config = transformers.AutoConfig.for_model(kind, **(SHAPE | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # they begin at zero, which would hide one that is added twice
            nn.init.normal_(parameter)
    return model


def train(kind, plan, changes):
    """Losses and gradient norms by step, and the weights at the end, which are whole on every rank."""
    parallel = parallelize(build(kind, changes), plan)
    # Adam would divide a wrong factor out, and make rounding of gradients near zero large.
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.2, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    results = []
    for _ in range(STEPS):
        tokens = parallel.local(torch.randint(SHAPE["vocab_size"], (BATCH, SEQ + 1), generator=generator))
        inputs, targets = (parallel.local_sequence(each) for each in (tokens[:, :-1], tokens[:, 1:]))
        loss = next_token_loss(parallel(inputs), targets)
        loss.backward()
        norm = parallel.gradient_norm()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        parallel.axes.data.all_reduce(total, "loss").wait()
        results.append((total.item() / parallel.axes.data.size, norm))
    return results, owned_parts(parallel)


class Alone:
    """Trainings in one process, each done once."""

    def __init__(self):
        self._known = {}

    def __call__(self, kind, plan, changes):
        key = (kind, plan, *sorted(changes.items()))
        if key not in self._known:
            self._known[key] = train(kind, plan, changes)
        return self._known[key]


def check(ranks, alone, kind, plan, **changes):
    """Trains under a Plan, and compares losses, norms and weights with those of one process."""
    precision = Plan.parse(plan).precision
    results = ranks.run(train, Plan.parse(plan).ranks, kind, plan, changes)
    expected, owned = alone(kind, f"dp=1,precision={precision}", changes)
    # Sums in another order, over a few steps. Of bf16, a gradient's own rounding is up to 2^-8 of it, and
    # weights take steps of 0.2 of gradients that are 0.01 to 0.1 large.
    rtol, atol = {"fp32": (1e-4, 1e-5), "bf16": (2e-2, 1e-3)}[precision]
    for losses, _ in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=rtol, atol=atol)
    reference, whole = assembled([owned]), assembled([parts for _, parts in results])
    assert whole.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(
            whole[name], value, rtol=rtol, atol=2 * atol, msg=lambda text, name=name: f"{name}: {text}"
        )
