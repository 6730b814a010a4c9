"""Fine-tuning on conversations: equal losses under every layout, and only answers count."""

from __future__ import annotations

import pytest
import torch
from chat_stand_ins import MARKED, SPECIAL, WORDS, conversations, write_jsonl, write_tokenizer
from run_stand_ins import train

from shoal.spec.run import Run
from shoal.train import load_model

transformers = pytest.importorskip("transformers")

SEQUENCE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    write_jsonl(folder / "train.jsonl", conversations(100))
    write_jsonl(folder / "dev.jsonl", conversations(20, seed=1))
    write_tokenizer(folder / "tokenizer")
    return folder


def run(ranks, folder, where, name, plan, on, **more):
    size = len(SPECIAL) + len(WORDS)
    settings = {
        "data.source": folder / "train.jsonl",
        "data.validation": folder / "dev.jsonl",
        "data.cache": folder / "cache",
        "data.tokenizer": folder / "tokenizer",
        "data.messages": "messages",
        "model_options": f"{{vocab_size={size}, layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, seq=16}}",
        "sequence": SEQUENCE,
        "batch": 8,
        "steps": 6,
        "optimizer.warmup": 2,
        **more,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    train(ranks, [*words, "--plan", plan, "--run", name], where, on=on)
    metrics = Run(where / name).metrics()
    return [values["loss"] for values in metrics] + [metrics[-1]["validation_loss"]]


@pytest.fixture(scope="module")
def alone(ranks, folder):
    return run(ranks, folder, folder, "alone", "dp=1", 1)


@pytest.mark.parametrize("plan", ["dp=2,shard=zero3,microbatch=2", "tp=2", "pp=2,microbatch=2", "cp=2"])
def test_layouts_have_the_losses_of_one_device(ranks, folder, alone, tmp_path, plan):
    assert run(ranks, folder, tmp_path, "run", plan, 2) == pytest.approx(alone, rel=1e-4)


def test_the_loss_is_the_mean_over_the_tokens_of_answers(folder, alone):
    model, _ = load_model(folder / "alone", print)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    total = count = 0.0
    for messages in conversations(20, seed=1):
        encoded = tokenizer.apply_chat_template(
            messages, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = torch.tensor(encoded["input_ids"][: SEQUENCE + 1])
        answers = torch.tensor(encoded["assistant_masks"][: SEQUENCE + 1])[1:].bool()
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(
                model.eval()(ids[None, :-1])[0], ids[1:], reduction="none"
            )
        total, count = total + float(losses[answers].sum()), count + int(answers.sum())
    assert alone[-1] == pytest.approx(total / count, rel=1e-5)
