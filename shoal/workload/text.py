"""A Workload as JSON, so that a model can be traced in one place and planned in another.

Every block is written once, in `blocks`; `pieces` gives their order by number. Numbers are read back exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from shoal.errors import ModelError
from shoal.limits import json_of
from shoal.workload.operation import Attention, Keep, Operation, Part, Pass, Product, Saved
from shoal.workload.workload import Block, Parameters, Workload

_FORMAT = 1
_KINDS: dict[str, type[Operation]] = {"product": Product, "attention": Attention, "pass": Pass}
_PIECES = ("embedding", "layers", "end")
_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
}
"""Types that a value may have, by the annotation of its field."""
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_json(workload: Workload) -> str:
    """Return the text of a Workload."""
    blocks = list(dict.fromkeys(workload.pieces))
    numbers = {block: number for number, block in enumerate(blocks)}
    plain = {each.name: getattr(workload, each.name) for each in fields(Workload) if each.name not in _PIECES}
    text = {
        "format": _FORMAT,
        **plain,
        "pieces": [numbers[piece] for piece in workload.pieces],
        "blocks": [_written(block) for block in blocks],
    }
    return json.dumps(text, indent=1)


def from_json(text: str) -> Workload:
    """Return the Workload of a text from `to_json`.

    Raises:
        ModelError: The text is not one.
    """
    try:
        read = json_of(text)
        if read.pop("format") != _FORMAT:
            raise ValueError("another format")
        blocks = [_block(each) for each in read.pop("blocks")]
        embedding, *layers, end = (blocks[number] for number in read.pop("pieces"))
        return Workload(embedding=embedding, layers=tuple(layers), end=end, **_plain(Workload, read))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(
            f"the text is not a Workload: {type(error).__name__}: {error}",
            possible=f"a text that to_json of this version wrote, format {_FORMAT}",
            change="trace the model again",
        ) from None


def _written(value: Any) -> Any:
    """Return a dataclass as a mapping without its defaults; an operation also has its kind."""
    if isinstance(value, Part | Keep):
        return value.name.lower()
    if isinstance(value, tuple):
        return [_written(each) for each in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    kind = {"kind": _NAMES[type(value)]} if type(value) in _NAMES else {}
    given = {each.name: getattr(value, each.name) for each in fields(value)}
    defaults = {each.name: each.default for each in fields(value) if each.default is not MISSING}
    return kind | {
        name: _written(each) for name, each in given.items() if defaults.get(name, MISSING) != each
    }


def _plain(kind: type, read: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values that a dataclass is to be made of, if the plain ones have the types that it names."""
    for each in fields(kind):
        wanted = _PLAIN.get(str(each.type))
        if wanted and each.name in read and not isinstance(read[each.name], wanted):
            raise TypeError(f"{kind.__name__}.{each.name} is {read[each.name]!r}")
    return read


def _block(read: Mapping[str, Any]) -> Block:
    made = ("operations", "parameters", "saved", "eager", "frozen")
    rest = {name: value for name, value in read.items() if name not in made}
    return Block(
        operations=tuple(map(_operation, read["operations"])),
        parameters=Parameters(**_plain(Parameters, read["parameters"])),
        saved=tuple(Saved(**_plain(Saved, _with_enums(each))) for each in read.get("saved", ())),
        eager=_block(read["eager"]) if "eager" in read else None,
        frozen=Parameters(**_plain(Parameters, read.get("frozen", {}))),
        **_plain(Block, rest),
    )


def _operation(read: Mapping[str, Any]) -> Operation:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in _with_enums(read).items()
    }
    kind = _KINDS[values.pop("kind")]
    return kind(**_plain(kind, values))


def _with_enums(read: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(read)
    if "part" in values:
        values["part"] = Part[values["part"].upper()]
    if "keep" in values:
        values["keep"] = Keep[values["keep"].upper()]
    return values
