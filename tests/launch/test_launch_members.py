"""The launcher's loop over members, with processes that end as a script says."""

from __future__ import annotations

import signal

import pytest
from torch._C._distributed_c10d import HashStore

from shoal.errors import WorkerError
from shoal.launch.elastic.elastic_launcher import Members
from shoal.launch.elastic.elastic_rank import Membership
from shoal.launch.local import EXIT_AGAIN, Outcome
from shoal.launch.local.outcome import Causes
from shoal.launch.local.signals import StopRequest
from shoal.launch.submit import EXIT_STOPPED

KILL, TERM = -signal.SIGKILL, -signal.SIGTERM


class Scripted:
    """Processes of three ranks. Each time the launcher listens, those that the next line names end.

    Args:
        folder: Where members leave their outcomes.
        lines: For each time, the exit codes by rank, or a signal that the launcher gets.
        backend: The backend of the ranks.
    """

    def __init__(self, folder, lines, backend):
        self.folder, self.lines = folder, iter(lines)
        self.codes, self.signals, self.started = {}, [], []
        self.store = HashStore()
        Membership(0, lambda: self.store, -1, lambda: None).begin(backend)

    def running(self):
        return [rank for rank in range(3) if rank not in self.codes]

    def exit_codes(self):
        return dict(self.codes)

    def stopped(self):
        return []

    def start_again(self, rank, changes):
        del self.codes[rank]
        self.started.append(rank)

    def signal(self, number, ranks=None):
        pass

    def listen(self, seconds):
        line = next(self.lines, None)
        assert line is not None or not self.running(), f"it waits for {self.running()}"
        if isinstance(line, signal.Signals):
            self.signals.append(line)
            return
        for rank, code in (line or {}).items():
            assert rank not in self.codes
            self.codes[rank] = code
            if code == EXIT_STOPPED:
                Outcome(rank=rank, exit_code=code).write(self.folder)


def run(tmp_path, lines, backend="shoal"):
    processes = Scripted(tmp_path, lines, backend)
    members = Members(processes, processes.store, tmp_path, 2, 1, None, 60.0)
    return members.run(StopRequest(processes.signals)), processes


def test_a_rank_that_is_starting_ends_by_the_signal_and_the_others_save(tmp_path):
    lines = [{1: KILL}, {}, signal.SIGTERM, {1: TERM}, {0: EXIT_STOPPED}, {2: EXIT_STOPPED}]
    code, processes = run(tmp_path, lines)
    assert code == EXIT_STOPPED
    assert processes.started == [1]


def test_a_rank_that_is_starting_and_missed_the_signal_is_not_waited_for(tmp_path):
    lines = [{1: KILL}, {}, signal.SIGTERM, {0: EXIT_STOPPED, 2: EXIT_STOPPED}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.launch.elastic.elastic_launcher.listen_for", lambda *each: None)
        assert run(tmp_path, lines)[0] == EXIT_STOPPED


def test_a_rank_that_trains_and_ends_by_the_signal_has_failed(tmp_path):
    with pytest.raises(WorkerError, match="rank 1 failed: killed by SIGTERM"):
        run(tmp_path, [signal.SIGTERM, {1: TERM}, {0: EXIT_STOPPED, 2: EXIT_STOPPED}])


@pytest.mark.parametrize("end", [EXIT_AGAIN, -signal.SIGABRT, TERM])
def test_a_signal_while_survivors_end_leaves_the_loss_as_the_cause(tmp_path, end):
    lines = [{1: KILL}, {}, signal.SIGTERM, {0: end}, {2: EXIT_AGAIN}, {1: TERM}]
    with pytest.raises(WorkerError, match="rank 1 failed: killed by SIGKILL"):
        run(tmp_path, lines, backend="nccl")


def test_a_signal_while_all_start_again_leaves_the_loss_as_the_cause(tmp_path):
    lines = [{1: KILL}, {}, {0: EXIT_AGAIN, 2: EXIT_AGAIN}, signal.SIGTERM, {0: TERM, 1: TERM, 2: TERM}]
    with pytest.raises(WorkerError, match="rank 1 failed: killed by SIGKILL"):
        run(tmp_path, lines, backend="nccl")


def test_an_exit_with_the_code_of_survivors_is_told_as_a_failure(tmp_path, capsys):
    lines = [{1: EXIT_AGAIN}, {}, {0: EXIT_AGAIN}, {2: EXIT_AGAIN}, {0: 0, 1: 0, 2: 0}]
    code, processes = run(tmp_path, lines, backend="nccl")
    assert code == 0
    assert sorted(processes.started) == [0, 1, 2]
    told = capsys.readouterr().err
    assert "rank 1 failed: its process ended with exit code 76; 2 go on" in told
    assert told.count("failed") == 1


def test_members_that_wait_for_a_group_when_the_signal_comes_form_it_and_save(tmp_path):
    formed = []

    class Waits(Scripted):
        def listen(self, seconds):
            store = Membership(0, lambda: self.store, -1, lambda: None)
            if formed == [] and (newest := store._newest()) is not None and newest.members == (0, 2):
                formed.append(newest)
                self.codes |= {0: EXIT_STOPPED, 2: EXIT_STOPPED}
                for rank in (0, 2):
                    Outcome(rank=rank, exit_code=EXIT_STOPPED).write(self.folder)
                return
            super().listen(seconds)
            if 1 in self.codes and not self.signals and not formed:  # member 1 has left: all wait for a group
                self.signals.append(signal.SIGTERM)

    processes = Waits(tmp_path, [{}, {1: EXIT_STOPPED}, {}, {}, {}], "shoal")
    members = Members(processes, processes.store, tmp_path, 2, 1, None, 60.0)
    assert members.run(StopRequest(processes.signals)) == EXIT_STOPPED
    assert [each.is_broken for each in formed] == [False]


def test_one_that_left_before_the_signal_does_not_stand_for_those_that_did_not_save(tmp_path, capsys):
    lines = [{}, {1: EXIT_STOPPED}, {}, signal.SIGTERM, {0: KILL, 2: KILL}]
    with pytest.raises(WorkerError) as caught:
        run(tmp_path, lines)
    assert caught.value.exit_code != EXIT_STOPPED
    assert "shoal: rank 1 left; now there are 2\n" in capsys.readouterr().err


def test_a_rank_that_had_made_no_step_does_not_stand_for_those_that_did_not_save(tmp_path):
    Outcome(rank=1, exit_code=EXIT_STOPPED, is_early=True).write(tmp_path)
    causes = Causes(tmp_path)
    with pytest.raises(WorkerError, match="ended by SIGTERM before its state was saved"):
        causes.after_signal({0: KILL, 1: EXIT_STOPPED}, "SIGTERM")
    assert causes.after_signal({1: EXIT_STOPPED}, "SIGTERM") == EXIT_STOPPED


def test_a_rank_that_copies_the_last_checkpoint_after_all_steps_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.launch.elastic.elastic_launcher.listen_for", lambda *each: None)
    code, processes = run(tmp_path, [{1: 0}, {2: 0}, {}, {}, {0: 0}])
    assert (code, processes.running()) == (0, [])


def test_a_rank_that_is_starting_when_all_steps_are_made_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.launch.elastic.elastic_launcher.listen_for", lambda *each: None)
    code, processes = run(tmp_path, [{1: KILL}, {}, {0: 0}, {2: 0}])
    assert (code, processes.running()) == (0, [1])
