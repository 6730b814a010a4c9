"""Checkpoints as those of torch.distributed.checkpoint, and back."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_stand_ins import names, same_bits, share, wholes
from rank_stand_ins import on_ranks
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from shoal.checkpoint import SingleProcess, compare, load, read_manifest, save, verify
from shoal.checkpoint.dcp import from_dcp, to_dcp
from shoal.errors import CheckpointError, CorruptCheckpointError, RunError

STATE = {
    "model/a.weight": torch.arange(12.0).reshape(3, 4),
    "model/b": torch.ones(5, dtype=torch.bfloat16),
    "fixed/table": torch.arange(7),
    "optimizer/exp_avg/a.weight": torch.full((3, 4), 0.5),
    "optimizer-tensor/step/a.weight": torch.tensor(3.0),
    "optimizer-number/count/b": torch.tensor(4),
    "rank/1/random.torch": torch.arange(9, dtype=torch.uint8),
}


def saved(folder: Path) -> Path:
    facts = {"position": 7, "plan": "dp=2"}
    return on_ranks(2, lambda ranks: save(folder, 30, share(STATE, ranks.rank, 2), facts, ranks))[0]


def read(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    load(path, wholes(found), SingleProcess())
    return found


def test_there_and_back_a_checkpoint_is_equal(tmp_path: Path) -> None:
    first = saved(tmp_path / "first")
    assert to_dcp(first, tmp_path / "dcp") == len(STATE)
    second, left_out = from_dcp(tmp_path / "dcp", tmp_path / "second")
    verify(second)
    assert left_out == []
    assert second.name == "step-00000030"
    assert read_manifest(second).state == read_manifest(first).state
    assert read_manifest(second).tensors.keys() == STATE.keys()
    assert same_bits(read(second, STATE), STATE)
    assert names(tmp_path) == ["dcp", "first", "second"]


def test_dcp_loads_weights_and_moments_from_it(tmp_path: Path) -> None:
    to_dcp(saved(tmp_path / "first"), tmp_path / "dcp")
    state = {
        "model": {"a.weight": torch.zeros(3, 4), "table": torch.zeros(7, dtype=torch.int64)},
        "optimizer": {"state": {"a.weight": {"exp_avg": torch.zeros(3, 4), "step": torch.tensor(0.0)}}},
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state["model"]["a.weight"], STATE["model/a.weight"])
    assert torch.equal(state["model"]["table"], STATE["fixed/table"])
    assert state["optimizer"]["state"]["a.weight"]["step"] == 3
    assert (state["optimizer"]["state"]["a.weight"]["exp_avg"] == 0.5).all()


def test_what_another_program_saved_by_dcp_gives_weights_and_their_moments(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    moments = {name: optimizer.state[each] for name, each in model.named_parameters()}
    groups = [{"lr": torch.tensor(0.1), "params": list(moments)}]
    program = {
        "model": model.state_dict(),
        "optim": {"state": moments, "param_groups": groups},
        "train_state": {"step": 4},
    }
    dcp.save(program, checkpoint_id=tmp_path / "dcp", no_dist=True)
    path, left_out = from_dcp(tmp_path / "dcp", tmp_path / "saved")
    expected = {f"model/{name}": each for name, each in model.state_dict().items()}
    for name, state in moments.items():
        expected |= {f"optimizer/{key}/{name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        expected[f"optimizer-tensor/step/{name}"] = state["step"]
    assert read_manifest(path).tensors.keys() == expected.keys()
    assert same_bits(read(path, expected), expected)
    assert "train_state.step" in left_out
    assert all(key.startswith(("train_state", "optim.param_groups")) for key in left_out)


GROWTH = """
import sys
from pathlib import Path
from shoal.checkpoint.dcp import from_dcp, to_dcp

def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024

first, dcp, second = map(Path, sys.argv[1:])
for work in (lambda: to_dcp(first, dcp), lambda: from_dcp(dcp, second)):
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    work()
    print(resident("VmHWM") - before)
"""


def test_either_way_takes_the_memory_of_few_tensors(tmp_path: Path) -> None:
    """The state has 160 MiB in tensors of 4 MiB; four of them and the chunks of files are 36."""
    state = {f"model/{number}": torch.full((1 << 20,), float(number)) for number in range(40)}
    path = save(tmp_path / "first", 1, wholes(state), {}, SingleProcess())
    command = [sys.executable, "-c", GROWTH, path, tmp_path / "dcp", tmp_path / "second"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown = [float(line) for line in told.split()]
    assert len(grown) == 2
    assert max(grown) < 80, grown  # the allocator keeps some that were freed
    assert not list(compare(path, tmp_path / "second" / path.name))


class Attack:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("attacked",)


def test_metadata_that_would_run_code_is_refused_and_does_not_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dcp").mkdir()
    Path("dcp/.metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError, match=r"asks for \w+\.mkdir, .* --trust"):
        from_dcp(Path("dcp"), Path("saved"))
    assert names(tmp_path) == ["dcp"]


@pytest.mark.parametrize("damage", ["metadata", "tensors", "missing"])
def test_what_cannot_be_read_is_named(damage: str, tmp_path: Path) -> None:
    to_dcp(saved(tmp_path / "first"), tmp_path / "dcp")
    data = max((tmp_path / "dcp").glob("*.distcp"))
    match damage:
        case "metadata":
            (tmp_path / "dcp" / ".metadata").write_bytes(b"\x80\x04nonsense")
        case "tensors":
            data.write_bytes(data.read_bytes()[:50])
        case _:
            data.unlink()
    with pytest.raises(CorruptCheckpointError, match="cannot be read") as told:
        from_dcp(tmp_path / "dcp", tmp_path / "saved")
    assert "Traceback" not in str(told.value)
    assert names(tmp_path) == ["dcp", "first"]


def whole_and_torn(shape: tuple[int, ...]) -> Callable[[Metadata], object]:
    return lambda metadata: setattr(metadata.state_dict_metadata["model.b"], "size", torch.Size(shape))


def without(name: str, value: object) -> Callable[[Metadata], object]:
    return lambda metadata: setattr(metadata, name, value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (whole_and_torn((9,)), "'model.b'.* in no piece"),  # a rank's part was lost
        (whole_and_torn((4,)), "not in tensor 'model.b'"),
        (whole_and_torn((1 << 62, 4)), "has the shape"),
        (lambda metadata: metadata.state_dict_metadata["model.b"].chunks.clear(), "in no piece"),
        (lambda metadata: metadata.state_dict_metadata["model.b"].chunks.append(None), "NoneType"),
        (lambda metadata: metadata.state_dict_metadata.update({5: None}), "5 is no name"),
        (without("storage_data", [1]), "storage_data is list"),
        (without("state_dict_metadata", None), "NoneType"),
    ],
)
def test_metadata_that_does_not_say_where_each_element_is_is_refused(
    change: Callable[[Metadata], object], told: str, tmp_path: Path
) -> None:
    """DCP would leave what no chunk has as it is in memory, and such a checkpoint would look sound."""
    to_dcp(saved(tmp_path / "first"), tmp_path / "dcp")
    file = tmp_path / "dcp" / ".metadata"
    change(metadata := pickle.loads(file.read_bytes()))
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=rf"\.metadata is not what DCP writes: .*{told}"):
        from_dcp(tmp_path / "dcp", tmp_path / "saved")
    assert names(tmp_path) == ["dcp", "first"]


@pytest.mark.parametrize(
    "facts",
    ["{", '{"step": 1}', '{"step": NaN, "state": {}, "paths": {}}', '{"step": 1, "state": {}, "paths": []}'],
)
def test_facts_that_another_program_changed_are_named(facts: str, tmp_path: Path) -> None:
    state = {"shoal.json": torch.frombuffer(bytearray(facts.encode()), dtype=torch.uint8)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CorruptCheckpointError, match=r"shoal\.json in .* cannot be read"):
        from_dcp(tmp_path / "dcp", tmp_path / "saved")


def test_two_keys_of_one_tensor_are_refused(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "model.a": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match=r"'a' and 'model\.a', which are one tensor"):
        from_dcp(tmp_path / "dcp", tmp_path / "saved")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it has no \.metadata"):
        from_dcp(tmp_path, tmp_path / "saved")
    path = saved(tmp_path / "first")
    with pytest.raises(RunError, match="holds something already"):
        to_dcp(path, tmp_path)
