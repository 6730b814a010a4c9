"""Writes the weights of a run as a folder that Hugging Face's `from_pretrained` and other tools read.

config.json                       the model's shape
model.safetensors                 the weights; or several files, and an index of them
tokenizer.json and others         the tokenizer, if the run has one of its own
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shoal.checkpoint import (
    Piece,
    SingleProcess,
    dtype_named,
    load,
    read_manifest,
)
from shoal.errors import ModelError, RunError
from shoal.models import Transformer, llama_config, llama_name
from shoal.train.config import TrainConfig
from shoal.train.located import build_model, shape_of
from shoal.train.restore import newest_of

__all__ = ["DTYPES", "Exported", "export"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes that weights may be written in."""

_SHARD_BYTES = 2 << 30
_OF_TOKENIZERS = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*")
_HUGGING_FACE = "hf:"
_ONLY = "model.safetensors"

_Wanted = tuple[str, tuple[int, ...], torch.dtype]


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
    """How a model is written: its configuration, and the name of each tensor, by that in the checkpoint."""

    config: Mapping[str, Any]
    names: Mapping[str, str]
    folder: Path | None


def export(
    path: Path,
    directory: Path,
    dtype: str | None = None,
    *,
    say: Callable[[str], object] = lambda text: None,
    shard_bytes: int = _SHARD_BYTES,
) -> Exported:
    """Write the weights of a run's newest sound checkpoint; at most one file of them is held in memory.

    Args:
        path: The run, or one of its checkpoints.
        directory: The folder to make; it appears when all is written.
        dtype: One of `DTYPES`; None for the one in the model's configuration, or else float32.
        say: Called with a message for each corrupt checkpoint that is skipped.
        shard_bytes: Bytes of weights in a file, at most, unless one tensor has more.

    Raises:
        RunError: The path is not a run's, or the folder exists already.
        CheckpointError: There is no sound checkpoint.
        ModelError: The model has no form in Hugging Face's layout.
    """
    if directory.exists():
        raise RunError(
            f"{directory} exists already, and an export overwrites nothing",
            possible="a path that does not exist yet",
            change="give another folder, or delete that one",
        )
    config, checkpoint = newest_of(path, say)
    layout = _layout_of(config)
    dtype = dtype or str(layout.config.get("dtype") or layout.config.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        dtype = "float32"
    staging = directory.with_name(f"{directory.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        files, tensors, nbytes = _write_weights(checkpoint, layout.names, staging, DTYPES[dtype], shard_bytes)
        content = {**layout.config, "torch_dtype": dtype}
        content.pop("dtype", None)
        (staging / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        has_tokenizer = _copy_tokenizer(config, layout.folder, staging)
        os.replace(staging, directory)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise RunError(
            f"{directory} cannot be written: {error.strerror or error}",
            possible="a place with room for the weights, where files may be made",
            change="give another folder",
        ) from error
    return Exported(checkpoint, files, tensors, nbytes, dtype, has_tokenizer)


def _layout_of(config: TrainConfig) -> _Layout:
    """Return how the model of a configuration is written."""
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
    return _Layout(content, {name: llama_name(name) for name, _ in model.named_parameters()}, None)


def _as_it_came(config: TrainConfig) -> _Layout:
    """Return the layout of a model that began as hf:PATH: names and configuration are its own."""
    given = Path(config.model.removeprefix(_HUGGING_FACE))
    file = given / "config.json" if given.is_dir() else given
    shape = config.model_copy(update={"model": f"{_HUGGING_FACE}{file}"})
    model = build_model(shape, "meta")
    content = {**json.loads(file.read_text(encoding="utf-8")), **config.model_options}
    return _Layout(content, {name: name for name in model.state_dict()}, file.parent)


def _write_weights(
    checkpoint: Path, names: Mapping[str, str], folder: Path, dtype: torch.dtype, shard_bytes: int
) -> tuple[int, int, int]:
    """Write the weights; return the numbers of files and of tensors, and the bytes."""
    shards = list(_shards(checkpoint, names, dtype, shard_bytes))
    placed: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, 1):
        held = {names[path.partition("/")[2]]: torch.empty(shape, dtype=kind) for path, shape, kind in shard}
        pieces = [
            Piece.whole(path, tensor) for (path, _, _), tensor in zip(shard, held.values(), strict=True)
        ]
        load(checkpoint, pieces, SingleProcess())
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else _ONLY
        save_file(held, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(held, file)
        total += sum(tensor.nbytes for tensor in held.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return len(shards), len(placed), total


def _shards(
    checkpoint: Path, names: Mapping[str, str], dtype: torch.dtype, shard_bytes: int
) -> Iterator[Sequence[_Wanted]]:
    """Return the tensors of each file: their names in the checkpoint, shapes and dtypes."""
    shard: list[_Wanted] = []
    held = 0
    for path, record in read_manifest(checkpoint).tensors.items():
        kind, _, name = path.partition("/")
        if kind not in ("model", "fixed") or name not in names:
            continue
        is_floating = record.dtype in ("F32", "F16", "BF16", "F64")
        wanted = path, record.shape, dtype if is_floating else dtype_named(record.dtype)
        nbytes = torch.Size(record.shape).numel() * wanted[2].itemsize
        if shard and held + nbytes > shard_bytes:
            yield shard
            shard, held = [], 0
        shard.append(wanted)
        held += nbytes
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
