"""One process writes a directory: claims, their ends, and what another process or machine makes of them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from shoal.errors import RunError
from shoal.spec.run.writer import (
    Claim,
    Claiming,
    claimed,
    claims_in,
    is_alive,
    is_written,
    name_group,
    newest_claim,
    require_free,
)

HOLD = """
import sys
from pathlib import Path
from shoal.spec.run.writer import Claiming
writer = Claiming(Path(sys.argv[1])).wait()
print(writer.number, flush=True)
sys.stdin.read()
"""


def held_by_another(path: Path) -> subprocess.Popen[str]:
    """Start a process that has claimed a directory, until its input ends."""
    words = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdecimal()
    return process


def change_claim(path: Path, **values: object) -> None:
    """Change what the newest claim says, as if another machine had made it."""
    file = path / f".writer-{max(claims_in(path)):08d}"
    told = json.loads(file.read_text())
    with file.open("r+b") as opened:
        opened.write(json.dumps(told | values).encode().ljust(1023) + b"\n")


def test_a_second_process_is_refused_until_the_first_one_ends(tmp_path: Path) -> None:
    assert is_written(tmp_path) is None
    with held_by_another(tmp_path) as other:
        assert is_written(tmp_path) is True
        for refused in (Claiming(tmp_path).wait, lambda: require_free(tmp_path, str(tmp_path))):
            with pytest.raises(RunError, match=rf"process {other.pid} on .* writes {tmp_path}"):
                refused()
        other.send_signal(signal.SIGKILL)
    assert is_written(tmp_path) is False
    with held_by_another(tmp_path) as other:
        other.communicate()  # it gives the directory up at its end
    assert is_written(tmp_path) is False
    writer = Claiming(tmp_path).wait()
    assert (writer.number, claims_in(tmp_path)) == (3, [3])
    writer.close()
    assert is_written(tmp_path) is False


def test_a_stopped_process_still_has_its_directory_on_its_own_machine(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as other:
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(RunError, match=f"process {other.pid}"):
            Claiming(tmp_path).wait()
        other.kill()


def test_a_copy_of_a_directory_is_free(tmp_path: Path) -> None:
    with held_by_another(tmp_path / "one") as other:
        shutil.copytree(tmp_path / "one", tmp_path / "two")
        assert Claiming(tmp_path / "two").wait().number == 2
        other.kill()


def test_a_process_has_one_claim_by_whatever_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    writer = Claiming(tmp_path / "real").wait()
    with claimed(tmp_path / "link") as same:
        assert same is writer
    assert is_written(tmp_path / "real")
    shutil.rmtree(tmp_path / "real")  # by a person
    writer.require()
    assert Claiming(tmp_path / "real").wait().number == 1
    with claimed(tmp_path / "other"):
        assert is_written(tmp_path / "other")
    assert not is_written(tmp_path / "other")


def test_a_directory_stays_claimed_when_a_later_user_of_the_claim_closes(tmp_path: Path) -> None:
    first, later = Claiming(tmp_path), Claiming(tmp_path)
    assert first.wait() is later.wait()
    later.close()
    assert is_written(tmp_path)
    first.close()
    assert not is_written(tmp_path)


def test_a_fork_has_no_part_in_the_claim(tmp_path: Path) -> None:
    writer = Claiming(tmp_path).wait()
    child = os.fork()
    if child == 0:
        try:
            Claiming(tmp_path).wait()
        except RunError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    writer.require()


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_process_of_another_machine_counts_as_ended_once_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError("no locks here")

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr("shoal.spec.run.writer._PAUSE", 0.001)
    said: list[str] = []
    with held_by_another(tmp_path) as other:
        change_claim(tmp_path, kernel="another one", host="elsewhere", process=7)
        claiming = Claiming(tmp_path, said.append)
        assert claiming.poll() is None
        assert claiming.poll() is None
        assert len(said) == 1
        assert "process 7 on elsewhere has not given up" in said[0]
        change_claim(tmp_path, beats=1000)
        with pytest.raises(RunError, match="process 7 on elsewhere writes"):
            claiming.poll()
        monkeypatch.setattr("shoal.spec.run.writer._LEASE", 0.0)
        writer = Claiming(tmp_path).wait()
        assert writer.number == 2
        other.kill()
    writer.require_newest()


def test_a_claim_that_another_program_wrote_over_is_that_of_an_unknown_process(tmp_path: Path) -> None:
    for text in ("[" * 1024, "\0" * 1024, "NaN", '{"number": 1}'):
        (tmp_path / ".writer-00000001").write_text(text)
        found = newest_claim(tmp_path)
        assert found is not None
        assert found.who == "process 0 on an unknown machine"
        assert is_alive(tmp_path, found) is None


def test_a_process_that_was_taken_over_finds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.spec.run.writer._LEASE", 0.0)
    monkeypatch.setattr("shoal.spec.run.writer._BEAT", 3600.0)  # a paused machine gives no sign of life
    mine = Claiming(tmp_path).wait()
    change_claim(tmp_path, kernel="another one")
    with held_elsewhere(tmp_path, mine.number) as other:
        for check in (mine.require, mine.require_newest):
            with pytest.raises(RunError, match=rf"process {other.pid} on .* writes {tmp_path} now"):
                check()
        with pytest.raises(RunError, match=rf"process {other.pid}"):
            Claiming(tmp_path).wait()
        other.kill()


def test_a_process_that_was_taken_over_stays_refused_once_the_other_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.spec.run.writer._LEASE", 0.0)
    monkeypatch.setattr("shoal.spec.run.writer._BEAT", 3600.0)  # a paused machine gives no sign of life
    mine = Claiming(tmp_path).wait()
    change_claim(tmp_path, kernel="another one")
    with held_elsewhere(tmp_path, mine.number) as other:
        other.communicate()
    assert is_written(tmp_path) is False
    for _ in range(2):
        with pytest.raises(RunError, match=rf"process {other.pid} on .* writes {tmp_path} now"):
            Claiming(tmp_path).wait()
    assert claims_in(tmp_path) == [mine.number + 1]


def test_a_process_of_another_user_lives_though_its_number_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.spec.run.writer.process_began", lambda process: "")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with held_by_another(tmp_path) as other:
        with pytest.raises(RunError, match=f"process {other.pid}"):
            Claiming(tmp_path).wait()
        other.kill()
    Claiming(tmp_path).wait()


def test_machines_without_a_name_of_their_start_are_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.spec.run.writer.boot_id", lambda: "")
    of_a_machine_of_this_name = Claim.of_this_process(1, 0, "", 0)
    for inode in (0, 7):
        claim = replace(of_a_machine_of_this_name, process=1 << 23, inode=inode)
        assert is_alive(tmp_path, claim) is None


AT_THE_END = """
import sys, weakref
from pathlib import Path

class Save: pass

earlier, later = Save(), Save()
weakref.finalize(earlier, print)  # as torch makes some
from shoal.spec.run.writer import Claiming, is_written

path = Path(sys.argv[1])
Claiming(path).wait()
weakref.finalize(later, lambda: print(is_written(path)))
"""


def test_a_directory_is_given_up_after_the_saves_that_a_process_waits_for_at_its_end(tmp_path: Path) -> None:
    words = [sys.executable, "-c", AT_THE_END, str(tmp_path)]
    assert subprocess.run(words, check=True, capture_output=True, text=True).stdout.split() == ["True"]
    assert is_written(tmp_path) is False


def held_elsewhere(path: Path, number: int) -> subprocess.Popen[str]:
    """Start a process that takes the directory over from this one, as from a machine that was paused."""
    program = HOLD.replace(
        "writer =", "import shoal.spec.run.writer; shoal.spec.run.writer._LEASE = 0.0\nwriter ="
    )
    words = [sys.executable, "-c", program, str(path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == number + 1
    return process


def test_a_later_group_of_ranks_takes_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.spec.run.writer._group", ("", 0))
    with held_by_another(tmp_path) as other:
        change_claim(tmp_path, training="one", group=3)
        for training, group in (("one", 3), ("one", 2), ("two", 4)):
            name_group(training, group)
            with pytest.raises(RunError):
                Claiming(tmp_path).wait()
        name_group("one", 4)
        assert Claiming(tmp_path).wait().number == 2
        other.kill()


def race(path: Path, together: object, won: object) -> None:
    together.wait()  # type: ignore[attr-defined]
    try:
        Claiming(path).wait()
        won.put(os.getpid())  # type: ignore[attr-defined]
    except RunError:
        won.put(0)  # type: ignore[attr-defined]
    together.wait()  # type: ignore[attr-defined]


def test_one_of_many_wins(tmp_path: Path) -> None:
    context = get_context("fork")
    for number in range(8):
        together, won = context.Barrier(6), context.SimpleQueue()
        path = tmp_path / str(number)
        racing = [context.Process(target=race, args=(path, together, won)) for _ in range(6)]
        for each in racing:
            each.start()
        results = [won.get() for _ in racing]
        for each in racing:
            each.join()
        assert sum(map(bool, results)) == 1
