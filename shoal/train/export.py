"""Writes the weights of a run as a folder that Hugging Face's `from_pretrained` and other tools read.

config.json                       the model's shape
model.safetensors                 the weights; or several files, and an index of them
tokenizer.json and others         the tokenizer, if the run has one of its own

A run with LoRA gives its adapters alone. With `merge` it gives the whole model, in
which each layer's weight has its adapters' product added.

Writes the adapters of a run with LoRA as a folder that peft reads, or adds them to the weights.

adapter_config.json          rank, alpha and targets, and the folder of the base model
adapter_model.safetensors    the two matrices of each target
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from shoal.checkpoint import (
    Piece,
    SingleProcess,
    dtype_named,
    load,
    load_verified,
    make_mapped_file,
    newest_sound,
    read_manifest,
    resolve,
)
from shoal.errors import CheckpointError, ModelError, RunError
from shoal.models import (
    StoredTensor,
    Transformer,
    is_transposed,
    llama_config,
    plain_name,
    stored_as_llama,
    stored_for,
)
from shoal.spec.run import Run
from shoal.train.absolute_paths import build_model, shape_of
from shoal.train.config import LoraConfig, TrainConfig, load_config
from shoal.train.state import fixed_pieces

T = TypeVar("T")


def load_model(
    path: Path | str, say: Callable[[str], object] = warnings.warn
) -> tuple[nn.Module, TrainConfig]:
    """Return the model of a run from its newest sound checkpoint, on the CPU in fp32.

    Args:
        path: The run, or one of its checkpoints.
        say: Called with a message for each corrupt checkpoint that is skipped; by default a warning.

    Returns:
        The model and the run's configuration.

    Raises:
        RunError: The path is not a run's.
        CheckpointError: There is no sound checkpoint.
    """
    path = Path(path)
    config = config_of(path)
    model = build_model(config, "cpu")
    trained = [
        Piece.whole(f"model/{name}", parameter.detach())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    pieces = trained + fixed_pieces(model)
    load_newest(path, say, lambda checkpoint: load_pieces(checkpoint, pieces))
    return model, config


def config_of(path: Path) -> TrainConfig:
    """Return the configuration of a run, or of the run of a checkpoint.

    Raises:
        RunError: The path is not a run's.
    """
    is_checkpoint = (path / "manifest.json").is_file()
    run = Run.open(path.resolve().parent.parent if is_checkpoint else path)
    return load_config(base=run.description["config"])


def load_newest(path: Path, say: Callable[[str], object], load: Callable[[Path], T]) -> tuple[Path, T]:
    """Load the newest sound checkpoint of a run; return it, with what `load` returns.

    Args:
        path: The run, or one of its checkpoints.
        say: Called with a message for each corrupt checkpoint that is skipped.
        load: Loads a checkpoint, and raises CorruptCheckpointError if it is corrupt.

    Raises:
        CheckpointError: There is no sound checkpoint.
    """
    found = newest_sound(resolve(path), SingleProcess(), say, load)
    if found is None:
        raise CheckpointError(f"{path} has no sound checkpoint")
    return found


def load_pieces(checkpoint: Path, pieces: Sequence[Piece]) -> None:
    """Fill pieces from a checkpoint, and verify all of it meanwhile; errors as in `load_verified`."""
    load_verified(checkpoint, read_manifest(checkpoint), SingleProcess(), fresh=pieces)


_BASE, _A, _B = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters in a checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        lora: The configuration that made them.
        layers: The layers that have one: names by the paths of their weights in the checkpoint.
        shapes: Shape of each tensor of the checkpoint, by path.
        transposed: The weights, by name, that are `[in, out]`.
    """

    checkpoint: Path
    lora: LoraConfig
    layers: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    transposed: frozenset[str]

    @classmethod
    def of(cls, config: TrainConfig, checkpoint: Path, transposed: frozenset[str]) -> Adapters | None:
        """Return the adapters of a run's checkpoint; None if it was trained without LoRA."""
        if config.lora.rank is None:
            return None
        shapes = {path: record.shape for path, record in read_manifest(checkpoint).tensors.items()}
        layers = {path: path.partition("/")[2].removesuffix(_BASE) for path in shapes if path.endswith(_BASE)}
        return cls(checkpoint, config.lora, layers, shapes, transposed)

    def __contains__(self, path: str) -> bool:
        return path in self.layers

    def pair(self, layer: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A `[rank, in]` and B `[out, rank]` of a layer, in fp32."""
        first, second = self._read(f"model/{layer}{_A}", f"model/{layer}{_B}")
        return first, second

    def merged(self, path: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight with this path, with its adapters' product added in fp32."""
        layer = self.layers[path]
        (weight,), (first, second) = self._read(path), self.pair(layer)
        assert self.lora.rank is not None
        added = (second @ first) * (self.lora.alpha / self.lora.rank)
        return weight.add_(added.t() if f"{layer}.weight" in self.transposed else added).to(dtype)

    def _read(self, *paths: str) -> list[torch.Tensor]:
        tensors = [torch.empty(self.shapes[path], dtype=torch.float32) for path in paths]
        pieces = [Piece.whole(path, tensor) for path, tensor in zip(paths, tensors, strict=True)]
        load(self.checkpoint, pieces, SingleProcess())
        return tensors


def require_adapters(path: Path, config: TrainConfig) -> None:
    """Refuse to merge what has no adapters.

    Raises:
        RunError: The run was trained without LoRA.
    """
    if config.lora.rank is None:
        raise RunError(
            f"{path} was trained without LoRA, so it has no adapters to merge",
            possible="runs with lora.rank",
            change="leave out --merge",
        )


def write_adapters(
    adapters: Adapters,
    stored: Mapping[str, Sequence[StoredTensor]],
    base: Path | None,
    task: str | None,
    folder: Path,
    dtype: torch.dtype,
) -> tuple[int, int, int]:
    """Write the adapters; return the numbers of files and of tensors, and the bytes.

    Args:
        adapters: The adapters.
        stored: The tensors of each tensor of the model, by name, as files of the base model have them.
        base: Folder of the base model; None if there is none.
        task: Kind of the model, as peft names it; None for any module.
        folder: The folder to write into.
        dtype: Dtype of the matrices.
    """
    held: dict[str, torch.Tensor] = {}
    called = {
        layer: stored[f"{layer}.weight"][0].name.removesuffix(".weight") for layer in adapters.layers.values()
    }
    for layer, name in called.items():
        for kind, matrix in zip(("lora_A", "lora_B"), adapters.pair(layer), strict=True):
            held[f"base_model.model.{name}.{kind}.weight"] = matrix.to(dtype)
    save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    lora, known = adapters.lora, {each.name for tensors in stored.values() for each in tensors}
    content = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _targets(set(called.values()), known),
        "fan_in_fan_out": not adapters.transposed.isdisjoint(f"{layer}.weight" for layer in called),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 1, len(held), sum(tensor.nbytes for tensor in held.values())


def _targets(layers: set[str], known: set[str]) -> list[str]:
    """Return the last parts of the layers' names if these match no other layer, else the whole names."""
    ends = {layer.rpartition(".")[-1] for layer in layers}
    parts = [name.split(".") for name in known]
    modules = {".".join(each[:end]) for each in parts for end in range(1, len(each))}
    matched = {module for module in modules if module.rpartition(".")[-1] in ends}
    return sorted(ends if matched == layers else layers)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes that weights may be written in."""

_SHARD_BYTES = 2 << 30
_OF_TOKENIZERS = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*")
_HUGGING_FACE = "hf:"
_ONLY = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        checkpoint: The checkpoint that was read.
        files: Files of weights.
        tensors: Tensors.
        nbytes: Bytes of the tensors.
        dtype: Their dtype.
        has_tokenizer: Whether a tokenizer was written too.
    """

    checkpoint: Path
    files: int
    tensors: int
    nbytes: int
    dtype: str
    has_tokenizer: bool


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a model is written.

    Attributes:
        config: Its configuration.
        stored: The tensors of each tensor of its `state_dict`, by name.
        folder: The folder that the model came from.
        transposed: The weights of layers that have them as `[in, out]`.
    """

    config: Mapping[str, Any]
    stored: Mapping[str, Sequence[StoredTensor]]
    folder: Path | None
    transposed: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor to write: its name and shape in the checkpoint, its place there, and its dtype."""

    path: str
    whole: tuple[int, ...]
    stored: StoredTensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.stored.shape).numel() * self.dtype.itemsize

    def piece(self, tensor: torch.Tensor) -> Piece:
        """Return the part of the checkpoint that fills the tensor."""
        start = self.stored.start(self.whole)
        return Piece(self.path, self.whole, start, start + tensor.numel(), tensor)


def export(
    path: Path,
    directory: Path,
    dtype: str | None = None,
    *,
    merge: bool = False,
    say: Callable[[str], object] = lambda text: None,
    shard_bytes: int = _SHARD_BYTES,
) -> Exported:
    """Write the weights of a run's newest sound checkpoint, which is read once and verified meanwhile.

    Files are mapped while they are written, so that the system may write back what does not fit in memory.

    Args:
        path: The run, or one of its checkpoints.
        directory: The folder to make; it appears when all is written.
        dtype: One of `DTYPES`; None for the one in the model's configuration, or else float32.
        merge: Whether the adapters of a run with LoRA are added to the weights, instead of written alone.
        say: Called with a message for each corrupt checkpoint that is skipped.
        shard_bytes: Bytes of weights in a file, at most, unless one tensor has more.

    Raises:
        RunError: The path is not a run's, the folder exists already, or there is nothing to merge.
        CheckpointError: There is no sound checkpoint.
        ModelError: The model has no form in Hugging Face's layout.
    """
    if directory.exists():
        raise RunError(
            f"{directory} exists already, and an export overwrites nothing",
            possible="a path that does not exist yet",
            change="give another folder, or delete that one",
        )
    config = config_of(path)
    if merge:
        require_adapters(path, config)
    is_alone = config.lora.rank is not None and not merge
    layout = _as_named(config) if is_alone and _is_own_code(config) else _layout_of(config)
    dtype = dtype or str(layout.config.get("dtype") or layout.config.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        dtype = "float32"
    staging = directory.with_name(f"{directory.name}.{uuid.uuid4().hex}.tmp")

    def write(checkpoint: Path) -> tuple[int, int, int]:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        adapters = Adapters.of(config, checkpoint, layout.transposed)
        if adapters is not None and is_alone:
            load_pieces(checkpoint, [])
            task = "CAUSAL_LM" if layout.config else None  # peft asks more of a model with a task
            return write_adapters(adapters, layout.stored, layout.folder, task, staging, DTYPES[dtype])
        return _write_weights(checkpoint, layout, adapters, staging, DTYPES[dtype], shard_bytes)

    try:
        checkpoint, written = load_newest(path, say, write)
        if not is_alone:
            content = {**layout.config, "torch_dtype": dtype}
            content.pop("dtype", None)
            (staging / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        has_tokenizer = _copy_tokenizer(config, layout.folder, staging)
        os.replace(staging, directory)
    except OSError as error:
        raise RunError(
            f"{directory} cannot be written: {error.strerror or error}",
            possible="a place with room for the weights, where files may be made",
            change="give another folder",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Exported(checkpoint, *written, dtype, has_tokenizer)


def _layout_of(config: TrainConfig) -> _Layout:
    """Return how the model of a configuration is written, without adapters."""
    config = config.model_copy(update={"lora": LoraConfig()})
    if config.model.startswith(_HUGGING_FACE):
        return _as_it_came(config)
    model = shape_of(config)
    if not isinstance(model, Transformer):
        raise ModelError(
            f"the model {config.model} is of your own code, which Hugging Face's layout cannot name",
            possible="presets, and models that began as hf:PATH",
            change="load it with shoal.train.load_model, and save it in a form of your own",
        )
    content = llama_config(model.config)
    stored = {name: stored_as_llama(name, tuple(each.shape)) for name, each in model.named_parameters()}
    return _Layout(content, stored, None, frozenset())


def _is_own_code(config: TrainConfig) -> bool:
    return ":" in config.model and not config.model.startswith(_HUGGING_FACE)


def _as_named(config: TrainConfig) -> _Layout:
    """Return the layout of the adapters of a user's model: its own names, and no configuration."""
    model = shape_of(config.model_copy(update={"lora": LoraConfig()}))
    stored = {name: [StoredTensor(name, tuple(each.shape))] for name, each in model.named_parameters()}
    return _Layout({}, stored, None, _transposed(model))


def _as_it_came(config: TrainConfig) -> _Layout:
    """Return the layout of a model that began as hf:PATH: names and configuration are its own."""
    given = Path(config.model.removeprefix(_HUGGING_FACE))
    file = given / "config.json" if given.is_dir() else given
    shape = config.model_copy(update={"model": f"{_HUGGING_FACE}{file}"})
    model: Any = build_model(shape, "meta")
    content = {**json.loads(file.read_text(encoding="utf-8")), **config.model_options}
    kind = str(content.get("model_type"))
    stored = {name: stored_for(kind, name, tuple(each.shape)) for name, each in model.state_dict().items()}
    return _Layout(content, stored, file.parent, _transposed(model))


def _transposed(model: nn.Module) -> frozenset[str]:
    return frozenset(f"{name}.weight" for name, module in model.named_modules() if is_transposed(module))


def _write_weights(
    checkpoint: Path,
    layout: _Layout,
    adapters: Adapters | None,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
) -> tuple[int, int, int]:
    """Write the weights; return the numbers of files and of tensors, and the bytes."""
    shards = list(_shards(checkpoint, layout.stored, dtype, shard_bytes))
    placed: dict[str, str] = {}
    pieces: list[Piece] = []
    merged: list[tuple[_Wanted, torch.Tensor]] = []
    total = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else _ONLY
        shapes = {each.stored.name: (each.stored.shape, each.dtype) for each in shard}
        held = make_mapped_file(folder / file, shapes, {"format": "pt"})
        for each in shard:
            tensor = held[each.stored.name]
            pieces.append(each.piece(tensor))
            if adapters is not None and each.path in adapters:
                merged.append((each, tensor))
            total += tensor.nbytes
        placed |= dict.fromkeys(held, file)
    load_pieces(checkpoint, pieces)
    for each, tensor in merged:
        assert adapters is not None
        tensor.copy_(adapters.merged(each.path, each.dtype))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return len(shards), len(placed), total


def _shards(
    checkpoint: Path, stored: Mapping[str, Sequence[StoredTensor]], dtype: torch.dtype, shard_bytes: int
) -> Iterator[Sequence[_Wanted]]:
    """Return the tensors of each file."""
    shard: list[_Wanted] = []
    held = 0
    for path, record in read_manifest(checkpoint).tensors.items():
        kind, _, name = path.partition("/")
        if kind not in ("model", "fixed"):
            continue
        is_floating = record.dtype in ("F32", "F16", "BF16", "F64")
        written_as = dtype if is_floating else dtype_named(record.dtype)
        for each in stored.get(plain_name(name), ()):
            wanted = _Wanted(path, record.shape, each, written_as)
            if shard and held + wanted.nbytes > shard_bytes:
                yield shard
                shard, held = [], 0
            shard.append(wanted)
            held += wanted.nbytes
    if shard:
        yield shard


def _copy_tokenizer(config: TrainConfig, folder: Path | None, target: Path) -> bool:
    """Copy the run's tokenizer, or else the one that came with the model; return whether there is one."""
    given = Path(config.data.tokenizer)
    if given.is_file() and given.name != "tokenizer.json":
        shutil.copyfile(given, target / "tokenizer.json")
        return True
    source = given.parent if given.is_file() else given if given.is_dir() else folder
    if source is None:
        return False
    found = [file for pattern in _OF_TOKENIZERS for file in source.glob(pattern) if file.is_file()]
    for file in found:
        shutil.copyfile(file, target / file.name)
    generation = source / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, target / generation.name)
    return bool(found)
