"""What the contestants of benchmarks/parallel.py compute, and what its tables say."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from contestants import Contestant, Task
from parallel import COMPARISONS, breakdown_row, result_row
from parallel_context import gathered_attention, torch_ring
from parallel_experts import keep_experts
from parallel_step import UntiedTask
from rounds import Burst
from torch import distributed as dist

from shoal.models import Mixture, preset
from shoal.parallel.context.positions import zigzag_positions
from shoal.spec.timeline import Kind, Lane, Span, Timeline

BATCH, HEADS, SEQ, WIDTH = 2, 2, 16, 8
ATTENTIONS = {"torch": torch_ring, "gathered": gathered_attention}


def attention_inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, HEADS, SEQ, WIDTH, generator=generator) for _ in range(4)]


def attend_in_parts(which):
    """This rank's part of the output and of the gradients of query, key and value."""
    here = zigzag_positions(SEQ, dist.get_world_size(), dist.get_rank())
    *operands, gradient = (each[:, :, here].contiguous() for each in attention_inputs())
    operands = [each.requires_grad_() for each in operands]
    output = ATTENTIONS[which](*operands)
    output.backward(gradient)
    return [output.detach(), *(each.grad for each in operands)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("which", ATTENTIONS)
def test_attention_of_the_peers_equals_full_attention(ranks, which, size):
    *operands, gradient = attention_inputs()
    operands = [each.requires_grad_() for each in operands]
    output = F.scaled_dot_product_attention(*operands, is_causal=True)
    output.backward(gradient)
    whole = [output.detach(), *(each.grad for each in operands)]
    for rank, parts in enumerate(ranks.run(attend_in_parts, size, which)):
        here = zigzag_positions(SEQ, size, rank)
        for part, expected in zip(parts, whole, strict=True):
            # fp32 sums over 16 positions, in another order
            torch.testing.assert_close(part, expected[:, :, here], rtol=1e-5, atol=1e-5)


def mixture():
    torch.manual_seed(0)
    return Mixture(preset("tiny-experts").model_copy(update={"hidden": 16, "expert_ffn": 8})).double()


def hidden_states(rank):
    return torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def run_loop():
    """The output, and the gradients of this rank's experts and router."""
    layer = mixture()
    kept = keep_experts(layer, dist.get_rank(), dist.get_world_size())
    output = layer(hidden_states(dist.get_rank()))
    output.square().sum().backward()
    return output.detach(), [each.grad for each in kept], layer.router.weight.grad


@pytest.mark.parametrize("size", [2, 4])
def test_the_plain_loop_over_experts_equals_one_device(ranks, size):
    layer = mixture()
    results = ranks.run(run_loop, size)
    for rank, (output, _, _) in enumerate(results):
        expected = layer(hidden_states(rank))
        expected.square().sum().backward()
        torch.testing.assert_close(output, expected.detach())
    for index, name in enumerate(("gate", "up", "down")):
        joined = torch.cat([kept[index] for _, kept, _ in results])
        torch.testing.assert_close(joined, getattr(layer, name).grad)
    torch.testing.assert_close(sum(router for _, _, router in results), layer.router.weight.grad)


def bursts(**milliseconds):
    return {
        name: [Burst([each * 1e-3], [2.0], 1 << 20) for each in times] for name, times in milliseconds.items()
    }


def test_a_row_has_the_efficiency_and_the_ratio_round_by_round():
    ours = Contestant("ours", None, "peer")
    ran = {"one rank": bursts(x=[100, 100, 100])["x"], **bursts(ours=[60, 50, 80], peer=[80, 100, 80])}
    row = result_row(ours, ran, 2)
    assert row == ["ours", "60.0", "50.0 to 80.0", "0.83", "0.750", "0.500 to 1.000", "peer", "1", "2.0000"]


def test_losses_that_are_not_one_ranks_show():
    ran = {"one rank": bursts(x=[100])["x"], "ours": [Burst([0.1], [2.01], 1)]}
    assert result_row(Contestant("ours", None), ran, 2)[-1] == "DIFFERS"


def test_a_breakdown_splits_communication_into_exposed_and_hidden():
    def span(rank, kind, start, stop, lane=Lane.COMPUTE, name="", group=()):
        return Span(rank, lane, kind, name, start, stop - start, 0, group)

    spans = []
    for rank in range(2):
        spans += [
            span(rank, Kind.STEP, 0.0, 0.1, name="0"),
            span(rank, Kind.FORWARD, 0.0, 0.09),
            span(rank, Kind.COLLECTIVE, 0.02, 0.05, Lane.COMMUNICATION, "all_reduce:x", (0, 1)),
            span(rank, Kind.WAIT, 0.04, 0.05, name="all_reduce:x"),
        ]
    row = breakdown_row("ours", Timeline(spans))
    # compute, exposed, straggler wait, other, hidden
    assert row[:6] == ["ours", "80.0", "10.0", "0.0", "10.0", "20.0"]
    assert row[6] == "10.0%"


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_peer_of_a_comparison_is_in_it(name):
    contestants = COMPARISONS[name].contestants
    names = [each.name for each in contestants]
    assert len(set(names)) == len(names)
    assert {each.peer for each in contestants if each.peer} <= set(names)
    assert not any("," in each for each in names)  # `--only` separates them so


def test_the_untied_model_is_as_long_as_the_sequence(tmp_path):
    long = preset("tiny").seq * 2
    assert UntiedTask("tiny", long, 1, 1, tmp_path).model().config.seq == long
    assert Task("tiny", long, 1, 1, tmp_path).model().config.seq == long // 2
