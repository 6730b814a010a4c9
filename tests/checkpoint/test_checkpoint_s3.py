"""Checkpoints over S3's interface, as moto's server answers it; `make test-long` installs both."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_stand_ins import share, tensors
from rank_stand_ins import on_ranks

from shoal.checkpoint import Store, checkpoints, save, verify
from shoal.errors import CheckpointError

pytestmark = pytest.mark.long


@pytest.fixture
def store(bucket: str) -> str:
    return f"{bucket}/runs/one"


def test_what_comes_back_is_what_was_put(store: str, tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        on_ranks(
            2, lambda ranks, step=step: save(directory, step, share(tensors(step), ranks.rank, 2), {}, ranks)
        )
        Store(store).put(checkpoints(directory)[0], keep=2)
    assert Store(store).steps() == ["step-00000003", "step-00000002"]
    found = Store(store).get(tmp_path / "back")
    verify(found)
    newest = checkpoints(directory)[0]
    assert {path.name: path.read_bytes() for path in found.iterdir()} == {
        path.name: path.read_bytes() for path in newest.iterdir()
    }


def test_a_bucket_that_is_not_there_is_named(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="s3://nowhere/one holds no complete checkpoint"):
        Store("s3://nowhere/one").get(tmp_path / "back")
