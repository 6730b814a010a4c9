"""A process may die at any place of the protocols: what is on disk stays loadable, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
from checkpoint_stand_ins import (
    KILLED,
    RAISED,
    LosingPower,
    PipeExchange,
    StoppingFiles,
    die,
    fork,
    loaded,
    names,
    reap,
    same_bits,
    share,
    tensors,
    wholes,
)
from rank_stand_ins import on_ranks

from shoal.checkpoint import FileSystem, Saver, SingleProcess, checkpoints, latest, retain, save, verify

OLD, NEW = tensors(1), tensors(2)
Protocol = Callable[[Path, FileSystem], object]


def save_next_step(directory: Path, files: FileSystem) -> None:
    save(directory, 200, wholes(NEW), {"position": 2}, SingleProcess(), files)


def save_same_step(directory: Path, files: FileSystem) -> None:
    save(directory, 100, wholes(NEW), {"position": 2}, SingleProcess(), files)


def save_after_a_crash(directory: Path, files: FileSystem) -> None:
    (directory / "step-00000200.tmp").mkdir()
    (directory / "step-00000200.tmp" / "rank-00007.safetensors").write_bytes(b"half")
    save_next_step(directory, files)


def save_with_links(directory: Path, files: FileSystem) -> None:
    pieces = [replace(piece, is_constant=piece.name == "model/norm.weight") for piece in wholes(NEW)]
    saver = Saver(files)
    for step in (150, 200):
        path = saver.save(directory, step, pieces, {"position": 2}, SingleProcess())
    assert (path / "rank-00000-constant.safetensors").stat().st_nlink == 2


def retain_the_newest(directory: Path, files: FileSystem) -> None:
    retain(directory, 1, SingleProcess(), files=files)


@pytest.fixture(scope="module")
def one_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    save(directory, 100, wholes(OLD), {"position": 1}, SingleProcess())
    return directory


@pytest.fixture(scope="module")
def three_saved(one_saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("three") / "checkpoints"
    shutil.copytree(one_saved, directory)
    for step in (150, 200):
        save(directory, step, wholes(NEW), {"position": 2}, SingleProcess())
    return directory


def count_places(protocol: Protocol, template: Path, scratch: Path, grain: int) -> int:
    files = StoppingFiles(grain=grain)
    protocol(shutil.copytree(template, scratch / "counted"), files)
    return files.places


def assert_old_or_new_is_loadable(directory: Path) -> None:
    said: list[str] = []
    found = latest(directory, SingleProcess(), said.append)
    assert found is not None
    assert said == [], "what has a complete one's name is complete"
    assert same_bits(loaded(found), OLD) or same_bits(loaded(found), NEW)


def assert_the_next_save_works_and_cleans_up(directory: Path) -> None:
    path = save(directory, 300, wholes(OLD), {}, SingleProcess(), StoppingFiles())
    assert latest(directory, SingleProcess(), pytest.fail) == path
    assert names(directory) == sorted(path.name for path in checkpoints(directory))


def kill_everywhere(
    protocol: Protocol, template: Path, scratch: Path, stopping: Callable[[int], StoppingFiles]
) -> int:
    """Dies at each place in turn, and checks what is left; returns the number of places."""
    places = count_places(protocol, template, scratch, stopping(0).grain)
    for place in range(places):
        directory = shutil.copytree(template, scratch / str(place))
        assert reap(fork(lambda d=directory, k=place: protocol(d, stopping(k)))) == KILLED
        assert_old_or_new_is_loadable(directory)
        assert_the_next_save_works_and_cleans_up(directory)
        shutil.rmtree(directory)
    return places


def killing(place: int) -> StoppingFiles:
    return StoppingFiles(place, die)


def killing_between_operations(place: int) -> StoppingFiles:
    return StoppingFiles(place, die, grain=1 << 20)


def test_a_save_that_dies_leaves_the_old_or_the_new_checkpoint(one_saved: Path, tmp_path: Path) -> None:
    assert kill_everywhere(save_next_step, one_saved, tmp_path, killing) >= 50


def test_saving_a_step_again_never_destroys_it(one_saved: Path, tmp_path: Path) -> None:
    assert kill_everywhere(save_same_step, one_saved, tmp_path, killing) >= 50


def test_a_save_that_dies_while_it_replaces_a_stale_one_is_no_worse(one_saved: Path, tmp_path: Path) -> None:
    kill_everywhere(save_after_a_crash, one_saved, tmp_path, killing_between_operations)


def test_a_retention_that_dies_leaves_a_loadable_checkpoint(three_saved: Path, tmp_path: Path) -> None:
    # Two checkpoints of two files each: two renames, a sync, and three removals for each.
    assert kill_everywhere(retain_the_newest, three_saved, tmp_path, killing) == 2 + 1 + 2 * 3


@pytest.mark.parametrize("renames_last", [True, False], ids=["late-renames-kept", "late-renames-lost"])
@pytest.mark.parametrize(
    "protocol", [save_next_step, save_same_step, save_with_links], ids=["next-step", "same-step", "links"]
)
def test_a_save_survives_the_loss_of_all_that_was_not_synced(
    protocol: Protocol, renames_last: bool, one_saved: Path, tmp_path: Path
) -> None:
    kill_everywhere(protocol, one_saved, tmp_path, lambda place: LosingPower(place, renames_last))


@pytest.mark.parametrize("renames_last", [True, False], ids=["late-renames-kept", "late-renames-lost"])
def test_a_retention_survives_the_loss_of_all_that_was_not_synced(
    renames_last: bool, three_saved: Path, tmp_path: Path
) -> None:
    kill_everywhere(retain_the_newest, three_saved, tmp_path, lambda place: LosingPower(place, renames_last))


def test_the_first_save_ever_leaves_nothing_or_itself(tmp_path: Path) -> None:
    counted = killing_between_operations(-1)
    save_next_step(tmp_path / "counted", counted)
    outcomes = set()
    for place in range(counted.places):
        directory = tmp_path / str(place) / "checkpoints"
        files = killing_between_operations(place)
        assert reap(fork(lambda d=directory, f=files: save_next_step(d, f))) == KILLED
        found = latest(directory, SingleProcess(), pytest.fail)
        assert found is None or same_bits(loaded(found), NEW)
        outcomes.add(found is None)
        assert_the_next_save_works_and_cleans_up(directory)
    assert outcomes == {True, False}


@pytest.mark.parametrize("dying", [0, 1])
def test_when_either_of_two_ranks_dies_the_other_raises_and_a_checkpoint_stays(
    dying: int, one_saved: Path, tmp_path: Path
) -> None:
    counted = [StoppingFiles(), StoppingFiles()]
    directory = shutil.copytree(one_saved, tmp_path / "counted")
    on_ranks(2, lambda ranks: save(directory, 200, share(NEW, ranks.rank, 2), {}, ranks, counted[ranks.rank]))
    for place in range(counted[dying].places):
        directory = shutil.copytree(one_saved, tmp_path / str(place))
        ends = Pipe()

        def run(rank: int, directory: Path = directory, place: int = place, ends: tuple = ends) -> None:
            ends[1 - rank].close()
            files = killing(place) if rank == dying else StoppingFiles()
            save(directory, 200, share(NEW, rank, 2), {}, PipeExchange(rank, ends[rank]), files)

        children = [fork(lambda r=rank, run=run: run(r)) for rank in range(2)]
        for end in ends:
            end.close()
        codes = [reap(child) for child in children]
        assert codes[dying] == KILLED
        assert codes[1 - dying] == RAISED
        assert_old_or_new_is_loadable(directory)
        assert_the_next_save_works_and_cleans_up(directory)
        shutil.rmtree(directory)


@pytest.mark.filterwarnings("ignore:process .* has not given up")
def test_a_writer_that_wakes_after_another_took_over_commits_nothing(
    one_saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.spec.run.writer._LEASE", 0.0)

    def save_elsewhere(directory: Path, place: int) -> None:
        monkeypatch.setattr("shoal.spec.run.writer.boot_id", lambda: "another one")
        pause = lambda: os.kill(os.getpid(), signal.SIGSTOP)  # noqa: E731
        save_next_step(directory, StoppingFiles(place, pause, grain=1 << 20))

    outcomes = set()
    for place in range(count_places(save_next_step, one_saved, tmp_path, 1 << 20)):
        directory = shutil.copytree(one_saved, tmp_path / str(place))
        child = fork(lambda d=directory, k=place: save_elsewhere(d, k))
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        was_complete = (directory / "step-00000200").exists()
        mine = save(directory, 300, wholes(OLD), {}, SingleProcess())
        os.kill(child, signal.SIGCONT)
        assert reap(child) == (0 if was_complete else RAISED)
        outcomes.add(was_complete)
        assert (directory / "step-00000200").exists() == was_complete
        assert latest(directory, SingleProcess(), pytest.fail) == mine
        for path in checkpoints(directory):
            verify(path)
        assert names(directory) == sorted(path.name for path in checkpoints(directory))
    assert outcomes == {True, False}
