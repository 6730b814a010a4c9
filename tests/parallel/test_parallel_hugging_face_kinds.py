"""Hugging Face's models of several kinds train under data parallelism, with losses of their own."""

import pytest
import torch
from torch import nn

from shoal.parallel import parallelize

transformers = pytest.importorskip("transformers")

BATCH, SEQ, CLASSES = 4, 8, 3
TEXT = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = TEXT | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
KINDS = {
    "GPT2LMHeadModel": TEXT
    | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "DistilBertForSequenceClassification": TEXT
    | {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 16}
    | {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "num_labels": CLASSES},
    "ViTForImageClassification": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 8,
        "patch_size": 4,
        "num_labels": CLASSES,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "LlamaForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA | {"head_dim": 8, "tie_word_embeddings": True},
    "MistralForCausalLM": LLAMA | {"sliding_window": 4},
}


def batch_for(kind, generator):
    if kind.startswith("ViT"):
        return {
            "pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator),
            "labels": torch.randint(CLASSES, (BATCH,), generator=generator),
        }
    tokens = torch.randint(3, 61, (BATCH, SEQ), generator=generator)
    mask = torch.ones_like(tokens)
    if "Classification" in kind:
        mask[1::2, SEQ // 2 :] = 0  # as many in each half of the batch
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": torch.randint(CLASSES, (BATCH,), generator=generator),
        }
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def train(kind, plan):
    """Losses of three steps, of evaluation after each, and the whole model at the end on rank 0."""
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**KINDS[kind])).train()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # they begin at zero
            nn.init.normal_(parameter, std=0.1)
    parallel = parallelize(model, plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(3):
        batch = {name: parallel.local(value) for name, value in batch_for(kind, generator).items()}
        loss = parallel(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            evaluated = parallel(**batch).loss
        both = torch.stack([loss.detach(), evaluated])
        parallel.axes.data.all_reduce(both, "loss").wait()
        losses.append(both / parallel.axes.data.size)
    return torch.stack(losses), parallel.full_state_dict()


@pytest.fixture(scope="module")
def alone():
    known = {}

    def one_device(kind):
        if kind not in known:
            known[kind] = train(kind, "dp=1")
        return known[kind]

    return one_device


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard", ["none", "zero1", "zero2", "zero3"])
def test_models_of_every_kind_train_as_on_one_device(ranks, alone, kind, shard):
    expected, whole = alone(kind)
    (losses, state), _ = ranks.run(train, 2, kind, f"dp=2,shard={shard}")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)  # sums in another order
    torch.testing.assert_close(state, whole, rtol=1e-4, atol=2e-5)


def rescaled(plan):
    """Losses of RWKV, which rescales its weights between training and evaluation."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "attention_hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**TEXT, **sizes, rescale_every=1))
    tokens = torch.randint(3, 61, (BATCH, SEQ))
    with torch.no_grad():
        found = [model.eval()(tokens, labels=tokens).loss.item()]
    parallel = model if plan is None else parallelize(model, plan)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    for _ in range(2):
        model.train()
        parallel(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(parallel(tokens, labels=tokens).loss.item())
    return found


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,shard=zero1", "dp=2,shard=zero3", "dp=2,precision=bf16"])
def test_weights_that_a_forward_rescales_are_left(ranks, plan):
    # Powers of two change no bit of products; sums are in another order. In bf16: some roundings of 0.4 %.
    tolerance = 1e-2 if "bf16" in plan else 1e-5
    for found in ranks.run(rescaled, 2, plan):
        assert found == pytest.approx(rescaled(None), rel=tolerance)
