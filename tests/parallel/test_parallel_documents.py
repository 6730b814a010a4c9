"""Documents of packed samples do not see each other, or the model is refused before the first step."""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.data import Packed, PackedSamples, TokenSamples
from shoal.errors import ModelError
from shoal.parallel import DocumentsGuard, parallelize, require_documents
from shoal.train import Trainer

VOCABULARY, WIDTH, BEFORE, AFTER = 61, 32, 7, 9
LENGTH = BEFORE + AFTER
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
}
DROPOUT = (
    "dropout",
    "attention_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_pdrop",
    "layerdrop",
)
POSITIONS = torch.cat([torch.arange(BEFORE), torch.arange(AFTER)])[None]


def build(kind, **changes):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **(SHAPE | changes))
    for name in (*DROPOUT, "attention_probs_dropout_prob", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).float()


def tokens(seed=0):
    made = torch.randint(1, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
    made[0, -2] = 0  # a padding token, which some models do not count
    return made


def data():
    """Samples in which documents of a few tokens end with 60."""
    stream = np.random.default_rng(0).integers(1, 60, 400)
    stream[::5] = 60
    return PackedSamples(TokenSamples(stream, LENGTH), 60)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("gpt_oss", {"num_local_experts": 4, "sliding_window": 4}),  # windows beside whole attention
        ("afmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
        ("opt", {}),
        ("falcon", {}),
        ("biogpt", {}),
        ("xglm", {"d_model": WIDTH, "attention_heads": 4}),
        ("roberta", {"is_decoder": True}),  # counts positions from above its padding token
        ("roberta", {"is_decoder": False}),  # attends both ways
    ],
)
@pytest.mark.parametrize("plan", ["dp=1", "dp=1,precision=bf16"])
def test_a_packed_document_gives_what_it_gives_alone(kind, changes, plan):
    model = build(kind, **changes).eval()
    with torch.no_grad():
        alone = [copy.deepcopy(model)(part).logits for part in tokens().split((BEFORE, AFTER), 1)]
    DocumentsGuard(model).require(is_promised=True)
    packed = parallelize(model, plan)
    with torch.no_grad():
        found = packed(tokens(), position_ids=POSITIONS).logits
        other = tokens(1)[:, :BEFORE]
        changed = packed(torch.cat([other, tokens()[:, BEFORE:]], 1), position_ids=POSITIONS).logits
    # Rounding of fp32, over two layers; of bf16, of which a logit of 0.5 has steps of 2^-9.
    tolerance = {"dp=1": 1e-5, "dp=1,precision=bf16": 2e-2}[plan]
    torch.testing.assert_close(found, torch.cat(alone, 1).to(found.dtype), rtol=0, atol=tolerance)
    torch.testing.assert_close(changed[:, BEFORE:], found[:, BEFORE:], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mamba", {}),
        ("mpt", {"d_model": WIDTH, "n_heads": 4, "n_layers": 2}),
        ("bloom", {}),
        ("jamba", {"mamba_dt_rank": 4, "num_experts": 2}),
        ("minimax", {"num_local_experts": 4}),
        ("openai-gpt", {}),
    ],
)
def test_the_trainer_refuses_models_whose_documents_see_each_other(kind, changes):
    with pytest.raises(ModelError, match="cannot keep the documents of packed samples apart"):
        Trainer(build(kind, **changes), data(), "dp=1", batch=2, steps=1)


def cross_entropy(output, targets):
    return F.cross_entropy(output["logits"].flatten(0, 1), targets.flatten())


class Mixed(nn.Module):
    """A model whose attention is given by the test: a function of the hidden state and the positions."""

    def __init__(self, mix, *, drop=0.0, scale=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(drop)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()) if scale is None else torch.full((), scale))
        self.mix, self.calls = mix, 0

    def forward(self, tokens, position_ids=None):
        self.calls += 1
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])[None]
        hidden = self.embed(tokens) + self.place(position_ids)
        hidden = hidden + self.scale * self.mix(hidden, position_ids)
        hidden = self.drop(self.norm(hidden.transpose(1, 2)).transpose(1, 2))
        return {"extra": None, "loss": hidden.mean(), "logits": self.head(hidden)}


def apart(hidden, positions):
    starts = torch.arange(positions.shape[1]) - positions
    every = torch.arange(positions.shape[1])
    seen = (starts[:, :, None] == starts[:, None]) & (every[:, None] >= every)
    return F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=seen)


def together(hidden, positions):
    return F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)


def noisy(hidden, positions):
    return apart(hidden, positions) + torch.rand_like(hidden) + random.random() + np.random.rand()


@pytest.mark.parametrize("mix", [apart, noisy])
def test_a_users_model_that_keeps_documents_apart_is_not_refused(recwarn, mix):
    require_documents(Mixed(mix, drop=0.5).train())
    assert not [each for each in recwarn if "prob" in str(each.message)]


@pytest.mark.parametrize("scale", [None, 0.0])  # zero hides attention in the first weights
def test_a_users_model_whose_documents_see_each_other_is_refused(scale):
    with pytest.raises(ModelError, match="one document changes with another"):
        require_documents(Mixed(together, scale=scale))
    with pytest.raises(ModelError, match="one document changes with another"):
        Trainer(Mixed(together, scale=scale), data(), "dp=1", batch=2, steps=1)


def test_a_users_dataset_that_packs_is_seen_at_its_first_batch():
    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return Packed(tokens()[0], POSITIONS[0]), tokens()[0]

    trainer = Trainer(Mixed(together), Items(), "dp=1", batch=2, steps=1)
    with pytest.raises(ModelError, match="one document changes with another"):
        trainer.step()


def test_positions_in_a_mapping_are_the_wish_of_a_users_model_and_a_promise_of_hugging_faces():
    batch = {"input_ids": tokens()[0], "position_ids": POSITIONS[0], "labels": tokens()[0]}
    trainer = Trainer(build("jamba", mamba_dt_rank=4), [batch] * 2, "dp=1", batch=2, steps=1)
    with pytest.raises(ModelError, match="documents of packed samples apart"):
        trainer.step()
    own = {"tokens": tokens()[0], "position_ids": POSITIONS[0]}, tokens()[0]
    trainer = Trainer(Mixed(together), [own] * 2, "dp=1", batch=2, steps=1, loss=cross_entropy)
    with pytest.warns(UserWarning, match="one document changes with another"):
        trainer.step()


def test_what_cannot_be_asked_is_said_and_trains():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)

        def forward(self, tokens, image, position_ids=None):
            return self.embed(tokens) + image.view(7, 1, WIDTH)

    with pytest.warns(UserWarning, match="Two could not be probed(.|\n)*is invalid for input of size"):
        require_documents(Two())


def test_asking_leaves_no_trace():
    model = Mixed(noisy, drop=0.5).train()
    called = []
    model.register_forward_hook(lambda *given: called.append(given))
    model.embed.weight.grad = torch.ones(VOCABULARY, WIDTH)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draws = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    require_documents(model)
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert (np.random.get_state()[1] == draws[1]).all()
    assert random.getstate() == draws[2]
    assert model.training
    assert model.drop.training
    assert model.calls == 0
    assert not called
    assert (model.embed.weight.grad == 1).all()
    assert all(parameter.requires_grad for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
