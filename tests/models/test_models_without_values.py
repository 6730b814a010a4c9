"""Models on tensors that have shapes and no values: on the meta device, faked, and while exported."""

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shoal.models import Mixture, Transformer, TransformerConfig, token_keys
from shoal.models.dropout import Dropout

SHAPE = {"vocab_size": 31, "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "seq": 8}
TOKENS = torch.arange(16).view(2, 8)


def made(**changes):
    model = Transformer(TransformerConfig(**SHAPE | changes))
    model.initialize(0)
    return model


def operations(model, tokens):
    # The counter does not know a CPU's own kernel; on the meta device attention is plain products.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_operations_are_counted_on_the_meta_device(dropout):
    with torch.device("meta"):
        model = Transformer(TransformerConfig(**SHAPE, dropout=dropout))
    assert operations(model, TOKENS.to("meta")) == operations(made(), TOKENS)


def test_a_router_has_logits_on_the_meta_device():
    with torch.device("meta"):
        mixture = Mixture(TransformerConfig(**SHAPE, experts=4))
    assert mixture._logits(torch.empty(2, 8, 16, device="meta")).shape == (2, 8, 4)


@pytest.mark.parametrize(
    ("changes", "strict"),
    [
        ({"experts": 4}, False),
        ({"experts": 4, "capacity": 1.0}, False),
        ({"dropout": 0.1}, False),
        ({"dropout": 0.1}, True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*were assigned during export")
def test_a_model_is_exported(changes, strict):
    model = made(**changes)
    model.dropout_keys = token_keys(0, 0, torch.arange(2), torch.arange(8))
    exported = torch.export.export(model, (TOKENS,), strict=strict)
    torch.testing.assert_close(exported.module()(TOKENS), model(TOKENS))


def test_a_model_of_real_weights_runs_on_fake_ones():
    model = made(dropout=0.1)
    mode = FakeTensorMode()
    weights = {name: mode.from_tensor(weight) for name, weight in model.state_dict().items()}
    with mode:
        result = functional_call(model, weights, mode.from_tensor(TOKENS))
    assert result.shape == (2, 8, 31)


@pytest.mark.parametrize(
    "copied", [lambda layer: layer, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))]
)
@pytest.mark.parametrize("context", [FakeTensorMode, lambda: torch.device("meta")])
def test_a_dropout_that_was_made_among_fakes_drops_as_any_other(context, copied):
    keys, ones = token_keys(0, 0, torch.arange(4), torch.arange(8)), torch.ones(4, 8, 16)
    with context():
        layer = copied(Dropout(0.5, "layer"))
    for call in (layer, torch.compile(layer, backend="eager", fullgraph=True)):
        assert torch.equal(call(ones, keys), Dropout(0.5, "layer")(ones, keys))
    torch._dynamo.reset()
