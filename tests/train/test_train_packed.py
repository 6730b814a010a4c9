"""Packed samples: documents in a sample train as they would apart."""

import numpy as np
import pytest
import torch
from run_stand_ins import train as command
from torch import nn

from shoal.cli.main import main
from shoal.data import Packed, PackedSamples, TokenSamples
from shoal.models import Documents, Transformer, TransformerConfig, next_token_loss
from shoal.models.attention import causal_attention
from shoal.models.transformer import positions_from_zero
from shoal.spec.plan import Plan
from shoal.spec.run import Run
from shoal.train import Trainer, TrainingData

END, SEQ, BATCH, STEPS = 0, 32, 4, 2
SHAPE = {"vocab_size": 61, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq": SEQ}
OF_HUGGING_FACE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ,
    "use_cache": False,
}


CHANGES = {
    "gpt2": {"n_positions": SEQ} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8, "head_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "roberta": {"is_decoder": True, "pad_token_id": 1, "max_position_embeddings": SEQ + 2}
    | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}


def stream():
    """A stream of documents of 1 to 40 tokens, each of which ends with `END`."""
    chance = np.random.default_rng(3)
    documents = [[*chance.integers(1, 61, chance.integers(0, 40)), END] for _ in range(60)]
    return np.array([token for document in documents for token in document])


def samples():
    return PackedSamples(TokenSamples(stream(), SEQ), END)


class Own(nn.Module):
    """A user's model, with a position embedding, whose attention Shoal replaces."""

    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(61, 32), nn.Embedding(SEQ, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.head = nn.Linear(32, 61)
        self.attend, self.positions = causal_attention, positions_from_zero

    def forward(self, tokens, position_ids=None):
        own, documents = self.positions(tokens.shape[1], tokens.device)[None], None
        if position_ids is not None:
            own, documents = position_ids[:, own[0]], Documents(position_ids)
        hidden = self.token(tokens) + self.place(own)
        for block in self.blocks:
            heads = block(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            hidden = hidden + self.attend(*heads, documents=documents).transpose(1, 2).flatten(-2)
        return self.head(hidden)


def build(kind):
    torch.manual_seed(0)
    if kind == "a user's":
        return Own()
    if kind == "own":
        model = Transformer(TransformerConfig(**SHAPE))
        model.initialize(1)
        return model
    import transformers

    config = transformers.AutoConfig.for_model(kind, **(OF_HUGGING_FACE | CHANGES.get(kind, {})))
    return transformers.AutoModelForCausalLM.from_config(config).float().train()


def pieces_of(tokens, targets):
    """The documents of one window, each with its targets; a single token that ends one has none."""
    ends = [*(np.flatnonzero(tokens == END) + 1), len(tokens)]
    starts = [0, *ends[:-1]]
    for start, stop in zip(starts, ends, strict=True):
        kept = slice(start, stop - 1 if tokens[stop - 1] == END else stop)
        if start < kept.stop:
            yield tokens[kept], targets[kept]


def test_positions_begin_anew_in_each_document_and_its_end_has_no_target():
    packed = PackedSamples(TokenSamples(np.array([5, 0, 7, 8, 9, 0, 0, 4, 3]), 8), END)
    inputs, targets = packed[0]
    assert isinstance(inputs, Packed)
    assert inputs.tokens.tolist() == [5, 0, 7, 8, 9, 0, 0, 4]
    assert inputs.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 0, 0]
    assert targets.tolist() == [0, -100, 8, 9, 0, -100, -100, 3]


def test_angles_are_those_of_the_positions_in_each_document():
    """Attention depends on differences of positions alone, so that losses would not tell."""
    rotary, (inputs, _) = build("own").rotary, samples().batch(np.arange(BATCH))
    apart = rotary(SEQ, torch.device("cpu"))
    packed = rotary(SEQ, torch.device("cpu"), position_ids=inputs.position_ids)
    assert torch.equal(packed.cosine[:, 0], apart.cosine[inputs.position_ids])
    assert torch.equal(packed.sine[:, 0], apart.sine[inputs.position_ids])


@pytest.mark.parametrize("kind", ["own", "a user's", "llama", "gpt2"])
def test_the_loss_of_packed_samples_is_the_mean_over_their_documents_apart(kind):
    if kind in ("llama", "gpt2"):
        pytest.importorskip("transformers")
    model, total, count = build(kind), 0.0, 0
    packed = samples()
    inputs, targets = packed.batch(np.arange(BATCH))
    loss = next_token_loss(model(inputs.tokens, position_ids=inputs.position_ids), targets)
    raw_tokens, raw_targets = TokenSamples(stream(), SEQ).batch(np.arange(BATCH))
    number = 0
    for tokens, wanted in zip(raw_tokens.numpy(), raw_targets.numpy(), strict=True):
        for document, after in pieces_of(tokens, wanted):
            number += 1
            apart = model(torch.tensor(document)[None])
            total += next_token_loss(apart, torch.tensor(after)[None]).item() * len(after)
            count += len(after)
    assert number > 2 * BATCH
    assert count == (targets != -100).sum()
    assert loss.item() == pytest.approx(total / count, rel=1e-5)


def train(kind, plan):
    """Losses and weights after some steps."""
    trainer = Trainer(build(kind), TrainingData(samples(), sequence=SEQ), plan, batch=BATCH, steps=STEPS)
    losses = [trainer.step().loss for _ in range(STEPS)]
    losses.append(trainer.validate(samples(), 6))
    trainer.close()
    return losses, trainer.parallel.full_state_dict()


@pytest.fixture(scope="module")
def alone():
    known = {}

    def trained(kind):
        if kind not in known:
            known[kind] = train(kind, "dp=1,microbatch=4")
        return known[kind]

    return trained


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("own", "dp=2,shard=zero3,microbatch=1"),
        ("own", "cp=2"),
        ("own", "cp=2,context=ulysses,recompute=full"),
        ("own", "cp=4,recompute=selective"),
        ("own", "tp=2,microbatch=2"),
        ("own", "tp=2,tensor=plain"),
        ("own", "pp=2,microbatch=1"),
        pytest.param("own", "dp=1,recompute=full,compile=blocks", marks=pytest.mark.long),
        ("own", "pp=2,cp=2,microbatch=2"),
        ("a user's", "cp=2"),
        ("llama", "dp=2,shard=zero3,microbatch=1"),
        ("llama", "cp=2"),
        ("llama", "cp=2,context=ulysses,tp=2"),
        ("llama", "tp=2"),
        ("llama", "pp=2,microbatch=1,recompute=full"),
        ("gpt2", "pp=2,microbatch=1"),
        ("gpt2", "cp=2"),
        ("gpt_oss", "dp=2,shard=zero3,microbatch=1"),
        ("gpt_oss", "pp=2,microbatch=1,recompute=full"),
        ("opt", "dp=2,shard=zero2,microbatch=1"),
        ("opt", "cp=2"),
        ("roberta", "cp=2,context=ulysses"),
        ("roberta", "dp=2,shard=zero1,microbatch=1"),
    ],
)
def test_packed_samples_train_under_a_plan_as_on_one_device(ranks, alone, kind, plan):
    if kind not in ("own", "a user's"):
        pytest.importorskip("transformers")
    losses, weights = alone(kind)
    results = ranks.run(train, Plan.parse(plan).ranks, kind, plan)
    for found, _ in results:
        assert found == pytest.approx(losses, rel=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=1e-3, atol=1e-4)


def test_the_command_trains_and_goes_on_with_boundaries(ranks, tiny_run, tmp_path):
    words = [*tiny_run, "--set", "data.boundaries=true", "--set", "steps=3"]
    command(ranks, [*words, "--plan", "pp=2", "--run", "whole"], tmp_path, on=2)
    command(ranks, [*words, "--set", "steps=2", "--plan", "cp=2", "--run", "parts"], tmp_path, on=2)
    command(ranks, ["--resume", "parts", "--set", "steps=3", "--plan", "dp=1"], tmp_path)
    whole, parts = (
        [each["loss"] for each in Run.open(tmp_path / name).metrics() if "loss" in each]
        for name in ("whole", "parts")
    )
    assert parts[:2] == pytest.approx(whole[:2], rel=1e-4)
    assert len(parts) == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.tokenizer=ids:256"], "'ids:256' has no token that ends a document"),
        (
            ["model=own_model_at_home:build"],
            "Plain cannot keep the documents of packed samples apart: its forward",
        ),
    ],
)
def test_what_cannot_keep_documents_apart_is_refused_by_name(
    tiny_run, tmp_path, monkeypatch, capfd, settings, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_model_at_home.py").write_text(OWN)
    words = [*tiny_run, "--set", "model_options={}", "--set", "data.boundaries=true"]
    words += [word for each in settings for word in ("--set", each)]
    assert main(["train", *words, "--nproc", "1", "--run", "run"]) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


OWN = """
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 256)

    def forward(self, tokens):
        return self.embed(tokens)

def build():
    return Plain()
"""
