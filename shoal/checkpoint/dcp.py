"""Converts checkpoints to those of `torch.distributed.checkpoint` (DCP) and back, in one process.

    model/NAME, fixed/NAME      model.NAME
    optimizer*/KEY/NAME         optimizer.state.NAME.KEY
    anything else               shoal.PATH

So DCP loads `{"model": model.state_dict()}` from it. Beside these stands `shoal.json`, the bytes of a JSON
object: the step, the state, and the path of each key, so that the way back gives an equal checkpoint. A
checkpoint of DCP without it becomes one with step 0, the weights, and what is kept for each of them.

The metadata of DCP is a pickle, which may run any code when it is read. Here only the classes of which DCP
makes it are allowed in it; the tensors are read with `weights_only`.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import uuid
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp

from shoal.checkpoint.coordinator import SingleProcess
from shoal.checkpoint.directory import verify
from shoal.checkpoint.files import REAL_FILES, remove_tree
from shoal.checkpoint.load import fill
from shoal.checkpoint.manifest import Manifest, read_manifest
from shoal.checkpoint.region import Piece, Region, check_coverage
from shoal.checkpoint.save import save
from shoal.checkpoint.shard import dtype_named
from shoal.errors import CheckpointError, CorruptCheckpointError, RunError
from shoal.limits import is_inside, open_regular, strict_json_of

_FACTS = "shoal.json"
_OPTIMIZER = re.compile(r"optim(?:izer)?\.state\.(.+)\.([^.]+)")
_HARMLESS = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


def to_dcp(checkpoint: Path, folder: Path) -> int:
    """Write a checkpoint in DCP's format; at most two tensors at a time are in memory.

    Args:
        checkpoint: The checkpoint, which is verified first.
        folder: A folder that is absent or empty.

    Returns:
        The number of tensors.

    Raises:
        CorruptCheckpointError: The checkpoint is corrupt.
        CheckpointError: The folder cannot be written.
        RunError: The folder holds something.
    """
    _require_empty(folder)
    verify(checkpoint)
    manifest = read_manifest(checkpoint)
    paths = {_key_of(path): path for path in manifest.tensors}
    facts = json.dumps({"step": manifest.step, "state": dict(manifest.state), "paths": paths})
    state = {
        key: torch.empty(manifest.tensors[path].shape, dtype=_dtype(manifest, path), device="meta")
        for key, path in paths.items()
    }
    state[_FACTS] = torch.frombuffer(bytearray(facts.encode()), dtype=torch.uint8)
    staging = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    planner = _FromCheckpoint(checkpoint, manifest, paths)
    try:
        with _without_warnings():
            # DCP keeps all tensors of a file in memory until it is written: so each has a file of its own.
            writer = FileSystemWriter(staging, single_file_per_rank=False)
            save_by_dcp(state, storage_writer=writer, planner=planner, no_dist=True)
        staging.rename(folder)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from error
    finally:
        if staging.exists():
            remove_tree(staging, REAL_FILES)
    return len(paths)


def from_dcp(folder: Path, directory: Path, *, trusted: bool = False) -> tuple[Path, Sequence[str]]:
    """Save a checkpoint from one of DCP.

    One tensor after the other is read and written; four times the largest one is the most that is in memory.

    Args:
        folder: The folder that DCP wrote.
        directory: A directory of checkpoints.
        trusted: Whether its metadata may hold any class, and so run any code.

    Returns:
        The checkpoint, and the keys that were left out since they are no tensors or belong to no weight.

    Raises:
        CheckpointError: The folder is not DCP's, or holds a type that cannot be stored.
        CorruptCheckpointError: Its files cannot be read.
    """
    reader = _Reader(folder, trusted)
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
        for key, each in metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    facts: dict[str, Any] = {"step": 0, "state": {"plan": "", "ranks": 0}, "paths": {}}
    if _FACTS in tensors:
        facts = _facts(folder, reader.read(_FACTS, tensors.pop(_FACTS)), tensors.keys())
    paths = facts["paths"] or _guessed_paths(tensors)
    keys = {path: key for key, path in paths.items()}
    if len(keys) < len(paths):
        one, other = next((key, keys[path]) for key, path in paths.items() if keys[path] != key)
        raise CheckpointError(f"{folder} has {one!r} and {other!r}, which are one tensor of a checkpoint")
    pieces = [Piece.whole(path, tensors[key]) for path, key in keys.items()]
    path = save(
        directory,
        facts["step"],
        pieces,
        facts["state"],
        SingleProcess(),
        values=lambda piece: reader.read(keys[piece.name], piece.tensor),
    )
    return path, sorted(metadata.keys() - paths.keys() - {_FACTS})


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Let DCP not warn that it runs in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _facts(folder: Path, text: torch.Tensor, keys: Collection[str]) -> dict[str, Any]:
    """Return what `to_dcp` wrote beside the tensors.

    Raises:
        CorruptCheckpointError: It is not that.
    """
    try:
        facts: dict[str, Any] = strict_json_of(bytes(text.tolist()))
        step, state, paths = facts["step"], facts["state"], facts["paths"]
        if not (type(step) is int and step >= 0 and isinstance(state, dict) and paths.keys() <= set(keys)):
            raise ValueError("it is not what `shoal checkpoint convert` writes")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{_FACTS} in {folder} cannot be read: {error!r}") from error
    return facts


def _require_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(
            f"{folder} holds something already",
            possible="a folder that is absent or empty",
            change="give another folder",
        )


def _dtype(manifest: Manifest, path: str) -> torch.dtype:
    return dtype_named(manifest.tensors[path].dtype)


def _key_of(path: str) -> str:
    kind, _, rest = path.partition("/")
    if kind in ("model", "fixed"):
        return f"model.{rest}"
    key, slash, name = rest.partition("/")
    if kind.startswith("optimizer") and slash:
        return f"optimizer.state.{name}.{key}"
    return f"shoal.{path}"


def _guessed_paths(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the paths of the keys that other programs give to weights and to an optimizer's state."""
    paths: dict[str, str] = {}
    weights: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        if not key.startswith(("optim", "lr_scheduler", "train_state", "dataloader")):
            name = key.removeprefix("model.")
            paths[key], weights[name] = f"model/{name}", tensor
    for key, tensor in tensors.items():
        match = _OPTIMIZER.fullmatch(key)
        if match is not None and match[1] in weights:
            kind = "optimizer" if tensor.shape == weights[match[1]].shape else "optimizer-tensor"
            paths[key] = f"{kind}/{match[2]}/{match[1]}"
    return paths


@final
class _FromCheckpoint(DefaultSavePlanner):
    """Read each tensor from a checkpoint when DCP writes it."""

    def __init__(self, checkpoint: Path, manifest: Manifest, paths: Mapping[str, str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._paths = paths

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor of a key."""
        path = self._paths.get(index.fqn)
        if path is None:
            return super().lookup_object(index)
        tensor = torch.empty(self._manifest.tensors[path].shape, dtype=_dtype(self._manifest, path))
        fill(self._checkpoint, self._manifest, [Piece.whole(path, tensor)])
        return tensor


@final
class _Reader(FileSystemReader):
    """Read a checkpoint of DCP, whose metadata holds nothing but what DCP writes, unless it is trusted."""

    def __init__(self, folder: Path, trusted: bool) -> None:
        super().__init__(folder)
        self._folder = folder
        self._trusted = trusted
        self._metadata: Metadata | None = None

    def read(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor, of the shape and the type of `like`.

        Raises:
            CorruptCheckpointError: Its file cannot be read.
        """
        tensor = torch.empty_like(like, device="cpu")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with _without_warnings():
                load_by_dcp({key: tensor}, storage_reader=self, planner=planner, no_dist=True)
        except CheckpointException as error:  # its text is that of tracebacks
            cause = next(iter(error.failures.values()))[0]
            raise CorruptCheckpointError(f"{key!r} in {self._folder} cannot be read: {cause!r}") from error
        except OSError as error:
            raise CorruptCheckpointError(f"{self._folder} cannot be read: {error}") from error
        return tensor

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata, which is read once."""
        if self._metadata is None:
            self._metadata = self._read_metadata()
        return self._metadata

    def _read_metadata(self) -> Metadata:
        path = self._folder / ".metadata"
        try:
            with open_regular(path) as file:
                metadata = (pickle.Unpickler if self._trusted else _Unpickler)(file).load()
        except FileNotFoundError:
            raise CheckpointError(
                f"{self._folder} is not a checkpoint of torch.distributed.checkpoint: it has no .metadata"
            ) from None
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle raises errors of any kind
            raise CorruptCheckpointError(f"{path} cannot be read: {error!r}") from error
        if not isinstance(metadata, Metadata):
            raise CorruptCheckpointError(f"{path} holds {type(metadata).__name__} in place of Metadata")
        try:
            _require_whole(metadata)
        except (AttributeError, TypeError, ValueError, CheckpointError) as error:
            raise CorruptCheckpointError(f"{path} is not what DCP writes: {error}") from error
        for stored in (metadata.storage_data or {}).values():
            name = getattr(stored, "relative_path", None)
            place = self._folder / str(name)
            if not is_inside(name) or (place.exists() and not place.is_file()):
                raise CorruptCheckpointError(f"{path} names {name!r:.200}, which is no file in its folder")
        return metadata


def _require_whole(metadata: Metadata) -> None:
    """Check that the chunks of each tensor hold each of its elements exactly once.

    DCP leaves elements that no chunk has as they are in memory.

    Raises:
        AttributeError, TypeError, ValueError: It does not describe tensors.
        CheckpointError: They do not.
    """
    if not isinstance(metadata.storage_data, dict | None):
        raise TypeError(f"storage_data is {type(metadata.storage_data).__name__}")
    for key, each in metadata.state_dict_metadata.items():
        if not isinstance(key, str):
            raise TypeError(f"{key!r:.80} is no name of a tensor")
        if not isinstance(each, TensorStorageMetadata):
            continue
        dtype, shape = each.properties.dtype, tuple(each.size)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"the type of {key!r:.80} is {dtype!r:.80}")
        if math.prod(max(1, length) for length in shape) * dtype.itemsize >= 1 << 63:
            raise ValueError(f"{key!r:.80} has the shape {shape!r:.80}")
        regions = [Region(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in each.chunks]
        check_coverage(key, shape, [(region, 0, region.elements) for region in regions])


@final
class _Unpickler(pickle.Unpickler):
    """Refuse all classes and functions but those of which DCP makes its metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class by name."""
        found = super().find_class(module, name) if "." not in name and _is_known(module, name) else None
        is_own = isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
        if (module, name) in _HARMLESS or is_own or isinstance(found, torch.dtype):
            return found
        raise CheckpointError(
            f"the metadata of this checkpoint asks for {module}.{name}, which is not DCP's own: to read it "
            "may run any code. Give --trust if you trust whoever wrote it"
        )


def _is_known(module: str, name: str) -> bool:
    if module == "torch":
        return name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
    return module.startswith("torch.distributed.checkpoint.") or (module, name) in _HARMLESS
