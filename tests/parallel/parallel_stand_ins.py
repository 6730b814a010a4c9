"""A small model, its batches, and a recorder that keeps what it is told."""

from contextlib import nullcontext

import torch
import torch.distributed as dist

from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import parallelize
from shoal.record import Recorder
from shoal.record.recorder import OpenSpan
from shoal.spec.timeline import Kind

SHARDS = ["none", "zero1", "zero2", "zero3", "zero3-once"]
SHAPE = TransformerConfig(vocab_size=64, layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, seq=16)


class ListRecorder(Recorder):
    """Keeps kind, name, bytes and group of every collective."""

    def __init__(self):
        self.collectives = []

    def span(self, kind, name="", *, lane=None, bytes=0, group=(), purpose=""):
        return nullcontext()

    def open(self, kind, name="", *, lane, bytes=0, group=(), purpose=""):
        if kind == Kind.COLLECTIVE:
            self.collectives.append((name.split(":")[0], bytes, group))
        return ClosedSpan()

    def step(self, index):
        return nullcontext()

    def close(self):
        pass


class ClosedSpan(OpenSpan):
    def close(self, at=None, algorithm=""):
        pass


def tokens(rank=0):
    return torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(rank))


def transformer():
    model = Transformer(SHAPE)
    model.initialize(0)
    return model


def one_step(parallel, batch):
    loss = next_token_loss(parallel(batch[:, :-1]), batch[:, 1:])
    loss.backward()
    return loss


def evaluate(text):
    parallel = parallelize(transformer(), text)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    one_step(parallel, tokens(dist.get_rank()))
    optimizer.step()
    with torch.no_grad():
        return parallel(tokens()[:, :-1])


def owned_parts(parallel):
    """Copies of what a rank owns, as `assembled` takes them."""
    return [
        (each.name, each.shape, each.start, each.stop, each.cut, each.local.detach().clone())
        for each in parallel.owned
    ]


def assembled(ranks):
    """The whole parameters, out of what the ranks own."""
    whole = {}
    for owned in ranks:
        for name, shape, start, stop, cut, part in owned:
            value = whole.setdefault(name, torch.full(shape, torch.nan))
            block = value if cut is None else cut.of(value)
            flat = block.flatten()
            flat[start:stop] = part.flatten()
            block.copy_(flat.view(block.shape))
    return whole


def assert_same_training(results, expected, owned):
    """That ranks have the losses and norms `expected`, and together the parameters that one process owns."""
    for losses, _ in results:
        # fp32 sums in another order, over a few steps of AdamW
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    reference = assembled([owned])
    whole = assembled([parts for _, parts in results])
    assert whole.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(
            whole[name], value, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
