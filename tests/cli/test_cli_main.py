"""The program `shoal` where a pipe breaks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from shoal.cli import doctor
from shoal.cli.commands import COMMANDS, add_command
from shoal.cli.main import main


def test_the_end_of_another_process_is_not_taken_for_that_of_the_reader(monkeypatch):
    def run(_):
        raise BrokenPipeError("a process that this one talks to")

    monkeypatch.setattr(doctor, "run", run)
    with pytest.raises(BrokenPipeError):
        main(["doctor"])


def test_a_reader_of_the_output_that_has_read_enough_is_no_failure():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "shoal", "completion", "bash"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_list_of_commands_imports_none_of_them():
    listed = "import sys, shoal.cli.main as program\ntry: program.main(['--help'])\nexcept SystemExit: pass\n"
    count = "print(*sorted(name for name in sys.modules if name.startswith('shoal.cli.')))"
    told = subprocess.run([sys.executable, "-c", listed + count], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "shoal.cli.commands shoal.cli.main"
    assert all(command in told.stdout for command in COMMANDS)


def names_of(parser, words=()):
    """The words of every command and subcommand, each with its parser."""
    yield list(words), parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from names_of(inner, (*words, name))


def test_every_command_has_a_help_that_says_what_it_does():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for command in COMMANDS:
        add_command(commands, command)
    for words, each in list(names_of(parser))[1:]:
        assert each.format_help().startswith("usage: "), words
        assert each.get_default("run") is not None or each._subparsers is not None, words
        assert each.description or words == ["launch", "local"], words
