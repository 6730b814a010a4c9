"""Builds a model from the text that names it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shoal.errors import ModelError, UserError, nearest
from shoal.models.config import TransformerConfig, preset
from shoal.models.hugging_face import from_hugging_face
from shoal.models.task import Task
from shoal.models.transformer import Transformer


def build(
    spec: str,
    *,
    overrides: Mapping[str, object] | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Build the model that a text names.

    ==========================  ==========================================  ==============================
    spec                        gives                                       overrides are
    ==========================  ==========================================  ==============================
    `llama3-8b`                 a `Transformer` with a preset's shape       fields of `TransformerConfig`
    `package.module:function`   the module that your function returns       its keyword arguments
    `hf:PATH`                   Hugging Face's causal model or sequence     entries of its configuration
                                classifier for a folder with
                                `config.json`, or for such a file
    ==========================  ==========================================  ==============================

    A preset gives a model without the weights that training starts from: call its `initialize`. A Hugging
    Face folder that holds weights gives those, in fp32. On the meta device the model's method
    `initialize_parameter` reads them, one at a time.

    Args:
        spec: One of the above.
        overrides: Changes to what the spec says.
        device: Device on which the parameters are created; "meta" creates none.

    Raises:
        ModelError: The spec names nothing, an override fits nothing, or the result is no module.
        MissingExtraError: `hf:` without the extra `hf`.
    """
    return _required(spec, build_or_task(spec, overrides=overrides, device=device))


def build_or_task(
    spec: str,
    *,
    overrides: Mapping[str, object] | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module | Task:
    """Build the model or the Task that a text names; a factory may return a Task with its inputs and loss.

    Raises:
        UserError: See `build`.
    """
    changes = dict(overrides or {})
    if spec.startswith("hf:"):
        return from_hugging_face(Path(spec.removeprefix("hf:")), changes, torch.device(device))
    if ":" in spec:
        return _from_factory(spec, changes, torch.device(device))
    config = TransformerConfig(**(preset(spec).model_dump() | changes))
    with torch.device(device):
        return Transformer(config)


def _from_factory(spec: str, arguments: dict[str, Any], device: torch.device) -> nn.Module | Task:
    factory = find_factory(spec)
    try:
        with device:
            made = factory(**arguments)
    except UserError:
        raise
    except Exception as error:
        raise ModelError(
            f"the factory {spec} raised {type(error).__name__}: {error}",
            possible=f"a call {_signature(factory)} that returns a torch.nn.Module",
            change="correct the factory, or the arguments given to it",
        ) from error
    return made if isinstance(made, Task) else _required(spec, made)


def _required(spec: str, made: object) -> nn.Module:
    if isinstance(made, nn.Module):
        return made
    raise ModelError(
        f"the factory {spec} returned {type(made).__name__}, which is not a torch.nn.Module",
        possible="a function or class that gives a torch.nn.Module; `shoal check` also takes a Task",
        change="return the module from it",
    )


def find_factory(spec: str) -> Callable[..., object]:
    """Return the function that `package.module:function` names.

    Raises:
        ModelError: There is no such module, or no such function in the module.
    """
    module_name, _, function_name = spec.partition(":")
    module = _import(module_name)
    factory: object = getattr(module, function_name, None)
    if not callable(factory):
        callables = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        problem = "is not a function" if hasattr(module, function_name) else "does not exist"
        raise ModelError(
            f"{function_name!r} in the module {module_name!r} {problem}{nearest(function_name, callables)}",
            possible=", ".join(callables) or "nothing: the module holds no function",
            change="write package.module:function with a function of that module",
        )
    return factory


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):
            raise ModelError(
                f"there is no module {missing!r}{nearest(missing, _siblings(missing))}",
                possible="a module that Python can import here",
                change="correct its name, install it, or put its folder on PYTHONPATH",
            ) from None
        raise ModelError(
            f"importing the module {name!r} raised {type(error).__name__}: {error}",
            possible="a module that can be imported",
            change=f"correct the error that `python -c 'import {name}'` shows",
        ) from error


def _siblings(missing: str) -> list[str]:
    """Return the modules that could be meant: those in the same package, or at the top."""
    parent, _, _ = missing.rpartition(".")
    if not parent:
        return [module.name for module in pkgutil.iter_modules()]
    folders = getattr(sys.modules[parent], "__path__", [])
    return [f"{parent}.{module.name}" for module in pkgutil.iter_modules(folders)]


def _signature(factory: Callable[..., object]) -> str:
    try:
        return str(inspect.signature(factory))
    except ValueError:
        return "(...)"
