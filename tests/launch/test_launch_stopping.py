"""What a launcher makes of the signals that it gets."""

from __future__ import annotations

import signal

import pytest

from shoal.launch.local.signals import SAME, StopRequest

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


class Processes:
    """Ranks that note what they are sent."""

    def __init__(self):
        self.sent = []

    def signal(self, number, ranks=None):
        self.sent.append(number)


@pytest.mark.parametrize(
    ("first", "pause", "second", "is_now"),
    [
        (INT, 0.0, INT, False),  # a program above passes on what the terminal sent to all
        (INT, SAME - 0.01, INT, False),
        (INT, SAME, INT, True),
        (TERM, 0.0, INT, True),
        (USR1, 0.0, INT, True),
        (INT, SAME, TERM, False),
        (TERM, SAME, TERM, False),
    ],
)
def test_a_second_ctrl_c_means_now(monkeypatch, first, pause, second, is_now):
    clock = [100.0]
    monkeypatch.setattr("shoal.launch.local.signals.time.monotonic", lambda: clock[0])
    signals, processes = [], Processes()
    stop = StopRequest(signals)
    for number in (first, second):
        signals.append(number)
        stop.pass_on(processes)
        clock[0] += pause
    assert (stop.signal, stop.is_now) == (first, is_now)
    assert processes.sent == [first, second]


def test_ctrl_z_stops_all_until_they_continue_and_tells_how_long_that_may_be(monkeypatch, capsys):
    processes = Processes()
    stopped = []
    monkeypatch.setattr("shoal.launch.local.signals.os.kill", lambda process, number: stopped.append(number))
    stop = StopRequest([signal.SIGTSTP])
    stop.pass_on(processes)
    assert (processes.sent, stopped) == ([signal.SIGSTOP, signal.SIGCONT], [signal.SIGSTOP])
    assert "sooner than `timeout`" in capsys.readouterr().err
    assert stop.signal is None


def test_ctrl_z_stops_nothing_where_the_ranks_are_on_other_hosts_and_a_signal_is_answered(capsys):
    processes, signals = Processes(), [signal.SIGTSTP]
    stop = StopRequest(signals, are_away=True)
    stop.pass_on(processes)
    assert (processes.sent, stop.signal) == ([], None)
    assert "Ctrl-Z does not stop a training on several hosts" in capsys.readouterr().err
    signals.append(INT)
    stop.pass_on(processes)
    assert (processes.sent, stop.signal) == ([INT], INT)
    assert "SIGINT: the ranks finish their step and save" in capsys.readouterr().err
