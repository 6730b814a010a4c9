"""What docs/concepts/parallelism.md says that a rank sends is what it does send."""

import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel import parallelize
from shoal.record import Recorder
from shoal.record.recorder import OpenSpan
from shoal.spec.timeline import Kind

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from sent import SENT, bytes_sent  # noqa: E402

RANKS = 4
BATCH, SEQ = 2, 16
SHAPE = {"vocab_size": 64, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 48, "seq": SEQ}
PLANS = {
    **{f"tensor={way}": f"tp={RANKS},tensor={way}" for way in ("plain", "sequence", "async")},
    **{f"context={way}": f"cp={RANKS},context={way}" for way in ("ring", "ulysses")},
    "ep": f"dp={RANKS},ep={RANKS}",
}
SHARE_SENT = {
    "all_reduce": 2 * (RANKS - 1) / RANKS,
    "all_gather": (RANKS - 1) / RANKS,
    "reduce_scatter": (RANKS - 1) / RANKS,
    "all_to_all": (RANKS - 1) / RANKS,  # choices that fall evenly
    "shift": 1,
}
"""Of the bytes that the Timeline counts, with ring algorithms."""

WITHIN_A_BLOCK = {
    "column",
    "row",
    "keys and values",
    "key and value gradients",
    "heads",
    "positions",
    "rows to experts",
    "rows from experts",
    "gradients to experts",
    "gradients from experts",
}


class CountingRecorder(Recorder):
    """Adds up what is sent, forward and backward."""

    def __init__(self):
        self.sent = Counter()
        self.direction = "forward"

    def span(self, kind, name="", *, lane=None, bytes=0, group=(), purpose=""):
        return nullcontext()

    def open(self, kind, name="", *, lane, bytes=0, group=(), purpose=""):
        operation, _, what = name.partition(":")
        if kind == Kind.COLLECTIVE and what in WITHIN_A_BLOCK:
            self.sent[self.direction] += bytes * SHARE_SENT[operation]
        return ClosedSpan()

    def step(self, index):
        return nullcontext()

    def close(self):
        pass


class ClosedSpan(OpenSpan):
    def close(self, at=None, algorithm=""):
        pass


def count_sent(plan, layers, experts):
    recorder = CountingRecorder()
    shape = TransformerConfig(**SHAPE, layers=layers, experts=experts)
    parallel = parallelize(Transformer(shape), plan, recorder=recorder)
    held = SEQ // RANKS if plan.startswith("cp") else SEQ
    tokens = torch.randint(64, (BATCH, held + 1), generator=torch.Generator().manual_seed(0))
    loss = next_token_loss(parallel(tokens[:, :-1]), tokens[:, 1:])
    recorder.direction = "backward"
    loss.backward()
    return recorder.sent


@pytest.mark.parametrize("strategy", SENT)
def test_a_block_sends_the_bytes_that_the_page_says(ranks, strategy):
    experts = 8 if strategy == "ep" else 0
    one, two = (ranks.run(count_sent, RANKS, PLANS[strategy], layers, experts) for layers in (1, 2))
    # Along dp every rank has samples of its own.
    tokens = BATCH * SEQ * (RANKS if strategy == "ep" else 1)
    shape = TransformerConfig(**SHAPE, layers=1)
    expected = [bytes_sent(formula, shape, ranks=RANKS, tokens=tokens, width=4) for formula in SENT[strategy]]
    # Experts send back what they got, so it is all ranks together that send what an even choice would.
    for way, nbytes in zip(("forward", "backward"), expected, strict=True):
        assert sum(b[way] - a[way] for a, b in zip(one, two, strict=True)) == RANKS * nbytes
