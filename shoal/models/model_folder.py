"""Refuses a Hugging Face folder whose files are missing, damaged, or code; nothing of it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shoal.errors import ModelError
from shoal.limits import MANIFEST, is_inside, json_of, read_regular

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
