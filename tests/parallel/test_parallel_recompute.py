"""What recompute keeps from forward for backward, also where attention reaches over ranks."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.models import Transformer, TransformerConfig, next_token_loss
from shoal.parallel.communication import Axis
from shoal.parallel.compiled import compile_blocks
from shoal.parallel.context.context import context_parallel
from shoal.parallel.context.positions import local_sequence
from shoal.record import NullRecorder

SHAPE = TransformerConfig(vocab_size=17, layers=3, hidden=32, heads=4, kv_heads=4, ffn=96, seq=256)
BATCH = 2


def shared_axis():
    """One axis of all ranks, or of this process alone."""
    size, index = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return Axis("cp", tuple(range(size)), index, None, NullRecorder())


class Made(TorchDispatchMode):
    """Weak references to the storages that operators make, and how often each operator ran."""

    def __init__(self, given):
        super().__init__()
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.storages = {}
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls[function] = self.calls.get(function, 0) + 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.given:
                    self.storages[storage._cdata] = StorageWeakRef(storage)
        return result

    def live_bytes(self):
        gc.collect()
        found = (torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self.storages.values())
        return sum(storage.nbytes() for storage in found if storage is not None)


def kept_bytes(attention, policy):
    """What one forward keeps, and how often ring attention runs in a step."""
    axis, model = shared_axis(), Transformer(SHAPE)
    model.initialize(0)
    context_parallel(model, axis, attention)
    compile_blocks(list(model.blocks), policy)
    tokens = torch.randint(17, (BATCH, SHAPE.seq + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = (local_sequence(part, axis, attention) for part in (tokens[:, :-1], tokens[:, 1:]))
    with Made([*model.parameters(), inputs, targets]) as made:
        loss = next_token_loss(model(inputs), targets)
        kept = made.live_bytes()
        loss.backward()
    ring = torch.ops.shoal.ring_attention.default
    return kept, made.calls.get(ring, 0)


@pytest.fixture(scope="module")
def alone():
    return {policy: kept_bytes("ring", policy)[0] for policy in ("none", "selective", "full")}


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@pytest.mark.parametrize("size", [2, 4])
def test_what_recompute_keeps_falls_with_the_ranks(ranks, alone, attention, policy, size):
    # What does not fall: the random generators' states, 5 KB for each block.
    bound = alone[policy] / size + SHAPE.layers * 5100
    if (attention, policy) == ("ulysses", "none"):
        # Attention's output is kept by heads for its own backward, and by positions for the next layer's.
        bound += 4 * SHAPE.layers * BATCH * SHAPE.seq / size * SHAPE.hidden
    for kept, _ in ranks.run(kept_bytes, size, attention, policy):
        assert kept < 1.01 * bound


def test_selective_keeps_products_and_the_results_of_attention_alone(alone):
    tokens = BATCH * SHAPE.seq
    # Input, output; query, key, value; attention's output and log-sum-exp; gate and up.
    block = tokens * (6 * SHAPE.hidden + 2 * SHAPE.ffn + SHAPE.heads + SHAPE.hidden)
    end = tokens * (3 * SHAPE.hidden + SHAPE.vocab_size + 1)
    assert alone["selective"] == pytest.approx(4 * (3 * block + end), rel=0.02)


@pytest.mark.parametrize(("policy", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_goes_round_the_ring_once_in_forward(ranks, policy, times):
    for _, calls in ranks.run(kept_bytes, 2, "ring", policy):
        assert calls == times * SHAPE.layers
