"""`shoal export`: what was trained, as Hugging Face's tools read it."""

import json

import pytest
import torch
from run_stand_ins import train

from shoal.checkpoint import checkpoints, verify
from shoal.checkpoint.shard import ShardReader
from shoal.cli.main import main
from shoal.errors import CheckpointError
from shoal.train import load_model
from shoal.train.export import export

transformers = pytest.importorskip("transformers")


def logits_of(model, tokens):
    with torch.no_grad():
        made = model.eval()(tokens)
    return getattr(made, "logits", made)


EXPERTS = ["experts=4", "expert_ffn=24", "renormalize=true"]


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        (["tie_embeddings=false"], "tp=2"),
        (["tie_embeddings=true"], "dp=2,shard=zero3"),
        (EXPERTS, "dp=2,ep=2"),
    ],
)
def test_a_preset_is_a_llama_or_a_mixtral_with_equal_logits(ranks, tiny_run, tmp_path, options, plan):
    chosen = (f"model_options.{option}" for option in options)
    words = [*tiny_run, "--set", "steps=3", *(word for each in chosen for word in ("--set", each))]
    train(ranks, [*words, "--plan", plan, "--run", "run"], tmp_path, on=2)
    made = export(tmp_path / "run", tmp_path / "out", shard_bytes=20_000)
    assert made.files > 2
    ours, _ = load_model(tmp_path / "run", print)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(60).view(2, 30) % 256
    torch.testing.assert_close(logits_of(theirs, tokens), logits_of(ours, tokens), rtol=1e-4, atol=1e-5)


CONFIGS = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
    },
}
COMMON = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        *((kind, "dp=1") for kind in CONFIGS),
        *((kind, plan) for kind in ("llama", "mixtral") for plan in ("tp=2", "dp=2,shard=zero3", "pp=2")),
    ],
)
def test_what_came_from_hugging_face_goes_back_exactly(ranks, tiny_run, tmp_path, kind, plan):
    """One step that changes nothing: weights are those that were loaded, in their own dtype."""
    torch.manual_seed(0)
    common = COMMON if kind != "gpt2" else {"vocab_size": 256}
    config = transformers.AutoConfig.for_model(kind, **common, **CONFIGS[kind])
    source = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    source.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    words = [
        word
        for option, setting in zip(tiny_run[::2], tiny_run[1::2], strict=True)
        if not setting.startswith("model_options")
        for word in (option, setting)
    ]
    settings = [f"model=hf:{tmp_path / 'source'}", "steps=1", "optimizer.learning_rate=1e-60"]
    words += [word for each in settings for word in ("--set", each)]
    train(ranks, [*words, "--plan", plan, "--run", "run"], tmp_path, on=1 if plan == "dp=1" else 2)
    made = export(tmp_path / "run", tmp_path / "out")
    assert made.dtype == "bfloat16"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    expected, found = source.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_the_command_tells_what_it_wrote_and_overwrites_nothing(ranks, tiny_run, tmp_path, capsys):
    train(ranks, [*tiny_run, "--set", "steps=2", "--run", "run"], tmp_path)
    words = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(words) == 0
    assert "tensors in bfloat16" in capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (content["model_type"], content["torch_dtype"]) == ("llama", "bfloat16")
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    words = [*tiny_run, "--set", "steps=1", "--set", "model_options.experts=2", "--run", "experts"]
    train(ranks, words, tmp_path)
    assert main(["export", str(tmp_path / "experts"), str(tmp_path / "no")]) == 2
    assert "experts and renormalize=false has no form in Hugging Face's layout" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_checkpoint_is_read_once_and_a_damaged_one_is_passed_over(ranks, tiny_run, tmp_path, monkeypatch):
    words = [*tiny_run, "--set", "steps=4", "--set", "checkpoint.every=2", "--run", "run"]
    train(ranks, words, tmp_path, on=2)
    newest, before = checkpoints(tmp_path / "run" / "checkpoints")
    read = []
    read_bytes = ShardReader.read_bytes

    def counted(self, offset, memory):
        read.append(len(memory))
        read_bytes(self, offset, memory)

    def alike(model):
        return [each.tolist() for each in model.state_dict().values()]

    monkeypatch.setattr(ShardReader, "read_bytes", counted)
    size = sum(file.stat().st_size for file in newest.glob("*.safetensors"))
    model, _ = load_model(tmp_path / "run", print)
    assert sum(read) == size
    for dtype in ("float32", "bfloat16"):
        read.clear()
        made = export(tmp_path / "run", tmp_path / dtype, dtype, shard_bytes=50_000)
        assert made.checkpoint == newest
        assert made.files > 1
        assert sum(read) == size

    older, _ = load_model(before, print)
    file = max(newest.glob("*.safetensors"), key=lambda each: each.stat().st_size)
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    file.write_bytes(damaged)
    said = []
    assert export(tmp_path / "run", tmp_path / "again", say=said.append).checkpoint == before
    assert alike(load_model(tmp_path / "run", said.append)[0]) == alike(older) != alike(model)
    assert all(f"{newest.name} is corrupt and is skipped" in each for each in said)
    assert len(said) == 2
    verify(before)
    with pytest.raises(CheckpointError, match="has no sound checkpoint"):
        export(newest, tmp_path / "none")
    assert not list(tmp_path.glob("*.tmp"))
