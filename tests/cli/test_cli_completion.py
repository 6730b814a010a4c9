"""`shoal completion`: the scripts, sourced by the shells that are there."""

import shutil
import subprocess
import sys

import pytest

from shoal.cli.main import main

SHELLS = ("bash", "zsh", "fish")

# Sources a script, and prints what the Tab key offers at the end of a line.
BASH = """
source "$1"
read -r -a COMP_WORDS <<< "$2"
[[ $2 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
$(complete -p shoal | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The files that the command prints, by shell."""
    folder = tmp_path_factory.mktemp("completion")
    command = [sys.executable, "-m", "shoal", "completion"]
    for shell in SHELLS:
        with (folder / shell).open("w") as file:
            subprocess.run([*command, shell], stdout=file, check=True)
    return folder


def offered(scripts, line):
    command = ["bash", "--norc", "-c", BASH, "-", str(scripts / "bash"), line]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_takes_its_script(scripts, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    told = subprocess.run([shell, "-n", str(scripts / shell)], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_offers_commands_options_names_and_files(scripts, tmp_path):
    (tmp_path / "run-1").mkdir()
    assert offered(scripts, "shoal pl") == {"plan"}
    assert offered(scripts, "shoal checkpoint ") == {"convert", "copy", "diff", "ls", "verify"}
    assert offered(scripts, "shoal cluster ") == {"ls", "show", "export", "check", "import"}
    assert offered(scripts, "shoal cluster show dgx-h") == {"dgx-h100"}
    assert offered(scripts, "shoal train --resu") == {"--resume"}
    assert offered(scripts, "shoal plan --model llama3-") == {"llama3-8b", "llama3-70b", "llama3-405b"}
    assert offered(scripts, "shoal simulate --cluster dgx-h") == {"dgx-h100"}
    assert offered(scripts, f"shoal report {tmp_path}/ru") == {f"{tmp_path}/run-1"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_is_in_every_script(scripts, shell):
    text = (scripts / shell).read_text()
    for command in ("train", "plan", "simulate", "report", "checkpoint", "cluster", "bench", "completion"):
        assert command in text


def test_a_shell_that_is_not_known_is_refused_with_those_that_are(capsys):
    with pytest.raises(SystemExit) as refused:
        main(["completion", "tcsh"])
    assert refused.value.code == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


def test_other_commands_do_not_wait_for_what_writes_the_scripts():
    program = "import sys, shoal.cli.main; sys.exit('shtab' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
