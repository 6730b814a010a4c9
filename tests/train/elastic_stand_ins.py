"""Faults that strike a rank of `shoal train --nproc MIN:MAX`: a module for the folder where it runs.

Each rank also appends its member, its process and the step to the file "processes" when a step begins.
"""

from __future__ import annotations

__all__ = ["FAULT", "FAULTS", "STEPS"]

STEPS, FAULT = 12, 6

# The schedule is called at the beginning of each step, on every rank.
FAULTS = f"""
import ctypes, os, signal, sys, time

def children(of):
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{{name}}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if parent == str(of):
            found.add(name)
    return found

def begin(step, steps):
    member, is_first = os.environ.get("SHOAL_MEMBER"), os.environ.get("SHOAL_AFTER") == "-1"
    fault = os.environ.get("FAULT", "")
    with open("processes", "a") as file:
        print(member, os.getpid(), step, file=file)
    is_due = step >= {FAULT} if fault == "always" else step == {FAULT} and is_first
    if is_due and member == os.environ.get("WHO", "1"):
        if fault in ("kill", "always"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "exit":
            os._exit(3)
        if fault == "exit again":
            os._exit(76)  # os.EX_PROTOCOL, which is also the code of survivors
        if fault == "exception":
            raise RuntimeError("a fault of this rank")
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "sleep":
            time.sleep(3600)
        if fault == "hold":
            mutex = ctypes.create_string_buffer(128)
            for _ in range(2):
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        if fault == "leave":
            os.kill(os.getpid(), signal.SIGTERM)
        if fault == "kill and stop":  # a moment after this one is started again
            parent = os.getppid()
            before = children(parent)
            if os.fork() == 0:
                os.setsid()
                while children(parent) <= before:
                    if not os.path.exists(f"/proc/{{parent}}"):
                        os._exit(0)  # the run has ended
                    time.sleep(0.01)
                time.sleep(float(os.environ["LATER"]))
                os.kill(int(os.environ["LAUNCHED_BY"]), signal.SIGTERM)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
    if step > {FAULT} and fault == "kill and stop":
        time.sleep(0.3)
    if step == {FAULT} and member == "0" and fault == "stop all" and is_first:
        os.kill(int(os.environ["LAUNCHED_BY"]), signal.SIGTERM)
        time.sleep(0.2)
    return 1.0
"""
