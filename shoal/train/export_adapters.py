"""Writes the adapters of a run with LoRA as a folder that peft reads, or adds them to the weights.

adapter_config.json          rank, alpha and targets, and the folder of the base model
adapter_model.safetensors    the two matrices of each target
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from shoal.checkpoint import Piece, SingleProcess, load, read_manifest
from shoal.errors import RunError
from shoal.models import StoredTensor
from shoal.train.config import LoraConfig, TrainConfig

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
