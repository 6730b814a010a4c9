"""Folders of models with a fault: the error names the file, and no code of a folder runs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from shoal.errors import ModelError
from shoal.models import build

transformers = pytest.importorskip("transformers")

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n"
CODE = {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with weights in several files, and code that must not run."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=61, **shape)
    folder = tmp_path_factory.mktemp("model") / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="10KB")
    (folder / "code.py").write_text(f"open({str(folder.parent / 'ran')!r}, 'w')")
    return folder


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


FIRST = "model-00001-of-"
FAULTS = [
    ("config.json", lambda file: file.write_text("{"), "config.json' cannot be read: "),
    ("config.json", lambda file: file.write_text("[]"), "it holds a list and not a JSON object"),
    ("config.json", lambda file: file.write_text(POINTER), "config.json' is only a pointer of Git LFS"),
    ("model.safetensors.index.json", lambda file: file.write_text("{}"), "it has no table weight_map"),
    (
        FIRST,
        lambda file: file.unlink(),
        f"{FIRST}.*' is not there, and model.safetensors.index.json names it",
    ),
    (FIRST, lambda file: file.write_text(POINTER), f"{FIRST}.*' is only a pointer of Git LFS"),
    (FIRST, cut, f"{FIRST}.*' cannot be read: "),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "break_it", "message"), FAULTS)
def test_a_missing_or_damaged_file_is_named(template, tmp_path, name, break_it, message, device) -> None:
    folder = shutil.copytree(template, tmp_path / "model")
    break_it(next(folder.glob(f"{name}*")))
    with pytest.raises(ModelError, match=message):
        build(f"hf:{folder}", device=device)


@pytest.mark.parametrize("place", ["../outside.safetensors", "{outside}", "a/../../x", "", 7])
def test_an_index_names_files_of_its_folder_alone(template, tmp_path, place) -> None:
    folder, outside = shutil.copytree(template, tmp_path / "model"), tmp_path / "outside.safetensors"
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = min(content["weight_map"])
    shutil.move(folder / content["weight_map"][name], outside)
    placed = place.format(outside=outside) if isinstance(place, str) else place
    index.write_text(json.dumps({**content, "weight_map": {**content["weight_map"], name: placed}}))
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json' names the file of weights"):
        build(f"hf:{folder}", device="meta")


def test_files_of_weights_may_be_links_as_in_a_cache(template, tmp_path) -> None:
    folder = shutil.copytree(template, tmp_path / "model")
    (tmp_path / "blobs").mkdir()
    for file in folder.glob("*.safetensors"):
        shutil.move(file, tmp_path / "blobs" / file.name)
        file.symlink_to(Path("..", "blobs", file.name))
    linked, plain = build(f"hf:{folder}").state_dict(), build(f"hf:{template}").state_dict()
    assert all((linked[name] == plain[name]).all() for name in plain)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", FIRST])
def test_a_named_pipe_in_a_folder_is_refused(template, tmp_path, name) -> None:
    folder = shutil.copytree(template, tmp_path / "model")
    file = next(folder.glob(f"{name}*"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ModelError):
        build(f"hf:{folder}", device="meta")


@pytest.mark.parametrize("kind", ["llama", "of-its-own"])
def test_code_of_a_folder_never_runs(template, tmp_path, kind) -> None:
    folder = shutil.copytree(template, tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "model_type": kind, **CODE}))
    if kind == "llama":
        assert type(build(f"hf:{folder}")).__module__.startswith("transformers.")
    else:
        with pytest.raises(ModelError, match=r"only code in its folder can build.*never run"):
            build(f"hf:{folder}")
    assert not (template.parent / "ran").exists()
