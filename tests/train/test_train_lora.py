"""LoRA: adapters that train beside a frozen base, as peft trains them on one device."""

import builtins

import pytest
import torch
from run_stand_ins import train

from shoal.checkpoint import read_manifest, resolve
from shoal.cli.main import main
from shoal.data import Loader, prepare
from shoal.errors import ModelError
from shoal.models import is_adapter, next_token_loss, plain_name
from shoal.spec.run import Run
from shoal.train import load_model
from shoal.train.absolute_paths import build_model
from shoal.train.config import load_config
from shoal.train.export import export

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

STEPS, RATE = 4, 1e-2
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OF_GPT2 = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)
TARGETS = {"llama": ["q_proj", "v_proj", "o_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
COURSE = {
    "steps": STEPS,
    "optimizer.learning_rate": RATE,
    "optimizer.schedule": '"constant-then-decay"',
    "optimizer.decay": 0,
    "optimizer.warmup": 0,
    "optimizer.clip": '"off"',
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders with small models of Hugging Face, by kind."""
    made = {}
    for kind, shape in (("llama", SHAPE), ("gpt2", OF_GPT2)):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, **shape)
        made[kind] = tmp_path_factory.mktemp(kind)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made[kind])
    return made


def words_of(tiny_run, folder, targets, **changes):
    """The words of `shoal train` for LoRA on a folder's model."""
    own = [
        word
        for option, setting in zip(tiny_run[::2], tiny_run[1::2], strict=True)
        if not setting.startswith("model_options")
        for word in (option, setting)
    ]
    lora = {"lora.rank": 4, "lora.alpha": 8, "lora.targets": targets}
    settings = {"model": f"hf:{folder}", **COURSE, **lora, **changes}
    return [*own, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]


def losses_of(run):
    return [values["loss"] for values in Run.open(run).metrics() if "loss" in values]


def by_peft(words, folder, targets):
    """Losses of peft's model in a plain loop, from the first values that Shoal gives the adapters."""
    config = load_config(None, words[1::2])
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out="c_attn" in targets)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(base, lora)
    first = {name: each for name, each in build_model(config, "cpu").named_parameters() if is_adapter(name)}
    state = dict(model.base_model.model.named_parameters())
    with torch.no_grad():
        for name, value in first.items():
            state[name].copy_(value)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == len(first)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(trained, RATE, settings.betas, settings.eps, settings.weight_decay)
    loader = Loader(
        prepare(config.data).samples("train", config.sequence), seed=config.seed, batch_size=config.batch
    )
    losses = []
    for step in range(STEPS):
        inputs, targets = loader.fetch(step * config.batch, config.batch)
        loss = next_token_loss(model(input_ids=inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("llama", "dp=1"),
        ("llama", "dp=2"),
        ("llama", "dp=2,shard=zero3"),
        ("llama", "tp=2"),
        ("llama", "tp=2,tensor=plain,shard=zero3"),
        ("llama", "pp=2"),
        ("llama", "cp=2"),
        ("gpt2", "dp=2,shard=zero1"),
    ],
)
def test_losses_are_those_of_peft_on_one_device(ranks, tiny_run, folders, tmp_path, kind, plan):
    words = words_of(tiny_run, folders[kind], TARGETS[kind])
    train(ranks, [*words, "--plan", plan, "--run", "run"], tmp_path, on=1 if plan == "dp=1" else 2)
    expected = by_peft(words, folders[kind], TARGETS[kind])
    assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 1e-3  # adapters learn
    saved = read_manifest(resolve(tmp_path / "run")[0]).tensors
    for path in saved:
        group, _, name = path.partition("/")
        assert group in ("fixed", "rank") or is_adapter(name), path


def logits_of(model, tokens):
    with torch.no_grad():
        made = model.eval()(tokens)
    return getattr(made, "logits", made)


TOKENS = torch.arange(60).view(2, 30) % 256


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_adapters_are_exported_apart_for_peft_and_merged_for_all(ranks, tiny_run, folders, tmp_path, kind):
    words = words_of(tiny_run, folders[kind], ["all-linear"])
    train(ranks, [*words, "--plan", "dp=2,shard=zero3", "--run", "run"], tmp_path, on=2)
    ours, _ = load_model(tmp_path / "run", print)
    expected = logits_of(ours, TOKENS)
    made = export(tmp_path / "run", tmp_path / "adapters")
    assert made.tensors == sum(is_adapter(name) for name, _ in ours.named_parameters())
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    assert not torch.allclose(logits_of(base, TOKENS), expected, atol=1e-3)
    apart = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    torch.testing.assert_close(logits_of(apart, TOKENS), expected, rtol=1e-4, atol=1e-5)
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged, TOKENS), expected, rtol=1e-4, atol=1e-5)
    assert main(["sample", str(tmp_path / "run"), "--tokens", "5"]) == 0


@pytest.fixture(scope="module")
def preset_run(ranks, tiny_run, tmp_path_factory):
    """A run of a preset, all of which was trained."""
    folder = tmp_path_factory.mktemp("preset")
    words = [*tiny_run, "--set", "steps=3", "--plan", "dp=2,shard=zero2", "--run", "run"]
    train(ranks, words, folder, on=2)
    return folder / "run"


@pytest.mark.parametrize("plan", ["dp=1", "dp=2,shard=zero3,precision=bf16", "tp=2", "pp=2"])
def test_a_preset_is_tuned_from_the_weights_of_its_run(ranks, tiny_run, preset_run, tmp_path, plan):
    lora = ["lora.rank=2", 'lora.targets=["query", "value", "down"]', f"init={preset_run}", "steps=3"]
    words = [*tiny_run, *(word for each in lora for word in ("--set", each)), "--plan", plan, "--run", "run"]
    train(ranks, words, tmp_path, on=1 if plan == "dp=1" else 2)
    before, _ = load_model(preset_run, print)
    after, _ = load_model(tmp_path / "run", print)
    weights = dict(before.named_parameters())
    for name, value in after.named_parameters():
        if is_adapter(name):
            assert value.abs().max() > 0, name
        else:
            kept = weights[plain_name(name)]
            kept = kept.bfloat16().float() if "bf16" in plan else kept
            assert torch.equal(value, kept), name
    export(preset_run, tmp_path / "base")
    export(tmp_path / "run", tmp_path / "adapters")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    tolerance = 1e-1 if "bf16" in plan else 1e-5
    torch.testing.assert_close(logits_of(tuned, TOKENS), logits_of(after, TOKENS), rtol=1e-4, atol=tolerance)


def test_a_run_with_adapters_goes_on_under_another_plan(ranks, tiny_run, folders, tmp_path):
    words = words_of(tiny_run, folders["llama"], ["all-linear"])
    train(ranks, [*words, "--run", "whole"], tmp_path)
    words = words_of(tiny_run, folders["llama"], ["all-linear"], steps=2)
    train(ranks, [*words, "--plan", "dp=2,shard=zero3", "--run", "parts"], tmp_path, on=2)
    train(ranks, ["--resume", "parts", "--set", f"steps={STEPS}", "--plan", "tp=2"], tmp_path, on=2)
    expected = losses_of(tmp_path / "whole")
    assert losses_of(tmp_path / "parts") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["lora.rank=0"], "lora.rank cannot be 0"),
        (['lora.targets=["query"]'], "a number for lora.rank, since lora.targets is given"),
        (["lora.rank=2", 'lora.targets=["q_proj"]'], "down, gate, key, output, query, up, value, all-linear"),
        (["lora.rank=2", 'lora.targets=["quer"]'], "did you mean 'query'"),
        (["lora.rank=2", "lora.dropout=0.1", "plan=tp=2"], "ranks would draw different masks"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(
    tiny_run, tmp_path, monkeypatch, capsys, settings, said
):
    monkeypatch.chdir(tmp_path)
    words = [*tiny_run, *(word for each in settings for word in ("--set", each))]
    ranks = "2" if "plan=tp=2" in settings else "1"
    assert main(["train", *words, "--nproc", ranks, "--run", "run"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_has_other_adapters_or_none_is_refused_by_name(
    ranks, tiny_run, preset_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(preset_run), "out", "--merge"]) == 2
    assert "was trained without LoRA, so it has no adapters to merge" in capsys.readouterr().err
    train(ranks, [*tiny_run, "--set", "lora.rank=2", "--set", "steps=1", "--run", "tuned"], tmp_path)
    init = ["train", *tiny_run, "--set", "init=tuned", "--nproc", "1", "--run", "next"]
    assert main(init) == 2
    assert "tuned was trained with LoRA, and its adapter" in capsys.readouterr().err
    assert main([*init, "--set", "lora.rank=3"]) == 2
    assert "has shape [2, 32] there, and [3, 32] here" in capsys.readouterr().err

    installed = builtins.__import__

    def without_peft(name, *arguments, **named):
        if name == "peft":
            raise ModuleNotFoundError("No module named 'peft'", name="peft")
        return installed(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without_peft)
    assert main([*init, "--set", "lora.rank=2"]) == 2
    assert "pip install 'shoal[lora]'" in capsys.readouterr().err


OWN = """
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        layers = (nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(32, 256)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)

def build():
    return Own()
"""


def test_adapters_of_a_users_model_are_exported_under_its_names(ranks, tiny_run, tmp_path, monkeypatch):
    (tmp_path / "tuned_at_home.py").write_text(OWN)
    words = ["model=tuned_at_home:build", "model_options={}", "lora.rank=4", "steps=3"]
    words = [*tiny_run, *(word for each in words for word in ("--set", each)), "--run", "run"]
    train(ranks, words, tmp_path)
    ours, _ = load_model(tmp_path / "run", print)
    export(tmp_path / "run", tmp_path / "adapters")
    monkeypatch.syspath_prepend(tmp_path)
    base = build_model(load_config(None, ["model=tuned_at_home:build"]), "cpu")
    state = {plain_name(name): value for name, value in ours.state_dict().items() if not is_adapter(name)}
    base.load_state_dict(state)
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    torch.testing.assert_close(logits_of(tuned, TOKENS), logits_of(ours, TOKENS), rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="is of your own code"):
        export(tmp_path / "run", tmp_path / "merged", merge=True)
