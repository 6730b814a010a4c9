"""What Linux tells of processes."""

import os
import subprocess
import sys

from shoal.proc import boot_id, process_began, process_state

SPACED = "import ctypes; ctypes.CDLL(None).prctl(15, b') S 1 (x'); print('named', flush=True); input()"


def test_a_name_with_brackets_and_spaces_hides_nothing():
    with subprocess.Popen(
        [sys.executable, "-c", SPACED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "named\n"
        began = int(process_began(process.pid))
        assert began >= int(process_began(os.getpid()))
        while process_state(process.pid) != "S":
            pass
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(process.pid) == process_began(process.pid) == ""
    assert process_state(process.pid) == ""


def test_boots_have_a_name():
    assert len(boot_id()) == 36
