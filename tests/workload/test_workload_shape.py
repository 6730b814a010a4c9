"""Work that follows from a shape, against the formulas of papers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.spec.workload import Attention, Keep, Part, Product, Saved, shape, workload_of

GPT = shape("gpt3-13b")


@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 8),
    width=st.sampled_from([32, 64, 128]),
    seq=st.integers(1, 4096),
    vocab=st.integers(1, 60_000),
)
def test_flop_of_a_gpt_are_those_of_korthikanti_without_recompute(layers, heads, width, seq, vocab):
    hidden = heads * width
    each = GPT.replace(layers=layers, heads=heads, hidden=hidden, ffn=4 * hidden, seq=seq, vocab=vocab)
    # 72 B L s h^2 (1 + s/6h + V/12Lh), of one sample, in whole numbers
    assert workload_of(each).training_flop == 6 * seq * hidden * (
        12 * layers * hidden + 2 * layers * seq + vocab
    )


@given(heads=st.integers(2, 64), seq=st.sampled_from([512, 2048, 8192]))
def test_a_gpt_layer_keeps_korthikantis_bytes(heads, seq):
    hidden = heads * 64
    each = GPT.replace(heads=heads, hidden=hidden, ffn=4 * hidden, seq=seq, fused_attention=False)
    layer = workload_of(each).layers[0]
    # The paper leaves out the means and deviations of two norms, four numbers of 4 bytes for each token.
    assert layer.kept("none", 2) - 16 * seq == seq * hidden * 34 + 5 * heads * seq**2
    assert layer.kept("full", 2) == 2 * seq * hidden


def test_fused_attention_keeps_no_scores_but_a_sum_for_each_row():
    fused, unfused = (workload_of(GPT.replace(fused_attention=each)).layers[0] for each in (True, False))
    scores, sums = 5 * GPT.heads * GPT.seq**2, 4 * GPT.heads * GPT.seq
    assert unfused.kept("none", 2) - fused.kept("none", 2) == scores - sums


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-13b", "mixtral-8x7b", "deepseek-v3"])
def test_recompute_keeps_less_the_more_it_computes_again(name):
    for layer in workload_of(shape(name)).layers[::20]:
        assert layer.kept("none", 2) > layer.kept("selective", 2) > layer.kept("full", 2)


def test_a_token_goes_to_its_experts_alone():
    dense, experts = shape("llama3-8b"), shape("llama3-8b").replace(experts=16, experts_per_token=2)
    plain, mixed = workload_of(dense).layers[0], workload_of(experts).layers[0]
    feed_forward = 3 * 2 * dense.seq * dense.hidden * dense.ffn
    router = 2 * dense.seq * dense.hidden * experts.experts
    assert mixed.flop - plain.flop == feed_forward + router
    assert mixed.parameters.experts == 16 * 3 * dense.hidden * dense.ffn
    assert mixed.routed == 2 * dense.seq * dense.hidden


def test_a_capacity_below_an_even_share_drops_choices_and_one_above_does_not():
    whole, above, half = (
        workload_of(shape("mixtral-8x7b").replace(capacity=each)).layers[0] for each in (None, 1.25, 0.5)
    )
    assert above.flop == whole.flop
    assert half.routed == whole.routed / 2


def test_shared_experts_work_on_every_token_and_first_layers_are_dense():
    each = shape("deepseek-v3")
    workload = workload_of(each)
    assert all(layer.parameters.experts == 0 for layer in workload.layers[:3])
    assert all(layer.parameters.experts > 0 for layer in workload.layers[3:])
    without = workload_of(each.replace(shared_experts=0)).layers[-1]
    assert workload.layers[-1].flop - without.flop == 3 * 2 * each.seq * each.hidden * 2048


def test_latent_attention_attends_with_wider_keys_than_values():
    (attention,) = workload_of(shape("deepseek-v3")).layers[0].attentions
    assert (attention.key_width, attention.value_width) == (192, 128)


def test_equal_layers_are_one_object():
    assert len(set(map(id, workload_of(shape("llama3-70b")).layers))) == 1


def test_an_image_model_embeds_patches_and_its_loss_is_of_one_token():
    workload = workload_of(shape("vit-b"))
    (patches,) = (each for each in workload.embedding.operations if isinstance(each, Product))
    assert (patches.rows, patches.inputs, patches.outputs) == (14 * 14, 3 * 16 * 16, 768)
    assert workload.end.flop == 2 * 768 * 1000
    assert not any(attention.causal for attention in workload.layers[0].attentions)


def test_bert_predicts_the_masked_tokens_alone():
    end = workload_of(shape("bert-base")).end
    head = next(each for each in end.operations if isinstance(each, Product) and each.name == "head")
    assert head.rows == round(0.15 * 512)


def test_attention_counts_the_whole_square():
    assert (
        Attention(8, 4, 2, 16, 16).flop == Attention(8, 4, 4, 16, 16, causal=False).flop == 2 * 2 * 8 * 8 * 64
    )


def test_a_copy_is_there_only_where_another_type_computes():
    copy = Saved("copy", 10, Part.WHOLE, width=4, copied=True)
    assert (copy.nbytes(2), copy.nbytes(4)) == (40, 0)


def test_each_keep_says_under_which_recompute():
    under = {each: [each.under(policy) for policy in ("none", "selective", "full")] for each in Keep}
    assert under == {
        Keep.ALWAYS: [True, True, True],
        Keep.START: [False, True, True],
        Keep.RESULTS: [True, True, False],
        Keep.SELECTIVE: [False, True, False],
        Keep.REST: [True, False, False],
    }
