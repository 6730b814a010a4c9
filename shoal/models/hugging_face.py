"""Builds Hugging Face's causal language models and classifiers, and reads weights, whole or one by one.

The tensors in files that make a parameter, where transformers stacks what files have apart.

Since release 5 a model of transformers has the experts of a layer in two parameters, and one tensor for each
matrix of each expert in its files:

==============================================  ===========================================================
parameter                                       tensors of expert e
==============================================  ===========================================================
`mlp.experts.gate_up_proj [experts, 2 f, h]`    `mlp.experts.e.gate_proj.weight [f, h]`, then `up_proj`
`mlp.experts.down_proj [experts, h, f]`         `mlp.experts.e.down_proj.weight [h, f]`
==============================================  ===========================================================

Mixtral's files call `mlp` `block_sparse_moe`, and the three matrices `w1`, `w3` and `w2`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal.errors import MissingExtraError, ModelError, UserError, nearest
from shoal.limits import MANIFEST, is_inside, json_of, read_regular
from shoal.models.dropout import normal

_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_LIKE_MIXTRAL = ("minimax", "mixtral")
_APART = ("deepseek_v2", "deepseek_v3", "olmoe", "qwen2_moe", "qwen3_moe")
"""Models of transformers whose files have experts apart, under the names of the model."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: a whole parameter, or rows of one expert in a stack.

    Attributes:
        name: Its name in the file.
        shape: Its shape.
        expert: Index of the expert; None for a whole parameter.
        row: Its first row within the expert.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    row: int = 0

    def of(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that it is, as a view."""
        return parameter if self.expert is None else parameter[self.expert].narrow(0, self.row, self.shape[0])

    def start(self, shape: tuple[int, ...]) -> int:
        """Return its first element in the flattened parameter, which has this shape."""
        if self.expert is None:
            return 0
        _, rows, width = shape
        return (self.expert * rows + self.row) * width


def find_stored(name: str, shape: tuple[int, ...], names: Container[str]) -> list[StoredTensor] | None:
    """Return the tensors that make a parameter, out of those with these names; None if some are not there."""
    for stored in _spellings(name, shape):
        if all(each.name in names for each in stored):
            return stored
    return None


def stored_for(model_type: str, name: str, shape: tuple[int, ...]) -> list[StoredTensor]:
    """Return the tensors as which a parameter is written, for a model of transformers of this type."""
    plain, *others = _spellings(name, shape)
    if not others or model_type not in (*_LIKE_MIXTRAL, *_APART):
        return plain
    return others[-1] if model_type in _LIKE_MIXTRAL else others[0]


def _spellings(name: str, shape: tuple[int, ...]) -> Iterator[list[StoredTensor]]:
    """Yield the parameter itself; of experts and routers also what it is made of, Mixtral's form last."""
    whole = [StoredTensor(name, shape)]
    yield whole
    layer, found, kind = name.rpartition(".mlp.experts.")
    if found and kind in _STACKS and len(shape) == 3:
        yield _apart(f"{layer}.mlp.experts", shape, _STACKS[kind])
        yield _apart(f"{layer}.block_sparse_moe.experts", shape, [_MIXTRAL[each] for each in _STACKS[kind]])
    elif name.endswith(".mlp.gate.weight"):
        yield whole
        yield [StoredTensor(name.replace(".mlp.", ".block_sparse_moe."), shape)]


def _apart(experts: str, shape: tuple[int, ...], matrices: tuple[str, ...] | list[str]) -> list[StoredTensor]:
    count, rows, width = shape
    part = rows // len(matrices)
    return [
        StoredTensor(f"{experts}.{expert}.{matrix}.weight", (part, width), expert, number * part)
        for expert in range(count)
        for number, matrix in enumerate(matrices)
    ]


ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_POINTER = b"version https://git-lfs.github.com"


def require_sound_folder(path: Path) -> None:
    """Check the configuration and the files of weights of a folder, or a `config.json` alone.

    Raises:
        ModelError: The configuration is not one, or only names code of its own; or a file of weights is
            missing or damaged. The message names the file.
    """
    content = _json_of(path / "config.json" if path.is_dir() else path)
    _require_no_code(path, content)
    if not path.is_dir():
        return
    if (path / INDEX).is_file():
        for file in sorted(set(files_of_index(path).values())):
            _require_file(file)
    elif (path / ONE_FILE).is_file():
        _require_file(path / ONE_FILE)


def files_of_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor that the index of a folder names, by the tensor's name.

    Raises:
        ModelError: The index is damaged, or names a file that is not in the folder. A file in it may be a
            link, as in Hugging Face's cache.
    """
    placed = _json_of(path / INDEX).get("weight_map")
    if not isinstance(placed, dict):
        raise damaged(path / INDEX, "it has no table weight_map")
    for name in placed.values():
        if not is_inside(name):
            raise ModelError(
                f"{str(path / INDEX)!r} names the file of weights {name!r:.200}",
                possible="names of files in the folder of the index",
                change="do not use this folder, or read its index and correct it",
            )
    return {tensor: path / name for tensor, name in placed.items()}


def _json_of(file: Path) -> dict[str, Any]:
    try:
        content = json_of(read_regular(file, MANIFEST))  # an index of 100,000 tensors has 10 MB
    except (OSError, ValueError) as error:
        raise damaged(file, error) from error
    if not isinstance(content, dict):
        raise damaged(file, f"it holds a {type(content).__name__} and not a JSON object")
    return content


def _require_no_code(path: Path, content: dict[str, Any]) -> None:
    """Refuse a model that only code in its folder can build."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # slow to import

    kind = content.get("model_type")
    if "auto_map" in content and kind not in CONFIG_MAPPING:
        raise ModelError(
            f"the model {str(path)!r} is of the type {kind!r}, which only code in its folder can build, and "
            "code that comes with a model is never run",
            possible="types that the installed transformers knows",
            change="read the code, and if you trust it, call it from a function of your own: "
            "model=package.module:function",
        )


def _require_file(file: Path) -> None:
    if not file.is_file():
        raise ModelError(
            f"the file of weights {str(file)!r} is not there, and {INDEX} names it",
            possible="a folder with all files of weights",
            change="copy the folder of the model again",
        )
    try:
        with safe_open(file, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise damaged(file, error) from error


def damaged(file: Path, reason: object) -> ModelError:
    """Return the error for a file that cannot be read, or is only a pointer to the file."""
    is_pointer = False
    if file.is_file():
        with file.open("rb") as source:
            is_pointer = source.read(len(_POINTER)) == _POINTER
    return ModelError(
        f"{str(file)!r} is only a pointer of Git LFS, and not the file"
        if is_pointer
        else f"{str(file)!r} cannot be read: {reason}",
        possible="whole files, as save_pretrained writes them",
        change="run git lfs pull in the folder; a gated model asks for its licence to be accepted first"
        if is_pointer
        else "copy the file again",
    )


_ENDING = "ForSequenceClassification"
_COUNTS = "id2label", "num_labels"


@dataclass(frozen=True, slots=True)
class Classifier:
    """The classifier that a folder's model is, or becomes with a new head.

    Attributes:
        architecture: Its class in transformers.
        classes: Names of its classes, in order; empty if the folder has no head and names no classes.
        padding: Id of its padding token; None if it has none.
    """

    architecture: str
    classes: tuple[str, ...]
    padding: int | None

    @property
    def is_named(self) -> bool:
        """Whether its classes have names of their own."""
        return self.classes != tuple(f"LABEL_{number}" for number in range(len(self.classes)))


def is_classifier(config: Any) -> bool:
    """Return whether a configuration of transformers is a sequence classifier's."""
    return any(name.endswith(_ENDING) for name in getattr(config, "architectures", None) or ())


def read_classifier(path: Path, config: Any, options: Mapping[str, Any]) -> Classifier:
    """Return the classifier of a folder, or of a `config.json`.

    Args:
        path: The folder, or the file.
        config: Its configuration in transformers, with the options.
        options: Entries of the configuration that were changed.

    Raises:
        ModelError: transformers has no sequence classifier of its kind.
    """
    from transformers.models.auto import modeling_auto

    architecture = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if architecture is None:
        raise ModelError(
            f"{str(path)!r} is a {config.model_type} model, of which transformers has no sequence classifier",
            possible="DistilBERT, BERT, RoBERTa, Llama, GPT-2 and others with a ...ForSequenceClassification",
            change="give another model, or leave out data.label",
        )
    file = path / "config.json" if path.is_dir() else path
    entries = json.loads(file.read_text(encoding="utf-8"))
    names = tuple(name for _, name in sorted((config.id2label or {}).items()))
    padding = getattr(config, "pad_token_id", None)
    found = Classifier(architecture, names, padding)
    is_told = is_classifier(config) or any(name in options for name in _COUNTS)
    if is_told or (found.is_named and "id2label" in entries):
        return found
    return Classifier(architecture, (), padding)


def is_head(model: nn.Module, name: str) -> bool:
    """Return whether a parameter belongs to the head of a classifier, which weights of a base model lack."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    return is_classifier(model.config) and (not name.startswith(prefix) or ".pooler." in name)


def fill_head(model: nn.Module, name: str, tensor: torch.Tensor, seed: int) -> None:
    """Fill a new parameter: matrices with normal numbers that depend on seed and name, biases with 0."""
    if tensor.dim() < 2:
        tensor.zero_()
        return
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    config: Any = model.config
    tensor.copy_(normal(tensor.shape, key, tensor.device) * getattr(config, "initializer_range", 0.02))


def new_parameters(model: nn.Module) -> tuple[str, ...]:
    """Return the parameters that the folder of a Hugging Face model lacks, and that get new values."""
    return tuple(getattr(model, "new_parameters", ()))


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
