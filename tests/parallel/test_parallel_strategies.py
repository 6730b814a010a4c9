"""Every strategy trains as one process does, and as the naive reference does."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.parallel import parallelize
from shoal.spec.plan import SHARDINGS

STEPS, BATCH = 6, 8


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Odd sizes, so that shards cut through parameters; an embedding that the head shares."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 19)
        self.blocks = nn.ModuleList(Block(19) for _ in range(3))
        self.norm = nn.LayerNorm(19)
        self.head = nn.Linear(19, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randint(37, (BATCH, 11), generator=generator)


def train(text, microbatch, clip):
    torch.manual_seed(0)
    parallel = parallelize(Model(), text)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for batch in batches():
        micro = parallel.local(batch).split(microbatch)
        total = torch.zeros(())
        for index, tokens in enumerate(micro):
            logits = parallel(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / len(micro)
            total += loss.detach()
            if index + 1 < len(micro):
                with parallel.accumulate():
                    loss.backward()
            else:
                loss.backward()
        norm = parallel.clip_gradients(clip)
        optimizer.step()
        optimizer.zero_grad()
        parallel.axes.dp.all_reduce(total, "loss").wait()
        losses.append((total.item() / parallel.axes.dp.size, norm))
    with parallel.gathered():
        weights = {name: value.detach().clone() for name, value in parallel.module.named_parameters()}
    return losses, weights


def train_plainly(clip):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches():
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), norm.item()))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


LAYOUTS = [
    f"dp={ranks}{settings}"
    for ranks, settings in itertools.chain(
        itertools.product(
            (1, 2, 4),
            (
                "",
                ",exchange=naive",
                ",shard=zero1",
                ",shard=zero2",
                ",shard=zero3",
                ",shard=zero3-once",
                ",bucket=4KiB,shard=zero1",
            ),
        ),
        [(4, f",replicate=2,shard={shard}") for shard in ("zero1", "zero2", "zero3", "zero3-once")],
        [(2, ",recompute=full,shard=zero3"), (2, ",recompute=selective"), (2, ",replicate=2,shard=zero3")],
    )
]


@pytest.fixture(scope="module")
def plain():
    return train_plainly(clip=1.0)


@pytest.mark.parametrize(
    ("layout", "microbatch"),
    [*((layout, 2) for layout in LAYOUTS), *((layout, 1) for layout in LAYOUTS if layout.startswith("dp=2"))],
)
def test_every_layout_trains_as_one_process_does(ranks, plain, layout, microbatch):
    dp = int(layout[3])
    results = ranks.run(train, dp, layout, microbatch, 1.0)
    losses, weights = plain
    for result_losses, result_weights in results:
        # fp32 sums in another order, over 6 steps of AdamW
        torch.testing.assert_close(torch.tensor(result_losses), torch.tensor(losses), rtol=1e-4, atol=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(result_weights[name], value, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,shard=zero1", "dp=2,shard=zero2", "dp=2,shard=zero3"])
def test_bf16_trains_near_fp32(ranks, plain, layout):
    losses, _ = ranks.run(train, 2, layout + ",precision=bf16", 2, 1.0)[0]
    # bf16 has 8 bits: single losses differ by about a percent
    torch.testing.assert_close(torch.tensor(losses)[:, 0], torch.tensor(plain[0])[:, 0], rtol=0.02, atol=0)


@pytest.mark.parametrize(
    "layout", ["dp=2", "dp=2,shard=zero2", "dp=2,shard=zero3-once", "dp=4,replicate=2,shard=zero3"]
)
def test_gradients_that_travel_in_16_bits_are_rounded_and_no_more(ranks, plain, layout):
    losses, _ = ranks.run(train, int(layout[3]), layout + ",reduce=bf16", 2, 1.0)[0]
    # Each gradient is rounded by up to 0.4 %, weights stay in fp32.
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain[0]), rtol=5e-3, atol=0)
    assert losses != plain[0]


def test_every_layout_of_bf16_trains_alike(ranks):
    losses = [
        torch.tensor(ranks.run(train, 2, f"dp=2,precision=bf16,shard={shard}", 2, 1.0)[0][0])
        for shard in SHARDINGS
    ]
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=2e-3, atol=1e-4)
