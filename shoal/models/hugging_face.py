"""Builds Hugging Face's causal language models and classifiers, and reads weights, whole or one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from shoal.errors import MissingExtraError, ModelError, UserError, nearest
from shoal.models.classifier import Classifier, fill_head, is_classifier, is_head, read_classifier
from shoal.models.model_folder import INDEX, ONE_FILE, damaged, files_of_index, require_sound_folder
from shoal.models.stored_weights import StoredTensor, find_stored


def from_hugging_face(path: Path, changes: Mapping[str, Any], device: torch.device) -> nn.Module:
    """Build the model of a folder, or of a `config.json`; see `shoal.models.build`.

    Args:
        path: The folder, or the file.
        changes: Entries of the configuration to change.
        device: Where it is built. On the meta device the model of a folder with weights gets a method
            `initialize_parameter(name, tensor, seed)` that reads them.

    Raises:
        ModelError: There is no such model, or its weights cannot be read one by one for the meta device.
        MissingExtraError: transformers is not installed.
    """
    with _refusing(path):
        config = _read_config(path, changes)
        return _build(path, config, device)


def classifier_of(path: Path, changes: Mapping[str, Any]) -> Classifier:
    """Return the sequence classifier that the model of a folder, or of a `config.json`, is or becomes.

    Raises:
        ModelError: There is no such model, or it has no such form.
        MissingExtraError: transformers is not installed.
    """
    with _refusing(path):
        return read_classifier(path, _read_config(path, changes), changes)


def _read_config(path: Path, changes: Mapping[str, Any]) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("a Hugging Face model", package="transformers", extra="hf") from error
    if not (path / "config.json").is_file() and not path.is_file():
        raise ModelError(
            f"there is no Hugging Face configuration at {str(path)!r}",
            possible="a folder that holds config.json, or such a file",
            change="correct the path after hf:",
        )
    require_sound_folder(path)
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # Training never reads the cache of keys and values, but would pay for it.
    config.use_cache = False
    _change_config(config, changes)
    return config


def _build(path: Path, config: Any, device: torch.device) -> nn.Module:
    import transformers

    has_weights = any(any(path.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
    if has_weights and device.type == "meta":
        return _in_parts(path, _without_memory(config))
    model: nn.Module
    if has_weights:
        with _quiet(transformers.utils.logging):
            model, loaded = _kind_of(config).from_pretrained(
                path,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        model.new_parameters = sorted(loaded["missing_keys"])  # type: ignore[assignment]
    else:
        with device:
            model = _from_config(config)
    return model.to(device=device, dtype=torch.float32).train()


def _from_config(config: Any) -> nn.Module:
    """Return a model in fp32, whatever dtype its configuration names.

    Published weights are often in 16 bits, but the Plan chooses the precision of training. Buffers that the
    constructor computes, such as rotary tables, would have the errors of 16 bits.
    """
    model: nn.Module = _kind_of(config).from_config(config, dtype=torch.float32, trust_remote_code=False)
    return model


def _kind_of(config: Any) -> Any:
    """Return the class of transformers that builds the model."""
    import transformers

    if is_classifier(config):
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForCausalLM


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn what transformers raises within the context into a ModelError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Its first lines tell what is wrong; what follows is advice that does not fit here.
        told = " ".join(str(error).split("\n\n")[0].split())
        raise ModelError(
            f"transformers cannot build {str(path)!r}: {type(error).__name__}: {told}",
            possible="the configuration of a causal language model, or of a sequence classifier, that the "
            "installed transformers knows",
            change="correct the configuration, or what overrides it",
        ) from error


def can_read_in_parts(path: Path) -> bool:
    """Return whether a folder has weights in safetensors, which can be read one by one."""
    return (path / ONE_FILE).is_file() or (path / INDEX).is_file()


def _without_memory(config: Any) -> nn.Module:
    """Return a model whose parameters are on the meta device, and whose buffers have their values."""
    with _parameters_on_meta():
        model = _from_config(config)
    return model.to(dtype=torch.float32).train()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device as soon as a module has it, within the context."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _in_parts(path: Path, model: nn.Module) -> nn.Module:
    """Read a model's buffers from a folder, and give it the method that reads parameters, or makes a head.

    Raises:
        ModelError: The folder has no such weights, or not those of the model.
    """
    files = _files_of(path) if can_read_in_parts(path) else {}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    places: dict[str, list[StoredTensor]] = {}
    new: list[str] = []
    buffers = {name: each for name, each in model.named_buffers() if name in model.state_dict()}
    for name, parameter in (*model.named_parameters(), *buffers.items()):
        shape = tuple(parameter.shape)
        names = (name, name.removeprefix(prefix))
        stored = next((found for each in names if (found := find_stored(each, shape, files))), [])
        if not stored and name in buffers:  # it keeps the value that the model's constructor gave it
            continue
        if not stored and files and is_head(model, name):
            new.append(name)
            continue
        if not stored or any(_shape_of(files[each.name], each.name) != each.shape for each in stored):
            raise ModelError(
                f"the weights in {str(path)!r} cannot be read one by one: {name} is not among them in the "
                f"shape {list(parameter.shape)}",
                possible="safetensors with the names and shapes of the model's parameters",
                change=f"build the model on a real device, or name the file: hf:{path / 'config.json'}",
            )
        places[name] = stored

    def initialize_parameter(name: str, tensor: torch.Tensor, seed: int) -> None:
        if name in new:
            with torch.no_grad():
                fill_head(model, name, tensor, seed)
            return
        for stored in places[name]:
            with torch.no_grad(), safe_open(files[stored.name], framework="pt") as opened:
                stored.of(tensor).copy_(opened.get_tensor(stored.name))

    for name in buffers.keys() & places.keys():  # such as the balance of a router's choices
        initialize_parameter(name, buffers[name], 0)
    model.initialize_parameter = initialize_parameter  # type: ignore[assignment]
    model.new_parameters = new  # type: ignore[assignment]
    return model


def _files_of(path: Path) -> dict[str, Path]:
    """Return the file of each tensor, by its name.

    Raises:
        ModelError: The index or the file is damaged.
    """
    if (path / INDEX).is_file():
        return files_of_index(path)
    try:
        with safe_open(path / ONE_FILE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), path / ONE_FILE)
    except (OSError, SafetensorError) as error:
        raise damaged(path / ONE_FILE, error) from error


def _shape_of(file: Path, name: str) -> tuple[int, ...]:
    try:
        with safe_open(file, framework="pt") as opened:
            return tuple(opened.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise damaged(file, error) from error


@contextlib.contextmanager
def _quiet(output: Any) -> Iterator[None]:
    """Turn off transformers' bars and warnings within the context: every rank would print its own."""
    had_bars, verbosity = output.is_progress_bar_enabled(), output.get_verbosity()
    output.disable_progress_bar()
    output.set_verbosity_error()
    try:
        yield
    finally:
        output.set_verbosity(verbosity)
        if had_bars:
            output.enable_progress_bar()


def _change_config(config: Any, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if not hasattr(config, name):
            names = list(config.to_dict())
            raise ModelError(
                f"the Hugging Face configuration has no entry {name!r}{nearest(name, names)}",
                possible=", ".join(names),
                change=f"correct or remove {name!r}",
            )
        if name == "id2label":
            value = {int(number): label for number, label in value.items()}
        setattr(config, name, value)
