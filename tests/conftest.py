"""Fixtures for the whole suite: ranks are processes that all tests share."""

import gc
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings
from program_stand_ins import Programs
from s3_stand_ins import served_bucket

from shoal.testing import RankPool
from shoal.testing.words import write_words

settings.register_profile("shoal", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("shoal")
# For `make test-faults`: the same examples each time, and no time for finding smaller ones that fail.
settings.register_profile(
    "faults", deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate)
)
# Shells and nohup let what they start in the background ignore these signals, and so do its own programs.
for number, action in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, action)


def pytest_collection_finish():
    gc.freeze()  # collections need not look at what was imported, nor write to it in forked processes


@pytest.fixture
def public_path():
    """A folder that any user may enter and write to, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.fixture(scope="session")
def ranks():
    with RankPool("shoal") as pool:
        yield pool


@pytest.fixture(scope="session")
def programs():
    """Programs of their own, such as the command line, without the seconds of their imports."""
    programs = Programs()
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Arguments of `shoal train` for a run whose steps take milliseconds, on text of its own."""
    folder = tmp_path_factory.mktemp("tiny")
    write_words(folder / "text")
    settings = (
        f"data.source={folder / 'text'}",
        f"data.cache={folder / 'cache'}",
        "model_options={layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, seq=32}",
        "sequence=32",
        "batch=4",
        "optimizer.warmup=2",
        "validation.samples=8",
    )
    return [argument for setting in settings for argument in ("--set", setting)]


@pytest.fixture
def bucket():
    """The URL of an empty bucket, for long tests."""
    with served_bucket() as url:
        yield url


@pytest.fixture
def one_thread():
    """Threads only get into each other's way in models as small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
