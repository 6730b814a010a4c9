"""A server of S3's interface, from the package moto; `make test-long` installs it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from port_stand_ins import free_port

SECONDS = 30.0
"""What the server may take to start on a busy machine."""


@contextlib.contextmanager
def served_bucket() -> Iterator[str]:
    """Yield the URL of an empty bucket of a server of its own, which the environment names."""
    import s3fs

    port = free_port()
    command = [sys.executable, "-m", "moto.server", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    given = ("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")
    where = ("AWS_ENDPOINT_URL", address), ("AWS_DEFAULT_REGION", "us-east-1")
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (*given, *where):
                patch.setenv(name, value)
            s3fs.S3FileSystem.clear_instance_cache()
            until = time.monotonic() + SECONDS
            while True:
                try:
                    s3fs.S3FileSystem().mkdir("shoal")
                    break
                except OSError:
                    assert server.poll() is None
                    assert time.monotonic() < until
                    time.sleep(0.1)
            yield "s3://shoal"
    finally:
        server.kill()
        server.wait()
