"""Checkpoints over S3's interface, as moto's server answers it; `make test-long` installs both."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_stand_ins import on_ranks, share, tensors

from shoal.checkpoint import Store, checkpoints, save, verify
from shoal.errors import CheckpointError

pytestmark = pytest.mark.long

SECONDS = 30.0
"""What the server may take to start on a busy machine."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket of a server of its own."""
    import s3fs

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < until
                time.sleep(0.1)
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("shoal")
        yield "s3://shoal/runs/one"
    finally:
        server.kill()
        server.wait()


def test_what_comes_back_is_what_was_put(bucket: str, tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        on_ranks(
            2, lambda ranks, step=step: save(directory, step, share(tensors(step), ranks.rank, 2), {}, ranks)
        )
        Store(bucket).put(checkpoints(directory)[0], keep=2)
    assert Store(bucket).steps() == ["step-00000003", "step-00000002"]
    found = Store(bucket).get(tmp_path / "back")
    verify(found)
    newest = checkpoints(directory)[0]
    assert {path.name: path.read_bytes() for path in found.iterdir()} == {
        path.name: path.read_bytes() for path in newest.iterdir()
    }


def test_a_bucket_that_is_not_there_is_named(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="s3://nowhere/one holds no complete checkpoint"):
        Store("s3://nowhere/one").get(tmp_path / "back")
