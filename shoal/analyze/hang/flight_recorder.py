"""Reads the dumps of torch's flight recorder, which NCCL's watchdog and gloo write for each rank.

A dump is a pickle, or JSON. A pickle may run any code when it is loaded, so this loads plain containers and
numbers only: a dump that names a class or a function is refused. Format 2 of the dumps has

    pg_config   for each group its name and global ranks, as the text of a list
    entries     for each call its group, number, name, sizes, types and state
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, final

from shoal.analyze.hang.verdict import Call, GroupCalls, RankState
from shoal.errors import RunError

_MOST = 256 << 20  # bytes of a dump
_RANK = re.compile(r"(\d+)(?:\.json|\.pickle|\.pkl)?$")
_WIDTHS = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e5m2", "Float8_e4m3fn"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
_NAMES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Int": "int32",
    "Long": "int64",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Bool": "bool",
}


@final
class _Plain(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """Loads plain containers. Python's own, because the one in C lets a short pickle take any memory."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only plain data is read")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to data outside of it")


def is_dump_folder(folder: Path) -> bool:
    """Return whether a folder has files that are named as dumps are: a prefix and a rank."""
    return any(_rank_of(path) is not None for path in _candidates(folder))


def read_dumps(folder: Path) -> list[RankState]:
    """Return the states of the ranks that left dumps in a folder.

    Raises:
        RunError: There are no dumps, or one cannot be read.
    """
    found = {}
    for path in _candidates(folder):
        rank = _rank_of(path)
        if rank is not None:
            found[rank] = _state(rank, path)
    if not found:
        raise RunError(
            f"{folder} has no dumps of a flight recorder",
            possible="files such as nccl_trace_rank_0, one for each rank",
            change="set TORCH_NCCL_DEBUG_INFO_TEMP_FILE=FOLDER/nccl_trace_rank_ for the run, and give FOLDER",
        )
    return [_with_members(found[rank], found) for rank in sorted(found)]


def _candidates(folder: Path) -> list[Path]:
    skipped = (".txt", ".log")
    names = ("host-", "rank-", ".")
    return [
        path
        for path in sorted(folder.iterdir() if folder.is_dir() else [])
        if path.is_file() and path.suffix not in skipped and not path.name.startswith(names)
    ]


def _rank_of(path: Path) -> int | None:
    match = _RANK.search(path.name)
    return int(match[1]) if match else None


def _state(rank: int, path: Path) -> RankState:
    try:
        if path.stat().st_size > _MOST:
            raise ValueError(f"it has more than {_MOST >> 20} MiB")
        data = path.read_bytes()
        dump = json.loads(data) if data[:1] == b"{" else _Plain(io.BytesIO(data)).load()
        return RankState(rank=rank, groups=_groups(dump))
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        pickle.UnpicklingError,
        EOFError,
    ) as error:
        raise RunError(
            f"{path} cannot be read as a dump of a flight recorder: {error}",
            possible="a pickle or JSON file of torch's flight recorder, format 2",
            change="remove the file, or dump again",
        ) from error
    except (RecursionError, MemoryError, OverflowError) as error:
        raise RunError(
            f"{path} cannot be read: {type(error).__name__}",
            possible="a pickle or JSON file of torch's flight recorder, format 2",
            change="remove the file",
        ) from error


def _with_members(state: RankState, states: Mapping[int, RankState]) -> RankState:
    """Return a state whose groups have ranks: gloo tells none, and then they are those that have calls."""
    groups = {
        key: GroupCalls(
            ranks=group.ranks or sorted(rank for rank, each in states.items() if key in each.groups),
            calls=group.calls,
        )
        for key, group in state.groups.items()
    }
    return RankState(rank=state.rank, groups=groups)


def _groups(dump: Mapping[str, Any]) -> dict[str, GroupCalls]:
    if not str(dump["version"]).startswith("2."):
        raise ValueError(f"its format is {dump['version']}, and 2 is known")
    ranks_by_name = {
        str(config["name"]): [int(rank) for rank in json.loads(config["ranks"])]
        for config in dump["pg_config"].values()
    }
    calls: dict[str, list[Call]] = defaultdict(list)
    for entry in dump["entries"]:
        name = str(entry["process_group"][0])
        if entry["is_p2p"]:
            continue  # they have no other end in the dump
        calls[name].append(_call(entry))
    return {
        name: GroupCalls(ranks=ranks_by_name.get(name, []), calls=_last_of_each(made))
        for name, made in calls.items()
    }


def _call(entry: Mapping[str, Any]) -> Call:
    types = entry.get("input_dtypes") or [""]
    sizes: Sequence[Sequence[int]] = entry.get("input_sizes") or []
    width = _WIDTHS.get(str(types[0]), 0)
    elements = sum(math.prod(int(extent) for extent in size) for size in sizes)
    return Call(
        number=int(entry["collective_seq_id"]),
        name=str(entry["profiling_name"]).rpartition(":")[2].split(" ")[0],
        dtype=_NAMES.get(str(types[0]), str(types[0])),
        bytes=elements * width if sizes and width else -1,
        finished=entry["state"] == "completed" or bool(entry.get("retired")),
    )


def _last_of_each(calls: Sequence[Call]) -> list[Call]:
    """Return one call for each number: a coalesced call has several entries."""
    return list({call.number: call for call in sorted(calls, key=lambda call: call.number)}.values())
