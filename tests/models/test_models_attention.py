"""Grouped-query attention whose kernel takes no shared keys, as on GPUs in fp32 or with a mask."""

import contextlib
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.models import Documents, attention
from shoal.models.attention import causal_attention

POSITIONS = torch.cat([torch.arange(length) for length in (5, 7, 12)]).expand(2, -1)


def inputs(heads, kv_heads):
    generator = torch.Generator().manual_seed(heads)
    return [
        torch.randn(2, 24, count, 8, dtype=torch.float64, generator=generator)
        .transpose(1, 2)
        .requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]


def plain(query, key, value, seen):
    """Attention as it is defined."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.fixture(params=[True, False], ids=["shared", "repeated"])
def shares(request, monkeypatch):
    monkeypatch.setattr(attention, "_kernel_shares_keys", lambda *asked: request.param)
    return request.param


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (3, 3)])
def test_attention_is_that_of_the_definition_with_its_gradients(shares, heads, kv_heads, is_masked):
    given = inputs(heads, kv_heads)
    documents = Documents(POSITIONS) if is_masked else None
    seen = documents.mask() if is_masked else torch.ones(24, 24, dtype=torch.bool).tril()
    found, expected = causal_attention(*given, documents), plain(*given, seen)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), given),
        torch.autograd.grad(expected.square().sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_kernel_that_shares_no_keys_gets_one_for_each_query_head(monkeypatch, shares, kv_heads):
    calls, operator = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda query, key, value, **named: (
            calls.append((key.shape[1], value.shape[1], named["enable_gqa"]))
            or operator(query, key, value, **named)
        ),
    )
    causal_attention(*inputs(4, kv_heads))
    # Some kernels refuse `enable_gqa` even where there is nothing to share.
    assert calls == [(kv_heads, kv_heads, True) if shares and kv_heads < 4 else (4, 4, False)]


@pytest.mark.parametrize("is_masked", [False, True])
def test_torch_is_asked_which_kernel_it_would_run(monkeypatch, is_masked):
    asked = []

    def choice(query, key, value, mask, dropout, is_causal, *, enable_gqa):
        asked.append(
            (query.shape[1], key.shape[1], query.requires_grad, mask is not None, is_causal, enable_gqa)
        )
        return SDPBackend.MATH.value

    given = (torch.device("cpu"), torch.float32, 4, 2, 16, is_masked, attention._switches())
    attention._chosen.cache_clear()
    with torch.inference_mode():
        assert attention._chosen(*given) == SDPBackend.FLASH_ATTENTION
    attention._chosen.cache_clear()
    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    for _ in range(2):
        assert attention._chosen(*given) == SDPBackend.MATH
    assert asked == [(4, 2, True, is_masked, not is_masked, True)]
    attention._chosen.cache_clear()


@pytest.mark.parametrize("verdict", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_gpu_shares_keys_where_not_all_scores_would_be_in_memory(monkeypatch, verdict):
    monkeypatch.setattr(attention, "_chosen", lambda *asked: verdict)
    asked = (torch.float32, 4, 2, 16, False)
    assert attention._kernel_shares_keys(torch.device("cuda"), *asked) == (verdict != SDPBackend.MATH)
    assert attention._kernel_shares_keys(torch.device("cpu"), *asked)


@contextlib.contextmanager
def deterministic(*, warn_only):
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


DETERMINISTIC = [partial(deterministic, warn_only=False), partial(deterministic, warn_only=True)]
ALLOWED = [
    [SDPBackend.MATH],
    [SDPBackend.FLASH_ATTENTION],
    [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
]
SWITCHED = [*DETERMINISTIC, *(partial(sdpa_kernel, each) for each in ALLOWED)]


def on_a_gpu(monkeypatch):
    """Answers of a stand-in for a GPU, whose kernel shares keys as long as nothing is switched."""
    given, answers = attention._switches(), []
    monkeypatch.setattr(
        torch,
        "_fused_sdp_choice",
        lambda *asked, **named: (
            answers.append(SDPBackend.FLASH_ATTENTION if attention._switches() == given else SDPBackend.MATH)
            or answers[-1].value
        ),
    )
    kernel_shares_keys, chosen = attention._kernel_shares_keys, attention._chosen
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(attention, "_chosen", lambda device, *asked: chosen(cpu, *asked))
    monkeypatch.setattr(
        attention,
        "_kernel_shares_keys",
        torch.compiler.assume_constant_result(lambda device, *asked: kernel_shares_keys(cuda, *asked)),
    )
    chosen.cache_clear()
    return answers


@pytest.mark.parametrize("switch", SWITCHED)
def test_an_answer_holds_for_what_was_switched_when_torch_gave_it(monkeypatch, switch):
    answers = on_a_gpu(monkeypatch)
    for _ in range(2):
        causal_attention(*inputs(4, 2))
        with switch():
            causal_attention(*inputs(4, 2))
    assert answers == [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


@pytest.mark.parametrize("switch", DETERMINISTIC)
def test_a_graph_is_not_run_once_determinism_has_changed_its_answer(monkeypatch, switch):
    answers = on_a_gpu(monkeypatch)
    graphs = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(causal_attention, backend=graphs, fullgraph=True)
    given = inputs(4, 2)
    compiled(*given)
    with switch():
        compiled(*given)
    assert answers == [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    assert graphs.frame_count == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("verdict", [True, False])
def test_attention_compiles_to_one_graph(monkeypatch, verdict):
    asked = []
    monkeypatch.setattr(
        attention,
        "_kernel_shares_keys",
        torch.compiler.assume_constant_result(lambda *given: asked.append(given) or verdict),
    )
    torch._dynamo.reset()
    compiled = torch.compile(causal_attention, backend="aot_eager", fullgraph=True)
    given = inputs(4, 2)
    torch.testing.assert_close(compiled(*given), causal_attention(*given))
    assert asked[0] == (torch.device("cpu"), torch.float64, 4, 2, 8, False)
    torch._dynamo.reset()


def test_under_autocast_the_kernel_is_that_of_autocasts_dtype(monkeypatch):
    asked = []
    monkeypatch.setattr(attention, "_kernel_shares_keys", lambda *given: asked.append(given[1]) or True)
    given = [each.detach().float() for each in inputs(4, 2)]
    with torch.autocast("cpu", torch.bfloat16):
        causal_attention(*given)
    assert asked == [torch.bfloat16]
