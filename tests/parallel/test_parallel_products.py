"""Products that are split over ranks, against `torch.nn.functional.linear` on one device."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parallel_stand_ins import ListRecorder, one_step, tokens, transformer

from shoal.errors import PlanError
from shoal.models import next_token_loss
from shoal.parallel import Axis, parallelize
from shoal.parallel.compiled import compile_blocks
from shoal.parallel.tensor.parallel_linear import column_products, row_product
from shoal.record import NullRecorder
from shoal.spec.plan import Plan

SEQ, WIDTH, OUTS = 8, 24, (16, 8, 32)  # multiples of 4 ranks


def axis():
    if not dist.is_initialized():
        return Axis("tp", (0,), 0, None, NullRecorder())
    return Axis("tp", tuple(range(dist.get_world_size())), dist.get_rank(), None, NullRecorder())


def drawn(*shape, seed, dtype=torch.float32):
    """Integers over 8, so that products of few of them are exact in fp32 whatever the order of sums."""
    whole = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed))
    return (whole / 8).to(dtype)


def part(tensor, dim, over):
    return tensor.detach().chunk(over.size, dim)[over.index].clone()


def leaf(tensor):
    return tensor.clone().requires_grad_()


def gradients(results, inputs, seeds):
    torch.autograd.backward(results, seeds)
    return [None if tensor is None else tensor.grad for tensor in inputs]


def columns(batch, dtype, sequence, overlap, with_bias, frozen):
    """Results and gradients of this rank's part, beside the same parts of one device's."""
    tp = axis()
    hidden = drawn(batch, SEQ, WIDTH, seed=0, dtype=dtype)
    weights = [drawn(out, WIDTH, seed=1 + out, dtype=dtype) for out in OUTS]
    biases = [drawn(out, seed=2 + out, dtype=dtype) if with_bias else None for out in OUTS]
    seeds = [drawn(batch, SEQ, out, seed=3 + out, dtype=dtype) for out in OUTS]

    whole = [leaf(hidden), *map(leaf, weights), *(leaf(bias) for bias in biases if with_bias)]
    plain = [F.linear(whole[0], whole[1 + i], whole[4 + i] if with_bias else None) for i in range(len(OUTS))]
    expected = [part(result, 2, tp) for result in plain]
    wanted = gradients(plain, whole, seeds)
    wanted = [part(wanted[0], 1, tp) if sequence else wanted[0], *(part(each, 0, tp) for each in wanted[1:])]

    own = [leaf(part(hidden, 1, tp) if sequence else hidden)]
    own += [leaf(part(each, 0, tp)) for each in [*weights, *(bias for bias in biases if with_bias)]]
    if frozen:
        own[1].requires_grad_(False)
        wanted[1] = None
    results = column_products(
        own[0], own[1:4], tp, sequence=sequence, overlap=overlap, biases=own[4:] if with_bias else None
    )
    found = gradients(results, own, [part(seed, 2, tp) for seed in seeds])
    return [result.detach() for result in results], expected, found, wanted


def row(batch, dtype, sequence, overlap, with_bias, frozen):
    tp = axis()
    hidden = drawn(batch, SEQ, WIDTH, seed=0, dtype=dtype)
    weight, bias = drawn(16, WIDTH, seed=1, dtype=dtype), drawn(16, seed=2, dtype=dtype)
    seed = drawn(batch, SEQ, 16, seed=3, dtype=dtype)

    whole = [leaf(hidden), leaf(weight), leaf(bias)]
    plain = F.linear(whole[0], whole[1], whole[2] if with_bias else None)
    expected = part(plain, 1, tp) if sequence else plain.detach()
    wanted = gradients([plain], whole, [seed])
    wanted = [part(wanted[0], 2, tp), part(wanted[1], 1, tp), wanted[2]]

    own = [leaf(part(hidden, 2, tp)), leaf(part(weight, 1, tp)), leaf(bias)]
    if frozen:
        own[1].requires_grad_(False)
        wanted[1] = None
    result = row_product(
        own[0], own[1], tp, sequence=sequence, overlap=overlap, bias=own[2] if with_bias else None
    )
    found = gradients([result], own, [part(seed, 1, tp) if sequence else seed])
    if with_bias and sequence:
        tp.all_reduce(found[2], "bias").wait()
    return [result.detach()], [expected], found, wanted


CASES = [
    (batch, sequence, overlap, with_bias, frozen)
    for sequence in (False, True)
    for overlap in (False, True)
    for batch, with_bias, frozen in ((1, False, False), (3, True, False), (3, False, True))
]


def every_case(product, dtype):
    return [product(batch, dtype, *settings) for batch, *settings in CASES]


def require_close(found, expected, **tolerance):
    for (case, one), (_, other) in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance, msg=lambda text, case=case: f"{case}: {text}")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("product", [columns, row])
def test_a_split_product_is_that_of_one_device(ranks, product, size):
    for results in ranks.run(every_case, size, product, torch.float32):
        for case, (found, expected, found_gradients, wanted) in zip(CASES, results, strict=True):
            name = f"batch, sequence, overlap, bias, frozen = {case}"
            # Every number is a multiple of 1/64 below 2**10: fp32 rounds nothing.
            require_close([(name, found)], [(name, expected)], rtol=0, atol=0)
            require_close([(name, found_gradients)], [(name, wanted)], rtol=0, atol=0)


@pytest.mark.parametrize("product", [columns, row])
def test_a_split_product_in_bf16_is_that_of_one_device(ranks, product):
    for results in ranks.run(every_case, 4, product, torch.bfloat16):
        for found, expected, found_gradients, wanted in results:
            for one, other in zip([*found, *found_gradients], [*expected, *wanted], strict=True):
                if other is None:
                    assert one is None
                    continue
                # Four partial sums and three sums of them are each rounded to 8 bits; none is larger than
                # twice the largest result here.
                scale = other.abs().max().item()
                torch.testing.assert_close(one, other, rtol=0, atol=7 * 2**-9 * 2 * scale)


def block(hidden, gate, up, down, tp, sequence, overlap):
    left, right = column_products(hidden, [gate, up], tp, sequence=sequence, overlap=overlap)
    return hidden + row_product(F.silu(left) * right, down, tp, sequence=sequence, overlap=overlap)


def two_blocks(policy, sequence, overlap):
    """Gradients of two blocks under a policy of recompute, and what is kept between forward and backward."""
    tp = axis()
    hidden = leaf(part(drawn(3, SEQ, WIDTH, seed=0), 1, tp) if sequence else drawn(3, SEQ, WIDTH, seed=0))
    up, down = drawn(32, WIDTH, seed=1), drawn(WIDTH, 32, seed=2)
    weights = [leaf(part(up, 0, tp)), leaf(part(up.flip(0), 0, tp)), leaf(part(down, 1, tp))]
    blocks = [Block(weights, tp, sequence, overlap) for _ in range(2)]
    compile_blocks(blocks, policy)
    result = blocks[1](blocks[0](hidden))
    return [result.detach(), *gradients([result], [hidden, *weights], [torch.ones_like(result)])]


class Block(torch.nn.Module):
    def __init__(self, weights, *settings):
        super().__init__()
        self.arguments = (*weights, *settings)

    def forward(self, hidden):
        return block(hidden, *self.arguments)


def every_recompute(policies):
    return [
        [two_blocks(policy, sequence, overlap) for policy in policies]
        for sequence in (False, True)
        for overlap in (False, True)
    ]


def test_recompute_changes_no_number(ranks):
    for results in ranks.run(every_recompute, 2, ["none", "full", "selective"]):
        for plain, *others in results:
            for other in others:
                torch.testing.assert_close(other, plain, rtol=0, atol=0)


def kept_elements(batch, sequence, overlap):
    """Elements that a column product keeps for backward, other than its weights."""
    tp = axis()
    hidden = drawn(batch, SEQ, WIDTH, seed=0)
    hidden = leaf(part(hidden, 1, tp) if sequence else hidden)
    weights = [leaf(part(drawn(out, WIDTH, seed=out), 0, tp)) for out in OUTS]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: kept.append(saved) or saved, lambda saved: saved
    ):
        column_products(hidden, weights, tp, sequence=sequence, overlap=overlap)
    return sum(saved.numel() for saved in kept) - sum(weight.numel() for weight in weights)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_gathered_is_not_kept(ranks, overlap):
    assert ranks.run(kept_elements, 2, 3, False, overlap) == [3 * SEQ * WIDTH] * 2
    assert ranks.run(kept_elements, 2, 3, True, overlap) == [3 * SEQ * WIDTH // 2] * 2


def communications(sequence, overlap):
    """Names of what was communicated, in forward and in backward."""
    tp, recorder = axis(), ListRecorder()
    recorded = Axis(tp.name, tp.members, tp.index, tp.group, recorder)
    hidden = leaf(drawn(1, SEQ // (tp.size if sequence else 1), WIDTH, seed=0))
    weights = [leaf(drawn(8, WIDTH, seed=1)), leaf(drawn(8, WIDTH, seed=2)), leaf(drawn(WIDTH, 8, seed=3))]
    result = block(hidden, *weights, recorded, sequence, overlap)
    forward = [name for name, _, _ in recorder.collectives]
    result.sum().backward()
    return forward, [name for name, _, _ in recorder.collectives[len(forward) :]]


def test_a_pair_of_products_communicates_as_the_papers_say(ranks):
    assert ranks.run(communications, 2, False, False)[0] == (["all_reduce"], ["all_reduce"])
    assert ranks.run(communications, 2, True, False)[0] == (
        ["all_gather", "reduce_scatter"],
        ["all_gather", "all_gather", "reduce_scatter"],
    )
    assert ranks.run(communications, 4, True, True)[0] == (
        ["shift"] * 6,
        ["shift"] * 3 + ["all_gather", "reduce_scatter"],
    )


def first_layer(sequence):
    """What backward communicates if the input needs no gradient, and the loss not all of the outputs."""
    tp, recorder = axis(), ListRecorder()
    recorded = Axis(tp.name, tp.members, tp.index, tp.group, recorder)
    hidden, weights = drawn(1, 4, WIDTH, seed=0), [leaf(drawn(8, WIDTH, seed=seed)) for seed in (1, 2)]
    result, _ = column_products(hidden, weights, recorded, sequence=sequence, overlap=False)
    recorder.collectives.clear()
    result.sum().backward()
    whole = torch.cat([hidden] * tp.size, 1) if sequence else hidden
    torch.testing.assert_close(weights[0].grad, whole.sum((0, 1)).expand(8, -1), rtol=0, atol=0)
    assert not weights[1].grad.any()
    return [name for name, _, _ in recorder.collectives]


def test_a_gradient_that_nobody_needs_is_not_communicated(ranks):
    assert ranks.run(first_layer, 2, False) == [[], []]
    assert ranks.run(first_layer, 2, True) == [["all_gather"]] * 2


def uneven_sequence():
    with pytest.raises(PlanError, match=r"a sequence of 7 tokens .*\n.*multiples of 2, such as 6 or 8"):
        row_product(drawn(1, 7, 4, seed=0), drawn(8, 4, seed=1), axis(), sequence=True, overlap=False)


def test_a_sequence_that_cannot_be_cut_is_refused(ranks):
    ranks.run(uneven_sequence, 2)


def autocast_step(plan):
    parallel = parallelize(transformer(), plan)
    with torch.autocast("cpu", torch.bfloat16):
        if parallel.plan.pp > 1:
            batch = tokens()
            pairs = [(batch[:, :-1], batch[:, 1:])]
            loss = parallel.forward_backward(iter(pairs), 1, next_token_loss)
            parallel.axes.pp.all_reduce(loss, "loss").wait()
        else:
            loss = one_step(parallel, tokens())
    return [loss.item(), parallel.gradient_norm()]


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,tensor=plain", "tp=2,pp=2,schedule=zb-h1"])
def test_under_autocast_a_split_model_computes_in_its_type_as_one_device_does(ranks, plan):
    wanted = autocast_step("dp=1")
    for found in ranks.run(autocast_step, Plan.parse(plan).ranks, plan):
        assert found == pytest.approx(wanted, rel=2**-8)  # bf16 rounds to 8 bits
