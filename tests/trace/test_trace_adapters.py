"""Models with adapters are traced as torch runs them, and as their shapes say."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trace_stand_ins import POLICIES, built, configuration, traced

from shoal.models import add_adapters, next_token_loss
from shoal.spec.workload import Product, transformer_shape, with_adapters, workload_of


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("targets", [["all-linear"], ["query", "value"], ["attention.output", "up", "down"]])
def test_a_model_with_adapters_and_its_shape_with_adapters_give_the_same_work(dropout, targets):
    pytest.importorskip("peft")
    config = configuration(layers=3)
    model = built(config)
    add_adapters(model, rank=2, alpha=4, targets=targets, dropout=dropout, seed=0)
    found = traced(model, config.seq, precision="fp32")
    whole = workload_of(transformer_shape(config.model_dump()).replace(fused_passes=False))
    expected = with_adapters(whole, 2, targets, dropout)
    assert found.training_flop == expected.training_flop
    for number, (one, other) in enumerate(zip(found.pieces, expected.pieces, strict=True)):
        for name in ("flop", "parameters", "frozen", "joins"):
            assert getattr(one, name) == getattr(other, name), (one.name, name)
        products = [sorted(_work(each)) for each in (one, other)]
        assert products[0] == products[1]
        if number != 1:  # in the first layer no gradient of the input is needed, so torch keeps less
            assert [one.kept(each, 4) for each in POLICIES] == [other.kept(each, 4) for each in POLICIES]


def _work(block):
    """FLOP of the products by their part, and by whether their weights are frozen."""
    found = {}
    for each in block.operations:
        if isinstance(each, Product):
            key = each.part.name, each.frozen
            found[key] = found.get(key, 0) + each.flop
    return found.items()


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["all-linear"]])
def test_adapters_change_in_a_hugging_face_model_s_work_what_they_change_in_torch_s(targets):
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    whole, adapted = (transformers.LlamaForCausalLM(config) for _ in range(2))
    add_adapters(adapted, rank=2, alpha=4, targets=targets, dropout=0.0, seed=0)
    before, after = (traced(model, 8, precision="fp32") for model in (whole, adapted))
    assert after.trained == sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    assert after.parameters == sum(each.numel() for each in adapted.parameters())
    (kept, flop), (less_kept, less_flop) = map(counted, (whole, adapted))
    traced_kept = [2 * sum(each.kept("none", 4) for each in found.pieces) for found in (before, after)]
    assert traced_kept[0] - traced_kept[1] == kept - less_kept
    attention = 3 * sum(each.flop for piece in before.pieces for each in piece.attentions)
    found, expected = (2 * (each.training_flop - attention) for each in (after, before))
    # torch does not count attention on CPUs. transformers 4 hides the product for the rotary angles from it.
    hidden = expected - flop
    assert hidden in (0, 2 * 2 * 8 * (config.hidden_size // config.num_attention_heads // 2))
    read = sum(
        each.flop for each in after.layers[0].operations if each.name in ("q_proj", "k_proj", "v_proj")
    )
    added = sum(each.flop for each in after.layers[0].operations if each.name == "lora_A")
    assert 2 * read < found - hidden - less_flop <= 2 * (read + added)  # of the first input


def counted(model):
    """Bytes that forward keeps for backward, and FLOP of both, as torch runs a step of two samples."""
    tokens, kept = torch.zeros(2, 8, dtype=torch.long), {}
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if tensor.numel() > 1 and storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            loss = next_token_loss(model(tokens), tokens)
        loss.backward()
    return sum(each.nbytes() for each in kept.values()), counter.get_total_flops()
