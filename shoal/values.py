"""Values as bytes that hold no code, for what processes tell each other and keep.

A pickle runs what its writer chose, so a stranger who can write to a store or a socket would own the process
that reads. These bytes name only plain values and Shoal's own data: dataclasses, named tuples, enumerations,
configurations and errors, which are made anew from their fields by their own constructors, with their checks.

    8 bytes                 length of the text, little-endian
    text                    JSON; each {"kind": ...} stands for a value that JSON does not have
    blobs, one by one       the bytes of `bytes` and arrays, to which the text refers by place
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.errors import CollectiveError, CommunicationError, MissingExtraError, ShoalError, UserError

__all__ = ["decode", "encode"]

_PACKAGE = __name__.partition(".")[0]
_CLASS = re.compile(rf"{_PACKAGE}(\.[a-z][a-z0-9_]*)+:\w+")
_LENGTH = 8  # bytes
_NUMBERS = "biufc"
_ARRAY_TYPE = re.compile(rf"[<>|=][{_NUMBERS}]\d{{1,2}}", re.ASCII)
"""Kinds of NumPy's types that are plain numbers; others may hold Python objects."""


def encode(value: Any) -> bytes:
    """Return the bytes of a value.

    Args:
        value: None, numbers, strings, bytes, paths, slices and ranges; lists, tuples, sets and dictionaries;
            NumPy's arrays of numbers, and tensors, which come back on the CPU; dataclasses, named tuples,
            enumerations, configurations and errors of Shoal. Other classes are refused.

    Raises:
        TypeError: The value holds something else; the error names its class.
    """
    blobs: list[bytes | memoryview] = []
    text = json.dumps(_told(value, blobs), separators=(",", ":")).encode()
    return b"".join((len(text).to_bytes(_LENGTH, "little"), text, *blobs))


def decode(data: bytes) -> Any:
    """Return the value of bytes that `encode` made.

    Raises:
        CommunicationError: The bytes are torn or made by something else, or name what may not be named.
    """
    try:
        length = int.from_bytes(data[:_LENGTH], "little")
        text = data[_LENGTH : _LENGTH + length]
        if len(data) < _LENGTH or len(text) != length:
            raise ValueError("they end early")
        return _read(text.decode(), memoryview(data)[_LENGTH + length :])
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        ImportError,
        OverflowError,
        RuntimeError,  # of torch, and RecursionError
    ) as error:
        raise CommunicationError(f"bytes from another process hold no value: {error}") from error
    except UserError as error:  # a constructor refused what it was given
        raise CommunicationError(f"bytes from another process hold a wrong value: {error}") from error


def _told(value: Any, blobs: list[bytes | memoryview]) -> Any:
    """Return what JSON has in place of a value, and add its bytes to the blobs."""

    def told(value: Any) -> Any:
        return _told(value, blobs)

    def pairs(fields: Mapping[Any, Any]) -> list[Any]:
        return [[told(key), told(each)] for key, each in fields.items()]

    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [told(each) for each in value]
    if kind in (tuple, set, frozenset):
        return {"kind": kind.__name__, "values": [told(each) for each in value]}
    if kind is dict:
        return {"kind": "dict", "pairs": pairs(value)}
    if kind in (slice, range):
        return {"kind": kind.__name__, "values": [value.start, value.stop, value.step]}
    if kind is bytes:
        blobs.append(value)
        return {"kind": "bytes", "length": len(value)}
    if isinstance(value, Path):
        return {"kind": "path", "text": str(value)}
    if kind.__module__ == "numpy":
        return _told_array(value, blobs)
    if kind.__module__ == "torch" and kind.__qualname__ == "Tensor":
        return _told_tensor(value, blobs)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not _CLASS.fullmatch(name):
        raise TypeError(f"{name} is told to no other process: it is neither a plain value nor Shoal's own")
    if isinstance(value, Enum):
        return {"kind": "enum", "class": name, "name": value.name}
    if isinstance(value, ShoalError):
        return {"kind": "error", "class": name, "arguments": told(list(_arguments_of(value)))}
    return {"kind": "object", "class": name, "fields": pairs(_fields_of(value))}


def _told_array(value: Any, blobs: list[bytes | memoryview]) -> Any:
    import numpy

    array: Any = numpy.ascontiguousarray(value)
    if array.dtype.kind not in _NUMBERS:
        raise TypeError(f"an array of {array.dtype} is told to no other process: it holds no plain numbers")
    blobs.append(memoryview(array).cast("B") if array.size else b"")
    shape = list(value.shape)
    return {"kind": "array", "length": array.nbytes, "type": array.dtype.str, "shape": shape}


def _told_tensor(value: Any, blobs: list[bytes | memoryview]) -> Any:
    import torch

    data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    blobs.append(memoryview(data))
    type_ = str(value.dtype).removeprefix("torch.")
    return {"kind": "tensor", "length": data.nbytes, "type": type_, "shape": list(value.shape)}


def _arguments_of(error: ShoalError) -> tuple[Any, ...]:
    if isinstance(error, UserError):
        return error.given, error.possible, error.change
    if isinstance(error, CollectiveError):
        return str(error), error.rank, error.fault
    return error.args


def _fields_of(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if hasattr(value, "__pydantic_fields__"):
        return {name: getattr(value, name) for name in type(value).__pydantic_fields__}
    raise TypeError(f"{type(value).__qualname__} is told to no other process: it is not made of fields")


def _read(text: str, blobs: memoryview) -> Any:
    """Return the value that a text and its blobs stand for."""
    place = 0

    def take(length: int) -> memoryview:
        nonlocal place
        if not 0 <= length <= len(blobs) - place:
            raise ValueError("their blobs end early")
        place += length
        return blobs[place - length : place]

    def read(told: Any) -> Any:
        if isinstance(told, list):
            return [read(each) for each in told]
        if not isinstance(told, dict):
            return told
        kind = told["kind"]
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](read(told["values"]))
        if kind == "dict":
            return pairs(told["pairs"])
        if kind == "bytes":
            return bytes(take(told["length"]))
        if kind == "path":
            return Path(told["text"])
        if kind == "array":
            return _read_array(told, take(told["length"]))
        if kind == "tensor":
            return _read_tensor(told, take(told["length"]))
        if kind == "enum":
            return _class_of(told, Enum)[told["name"]]
        if kind == "error":
            return _made_error(_class_of(told, ShoalError), read(told["arguments"]))
        if kind == "object":
            return _class_of(told)(**pairs(told["fields"]))
        raise ValueError(f"{kind!r} is no kind of value")

    def pairs(told: Any) -> dict[Any, Any]:
        return {read(key): read(value) for key, value in told}

    value = read(json.loads(text))
    if place != len(blobs):
        raise ValueError("they have more blobs than they name")
    return value


def _read_array(told: Mapping[str, Any], data: memoryview) -> Any:
    import numpy

    if not _ARRAY_TYPE.fullmatch(told["type"]):  # numpy would read more than that
        raise ValueError(f"an array of {told['type']!r} holds no plain numbers")
    kind = numpy.dtype(told["type"])
    return numpy.frombuffer(bytearray(data), kind).reshape(told["shape"])


def _read_tensor(told: Mapping[str, Any], data: memoryview) -> Any:
    import torch

    kind = getattr(torch, told["type"])
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{kind} is no type of a tensor")
    flat = torch.frombuffer(bytearray(data), dtype=kind) if len(data) else torch.empty(0, dtype=kind)
    return flat.reshape(told["shape"])


def _class_of(told: Mapping[str, Any], base: type | None = None) -> Any:
    """Return a class of Shoal that may be made from bytes: the base's, or else one that is made of fields."""
    name = told["class"]
    if not _CLASS.fullmatch(name):
        raise ValueError(f"{name!r} names no class of {_PACKAGE}")
    module, _, called = name.partition(":")
    found = getattr(import_module(module), called)
    if not isinstance(found, type) or found.__module__ != module:
        raise ValueError(f"{name!r} names no class")
    is_made_of_fields = (
        dataclasses.is_dataclass(found)
        or (issubclass(found, tuple) and hasattr(found, "_fields"))
        or hasattr(found, "__pydantic_fields__")
    )
    if not (is_made_of_fields if base is None else issubclass(found, base)):
        raise ValueError(f"{name!r} names a class that is not made from bytes")
    return found


def _made_error(kind: Any, arguments: list[Any]) -> ShoalError:
    made: ShoalError
    if issubclass(kind, UserError):
        given, possible, change = arguments
        made = (UserError if kind is MissingExtraError else kind)(given, possible=possible, change=change)
    elif issubclass(kind, CollectiveError):
        text, rank, fault = arguments
        made = kind(text, rank=rank, fault=fault)
    else:
        made = kind(*arguments)
    return made


_SEQUENCES: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "slice": lambda values: slice(*values),
    "range": lambda values: range(*values),
}
