"""What a spec builds, and what every spec that builds nothing says."""

import builtins
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import MissingExtraError, ModelError
from shoal.models import Transformer, build, logits_of, next_token_loss, preset
from shoal.parallel import parallelize

FACTORIES = """
from torch import nn

width = 3

def linear(outputs=4):
    return nn.Linear(3, outputs)

def nothing():
    return "no module"

def broken():
    raise RuntimeError("out of luck")
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the path: `factory_package.models` holds factories, `.torn` cannot be imported."""
    package = tmp_path / "factory_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "models.py").write_text(FACTORIES)
    (package / "torn.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("factory_package")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """A folder with a small Llama's configuration and bf16 weights, and the model that was saved."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model


def test_a_preset_gives_its_transformer() -> None:
    model = build("tiny")
    assert isinstance(model, Transformer)
    assert model.config == preset("tiny")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_overrides_change_fields_of_a_preset() -> None:
    model = build("tiny", overrides={"layers": 2, "dropout": 0.1})
    assert isinstance(model, Transformer)
    assert model.config == preset("tiny").model_copy(update={"layers": 2, "dropout": 0.1})


def test_a_model_of_70_billion_parameters_is_built_on_meta() -> None:
    model = build("llama3-70b", device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.usefixtures("factories")
def test_a_factory_is_called_with_the_overrides_on_the_device() -> None:
    model = build("factory_package.models:linear", overrides={"outputs": 7}, device="meta")
    assert isinstance(model, nn.Linear)
    assert model.out_features == 7
    assert model.weight.is_meta


def test_a_class_is_a_factory() -> None:
    model = build("torch.nn:Linear", overrides={"in_features": 2, "out_features": 3})
    assert isinstance(model, nn.Linear)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("spec", "overrides", "message"),
    [
        ("tniy", {}, r"no preset 'tniy' \(did you mean 'tiny'\?\)"),
        ("tiny", {"layer": 2}, r"no field 'layer' \(did you mean 'layers'\?\)"),
        (
            "factory_pakage.models:linear",
            {},
            r"no module 'factory_pakage' \(did you mean 'factory_package'\?\)",
        ),
        (
            "factory_package.model:linear",
            {},
            r"no module 'factory_package\.model' \(did you mean '.*models'\?\)",
        ),
        ("factory_package.models.x:linear", {}, r"no module 'factory_package\.models\.x'"),
        ("factory_package.models:liner", {}, r"'liner' .*does not exist \(did you mean 'linear'\?\)"),
        ("factory_package.models:width", {}, "'width' .*is not a function"),
        ("factory_package.models:", {}, "'' .*does not exist"),
        (":linear", {}, "importing the module '' raised ValueError"),
        ("factory_package.torn:linear", {}, "raised ModuleNotFoundError: No module named 'a_package_that_is"),
        ("factory_package.models:nothing", {}, "returned str, which is not a torch.nn.Module"),
        ("factory_package.models:broken", {}, "raised RuntimeError: out of luck"),
        ("factory_package.models:linear", {"inputs": 1}, "raised TypeError: .*'inputs'"),
    ],
)
def test_a_spec_that_gives_no_model_is_refused_by_name(
    spec: str, overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        build(spec, overrides=overrides)


@pytest.mark.usefixtures("factories")
def test_what_a_factory_raised_is_kept_as_the_cause() -> None:
    with pytest.raises(ModelError) as refusal:
        build("factory_package.models:broken")
    assert isinstance(refusal.value.__cause__, RuntimeError)


@pytest.mark.usefixtures("factories")
def test_wrong_arguments_for_a_factory_are_told_its_signature() -> None:
    with pytest.raises(ModelError) as refusal:
        build("factory_package.models:linear", overrides={"inputs": 1})
    assert "(outputs=4)" in refusal.value.possible


def test_a_hugging_face_folder_gives_its_weights_in_fp32(llama: tuple[Path, nn.Module]) -> None:
    folder, saved = llama
    model = build(f"hf:{folder}")
    assert model.training
    weights = model.state_dict()
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert all(torch.equal(weights[name], weight.float()) for name, weight in saved.state_dict().items())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_hugging_face_configuration_gives_a_new_model(llama: tuple[Path, nn.Module], device: str) -> None:
    model = build(f"hf:{llama[0] / 'config.json'}", overrides={"num_hidden_layers": 1}, device=device)
    assert sum(name.endswith("q_proj.weight") for name, _ in model.named_parameters()) == 1
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {(device, torch.float32)}


def test_a_hugging_face_model_trains_on_the_loss(llama: tuple[Path, nn.Module]) -> None:
    model = build(f"hf:{llama[0] / 'config.json'}")
    tokens = torch.randint(61, (2, 9))
    output = model(tokens[:, :-1])
    assert logits_of(output).shape == (2, 8, 61)
    next_token_loss(output, tokens[:, 1:]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_override_that_a_hugging_face_model_lacks_is_refused(llama: tuple[Path, nn.Module]) -> None:
    with pytest.raises(ModelError, match=r"no entry 'hiden_size' \(did you mean 'hidden_size'\?\)"):
        build(f"hf:{llama[0]}", overrides={"hiden_size": 8})


def test_an_override_that_does_not_fit_the_weights_is_refused(llama: tuple[Path, nn.Module]) -> None:
    with pytest.raises(ModelError, match="transformers cannot build"):
        build(f"hf:{llama[0]}", overrides={"hidden_size": 64})


def test_on_meta_weights_are_read_one_by_one(llama: tuple[Path, nn.Module]) -> None:
    folder, saved = llama
    model = build(f"hf:{folder}", device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    for name, weight in saved.named_parameters():
        read = torch.empty(weight.shape)
        model.initialize_parameter(name, read, 0)  # type: ignore[operator]
        assert torch.equal(read, weight.float())


def test_weights_that_cannot_be_read_one_by_one_are_refused_on_meta(
    llama: tuple[Path, nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="cannot be read one by one"):
        build(f"hf:{llama[0]}", device="meta", overrides={"hidden_size": 64})
    shutil.copytree(llama[0], tmp_path / "damaged")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="cannot be read: "):
        build(f"hf:{tmp_path / 'damaged'}", device="meta")


def test_a_missing_hugging_face_folder_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match="no Hugging Face configuration at"):
        build(f"hf:{tmp_path / 'absent'}")
    with pytest.raises(ModelError, match="no Hugging Face configuration at"):
        build(f"hf:{tmp_path}")


@pytest.mark.parametrize("text", ["{}", '{"model_type": "no-such-model"}', '{"model_type": "vit"}'])
def test_a_configuration_of_no_causal_model_is_refused(tmp_path: Path, text: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="transformers cannot build"):
        build(f"hf:{tmp_path}")


def test_hugging_face_models_name_the_extra_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_transformers(name: str, *arguments: Any, **options: Any) -> ModuleType:
        if name == "transformers":
            raise ModuleNotFoundError(name=name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_transformers)
    with pytest.raises(MissingExtraError, match="'transformers', which is not installed"):
        build("hf:anywhere")


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_on_meta_experts_that_files_have_apart_are_read_into_their_stack(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {
        "num_local_experts": 4,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
    }
    config = transformers.AutoConfig.for_model(kind, **shape, **heads, **experts)
    source = transformers.AutoModelForCausalLM.from_config(config)
    source.save_pretrained(tmp_path, max_shard_size="20KB")
    model = build(f"hf:{tmp_path}", device="meta")
    for name, parameter in source.named_parameters():
        read = torch.empty_like(parameter)
        model.initialize_parameter(name, read, 0)
        assert torch.equal(read, parameter), name


BUFFERED = {
    "codegen": {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "n_positions": 512, "n_ctx": 512},
    "gptj": {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "n_positions": 512},
    "deepseek_v3": {
        "hidden_size": 32,
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}


@pytest.mark.parametrize("door", ["weights", "weights on meta", "configuration"])
@pytest.mark.parametrize("kind", BUFFERED)
def test_buffers_are_those_of_fp32_though_the_configuration_names_16_bits(
    tmp_path: Path, kind: str, door: str
) -> None:
    """Rotary tables that are computed, and what files hold, such as the correction of a router's scores."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **BUFFERED[kind], vocab_size=32)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved:
            buffer.normal_()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if door == "configuration":
        (tmp_path / "model.safetensors").unlink()
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        expected = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    built = build(f"hf:{tmp_path}", device="meta" if "meta" in door else "cpu")
    parallelize(built, "dp=1,precision=bf16")
    buffers = dict(built.named_buffers())
    assert buffers.keys() == dict(expected.named_buffers()).keys()
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=0, atol=0)
