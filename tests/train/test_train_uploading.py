"""Copies of checkpoints to an object store, behind the training."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

from shoal.checkpoint import Piece, SingleProcess, Store, checkpoints, retain, save
from shoal.train.config import CheckpointConfig
from shoal.train.save_policy import Uploads


def saved(directory: Path, step: int) -> Path:
    return save(directory, step, [Piece.whole("model/weight", torch.ones(4))], {}, SingleProcess())


def test_a_checkpoint_stays_until_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, said, put = f"memory://{uuid.uuid4().hex}/run", list[str](), Store.put

    def slow(store: Store, checkpoint: Path, keep: int | None) -> None:
        for step in (2, 3):  # training goes on
            retain(tmp_path, 1, SingleProcess(), sound=saved(tmp_path, step))
        put(store, checkpoint, keep)

    monkeypatch.setattr(Store, "put", slow)
    uploads = Uploads(CheckpointConfig(store=url, keep=1), said.append)
    uploads.add(saved(tmp_path, 1))
    uploads.close()
    assert said == []
    assert Store(url).steps() == ["step-00000001"]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003", "step-00000001"]
    retain(tmp_path, 1, SingleProcess())
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]
