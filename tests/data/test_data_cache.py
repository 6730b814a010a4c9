from __future__ import annotations

import errno
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shoal.data import Corpus, DataConfig, prepare
from shoal.data import corpus as corpus_module

Configure = Callable[..., DataConfig]


@pytest.fixture
def config(tmp_path: Path, configure: Configure) -> DataConfig:
    (tmp_path / "data").mkdir()
    for index in range(50):
        (tmp_path / "data" / f"{index}.txt").write_text(f"document {index} " * (index + 1))
    return configure(tmp_path / "data")


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many times tokens were made, in this process and those forked from it."""
    log = tmp_path / "builds"
    log.touch()
    write_stream = corpus_module.write_stream

    def logged(*args: object) -> object:
        with open(log, "a") as file:
            file.write("x")
        time.sleep(0.1)  # so that processes that start together overlap
        return write_stream(*args)

    monkeypatch.setattr(corpus_module, "write_stream", logged)
    return lambda: len(log.read_text())


def entry(config: DataConfig) -> Path:
    assert config.cache is not None
    [path] = config.cache.glob("*.tokens")
    return path


def assert_same(one: Corpus, other: Corpus) -> None:
    assert np.array_equal(one.tokens, other.tokens)
    assert one.tokens.dtype == other.tokens.dtype
    assert (one.documents_end, one.fingerprint) == (other.documents_end, other.fingerprint)


def test_tokens_are_made_once_and_then_memory_mapped(config: DataConfig, builds: Callable[[], int]) -> None:
    first, second = prepare(config), prepare(config)
    assert builds() == 1
    assert isinstance(second.tokens, np.memmap)
    assert_same(first, second)


@pytest.mark.parametrize("change", ["content", "time", "new file", "tokenizer", "fraction"])
def test_tokens_are_made_again_when_something_changed(
    config: DataConfig, builds: Callable[[], int], change: str, word_tokenizer: Path, tmp_path: Path
) -> None:
    prepare(config)
    file = tmp_path / "data" / "7.txt"
    if change == "content":
        file.write_text("longer than it was before " * 20)
    elif change == "time":
        os.utime(file, (1, 1))
    elif change == "new file":
        (tmp_path / "data" / "new.txt").write_text("new")
    elif change == "tokenizer":
        config = config.model_copy(update={"tokenizer": str(word_tokenizer)})
    else:
        config = config.model_copy(update={"validation_fraction": 0.3})
    prepare(config)
    assert builds() == 2


@pytest.mark.parametrize("length", [0, 10, (1 << 16) - 1, 1 << 16, 70_000, -1])
def test_a_torn_entry_is_made_again(config: DataConfig, builds: Callable[[], int], length: int) -> None:
    expected = prepare(config).tokens.copy()
    whole = entry(config).read_bytes()
    entry(config).write_bytes(whole[:length])
    assert np.array_equal(prepare(config).tokens, expected)
    assert builds() == 2
    assert entry(config).read_bytes() == whole


@pytest.mark.parametrize(
    "header",
    [b"\xff\xfe not text", b"[1, 2]", b'"text"', b"{}", b'{"key": "other"}', b'{"key": KEY, "tokens": "x"}'],
)
def test_a_foreign_entry_is_made_again(config: DataConfig, builds: Callable[[], int], header: bytes) -> None:
    expected = prepare(config).tokens.copy()
    path = entry(config)
    header = header.replace(b"KEY", b'"' + path.stem.encode() + b'"')
    path.write_bytes(header.ljust(1 << 16) + path.read_bytes()[1 << 16 :])
    assert np.array_equal(prepare(config).tokens, expected)
    assert builds() == 2


def test_what_a_killed_writer_left_is_removed(config: DataConfig) -> None:
    expected = prepare(config).tokens.copy()
    left, of_another = (entry(config).with_suffix(f".{name}.tmp") for name in ("left", "another"))
    entry(config).unlink()
    for each in (left, of_another):  # another host may write too, if locks do not reach it
        each.write_bytes(b"z" * 100_000)
    os.utime(left, (0, 0))
    assert np.array_equal(prepare(config).tokens, expected)
    assert of_another.exists()
    assert not left.exists()


def test_where_the_cache_cannot_be_a_folder_tokens_stay_in_memory(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file")
    blocked = config.model_copy(update={"cache": tmp_path / "occupied" / "below"})
    with pytest.warns(UserWarning, match="kept in memory"):
        in_memory = prepare(blocked)
    assert_same(in_memory, prepare(config))
    assert len(in_memory.samples("train", 16)) > 0


def test_where_the_disk_is_full_tokens_stay_in_memory_and_nothing_is_left(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.warns(UserWarning, match="No space left"):
            in_memory = prepare(config)
    assert config.cache is not None
    assert {path.suffix for path in config.cache.iterdir()} == {".lock"}
    assert_same(in_memory, prepare(config))


def test_an_entry_in_a_cache_that_cannot_be_written_is_used(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config)

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(prepare(config).tokens, np.memmap)


def _prepare_at_once(config: DataConfig, barrier: object, results: object) -> None:
    barrier.wait()
    corpus = prepare(config)
    results.put((corpus.fingerprint, int(corpus.tokens.sum()), type(corpus.tokens).__name__))


def test_processes_that_start_together_make_the_tokens_once(
    config: DataConfig, builds: Callable[[], int]
) -> None:
    context = multiprocessing.get_context("fork")  # the counter above is inherited
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_prepare_at_once, args=(config, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    corpus = prepare(config)
    assert set(found) == {(corpus.fingerprint, int(corpus.tokens.sum()), "memmap")}
    assert builds() == 1


@pytest.mark.parametrize(
    ("variables", "below"),
    [
        ({"SHOAL_CACHE": "chosen", "XDG_CACHE_HOME": "xdg"}, "chosen"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/shoal"),
        ({}, "home/.cache/shoal"),
    ],
)
def test_the_environment_names_the_default_cache(
    config: DataConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    below: str,
) -> None:
    for name in ("SHOAL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in {**variables, "HOME": "home"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    prepare(config.model_copy(update={"cache": None}))
    assert list((tmp_path / below).glob("*.tokens"))
