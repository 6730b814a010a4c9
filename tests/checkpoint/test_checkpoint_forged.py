"""Files of a checkpoint that are whole and still wrong are refused by name, and an older one is tried."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_stand_ins import rewrite_manifest, tensors, wholes
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint import SingleProcess, latest, load, read_manifest, save, verify
from shoal.checkpoint.dcp import from_dcp, to_dcp
from shoal.checkpoint.directory import newest_sound
from shoal.checkpoint.load import load_verified
from shoal.checkpoint.manifest import FileRecord
from shoal.checkpoint.shard import ShardReader
from shoal.errors import CorruptCheckpointError

SHARD = "rank-00000.safetensors"
ENTRY = '"model/norm.weight":{"dtype":"BF16","shape":[6],"data_offsets":'

HEADERS = {
    "an infinity": ENTRY + "[0,Infinity]}",
    "a number that is none": ENTRY + "[NaN,12]}",
    "more than 64 bits": ENTRY + f"[{2**80},{2**80 + 12}]}}",
    "beyond floats": ENTRY + "[0,1e999]}",
    "beyond the file": ENTRY + f"[{2**40},{2**40 + 12}]}}",
    "before the tensors": ENTRY + "[-12,0]}",
    "from back to front": ENTRY + "[12,0]}",
    "fractions": ENTRY + "[0.0,12.0]}",
    "booleans": ENTRY + "[false,true]}",
    "texts": ENTRY + '["0","12"]}',
    "lists": ENTRY + "[[0],[12]]}",
    "one number": ENTRY + "[0]}",
    "no table": ENTRY + "null}",
    "a name twice": ENTRY + "[0,12]}," + ENTRY + "[12,24]}",
    "a member twice": ENTRY + '[0,12],"data_offsets":[12,24]}',
    "a depth without an end": '"a":' + "[" * 100_000,
    "a number of many digits": ENTRY + "[0," + "9" * 10_000 + "]}",
}


def forge(path: Path, header: str) -> None:
    """Give a shard another header, and the manifest the hash of this file."""
    text = f"{{{header}}}".encode()
    content = struct.pack("<Q", len(text)) + text + bytes(400)
    (path / SHARD).write_bytes(content)
    record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    rewrite_manifest(path, lambda manifest: replace(manifest, files={SHARD: record}))


def saved(directory: Path) -> list[Path]:
    """Checkpoints of two steps, the newest first."""
    return [save(directory, step, wholes(tensors(step)), {}, SingleProcess()) for step in (100, 200)][::-1]


@pytest.mark.parametrize("header", HEADERS)
def test_with_a_forged_header_an_older_checkpoint_is_loaded(header: str, tmp_path: Path) -> None:
    newest, before = saved(tmp_path)
    forge(newest, HEADERS[header])
    wanted, said = {name: torch.zeros_like(each) for name, each in tensors(0).items()}, list[str]()

    def attempt(path: Path) -> None:
        load_verified(path, read_manifest(path), SingleProcess(), fresh=wholes(wanted))

    found = newest_sound([newest, before], SingleProcess(), said.append, attempt)
    assert found is not None
    assert found[0] == before
    assert f"{newest / SHARD} cannot be read" in said[0]
    assert all(torch.equal(each, tensors(100)[name]) for name, each in wanted.items())


@given(
    start=st.integers(-(2**70), 2**70), stop=st.integers(-(2**70), 2**70), first=st.integers(-(2**70), 2**70)
)
def test_no_place_outside_of_the_tensors_is_read(start: int, stop: int, first: int) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [start, stop]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(range(64))
    path = Path(os.environ.get("TMPDIR", "/tmp"), f"forged-{os.getpid()}.safetensors")
    path.write_bytes(content)
    target = torch.zeros(8, dtype=torch.uint8)
    try:
        with ShardReader(path) as reader:
            reader.read("w", first, target)
    except ValueError:
        assert not (0 <= start <= stop <= 64 and first >= 0 and start + first + 8 <= stop)
    else:
        assert target.tolist() == list(range(start + first, start + first + 8))
    finally:
        path.unlink()


def with_number(text: str) -> Callable[[str], str]:
    return lambda manifest: re.sub(r'"step":\d+', f'"step":{text}', manifest)


MANIFESTS: dict[str, Callable[[str], str]] = {
    "an infinity": with_number("Infinity"),
    "a number that is none": with_number("NaN"),
    "more than 64 bits": with_number(str(2**80)),
    "below nothing": with_number("-1"),
    "a fraction": with_number("1.5"),
    "a boolean": with_number("true"),
    "many digits": with_number("9" * 10_000),
    "a name twice": with_number('3,"step":3'),
    "a depth without an end": with_number("[" * 100_000),
    "too large a tensor": lambda manifest: re.sub(r'"shape":\[6\]', f'"shape":[0,{2**40},{2**40}]', manifest),
}


def signed(text: str) -> str:
    """A manifest's text with the hash of what Python reads in it, if it reads it."""
    try:
        body: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        return text
    old = body.pop("sha256")
    compact = json.dumps(body, separators=(",", ":"), sort_keys=True).encode()
    return text.replace(old, hashlib.sha256(compact).hexdigest())


@pytest.mark.parametrize("change", MANIFESTS)
def test_with_a_forged_manifest_an_older_checkpoint_is_taken(change: str, tmp_path: Path) -> None:
    newest, before = saved(tmp_path)
    file = newest / "manifest.json"
    forged = signed(MANIFESTS[change](file.read_text()))
    assert forged != file.read_text()
    file.write_text(forged)
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
        read_manifest(newest)
    assert latest(tmp_path, SingleProcess(), print) == before


def bind_socket(path: Path) -> None:
    """Make a socket, by its short name: that of a test's folder may be too long."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


ODD: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "a socket": bind_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("file", [SHARD, "manifest.json"])
def test_what_is_no_regular_file_is_refused_by_name(kind: str, file: str, tmp_path: Path) -> None:
    newest, before = saved(tmp_path)
    (newest / file).unlink()
    ODD[kind](newest / file)
    record = FileRecord((newest / file).stat().st_size, "")
    if file == SHARD:  # a forged manifest has its size
        rewrite_manifest(newest, lambda manifest: replace(manifest, files={SHARD: record}))
    wanted = wholes({name: torch.zeros_like(each) for name, each in tensors(0).items()})

    def load_and_verify(path: Path) -> None:
        load_verified(path, read_manifest(path), SingleProcess(), fresh=wanted)

    for read in (verify, lambda path: load(path, wanted, SingleProcess()), load_and_verify):
        with pytest.raises(CorruptCheckpointError, match=f"{newest / file} cannot be read"):
            read(newest)
    assert latest(tmp_path, SingleProcess(), print) == before


def test_files_of_a_checkpoint_may_be_links(tmp_path: Path) -> None:
    newest, _ = saved(tmp_path)
    (newest / SHARD).rename(tmp_path / "elsewhere")
    (newest / SHARD).symlink_to(tmp_path / "elsewhere")
    verify(newest)


@pytest.mark.parametrize("place", ["../secret", "{folder}/secret", ".metadata/../../secret"])
def test_metadata_of_dcp_names_files_of_its_folder_alone(place: str, tmp_path: Path) -> None:
    newest, _ = saved(tmp_path / "saved")
    to_dcp(newest, tmp_path / "dcp")
    with (tmp_path / "dcp" / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    key = next(iter(metadata.storage_data))
    (tmp_path / "dcp" / metadata.storage_data[key].relative_path).rename(tmp_path / "secret")
    metadata.storage_data[key] = replace(
        metadata.storage_data[key], relative_path=place.format(folder=tmp_path)
    )
    with (tmp_path / "dcp" / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    with pytest.raises(CorruptCheckpointError, match="secret"):
        from_dcp(tmp_path / "dcp", tmp_path / "again")
