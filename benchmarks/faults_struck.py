"""The user's code of a training that suffers a fault, and the program that starts such a training.

`faults_trial.py` copies this file into the folder of each trial. As the module of `optimizer.schedule` it
strikes once, on rank 1, in the phase and by the kind of fault that the environment names. As a program it is
`shoal`, on an emulated host if the environment names one.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

KIND, PHASE = os.environ.get("FAULT_KIND", ""), os.environ.get("FAULT_PHASE", "")
HERE = Path(os.environ.get("FAULT_FOLDER", "."))
CHECKPOINTS = Path("disk/one/checkpoints")
DRAWN = random.Random(os.environ.get("FAULT_SEED"))
FAULT = DRAWN.randrange(4, 9)
"""Steps that are made before the fault is armed."""

EVERY = 3
"""Steps between two saves."""

OF_NETWORK = ("cut", "one-way", "throttle")
HEADROOM = 32 << 20  # bytes of memory that are left to a process that has no more


def is_struck() -> bool:
    """Return whether the fault is this rank's, and has not struck yet."""
    return os.environ.get("SHOAL_MEMBER") == "1" and not (HERE / "struck").exists()


def note() -> None:
    """Note that the fault strikes now."""
    (HERE / "noting").write_text(repr(time.time()))
    (HERE / "noting").rename(HERE / "struck")


def strike(*arguments: object) -> None:
    """Suffer the fault, after a random wait."""
    if not is_struck():
        return
    time.sleep(DRAWN.uniform(0, 0.02))
    if KIND in OF_NETWORK:
        (HERE / "asked").touch()
        while is_struck():  # the benchmark changes the network, and notes it
            time.sleep(0.002)
        return
    note()
    if KIND == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif KIND == "segfault":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    elif KIND == "exception":
        raise RuntimeError("a fault of this rank")
    elif KIND == "interpreter":
        mutex = ctypes.create_string_buffer(128)
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    elif KIND == "memory":
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (in_use + HEADROOM, in_use + HEADROOM))
        bytearray(1 << 30)
    elif KIND == "disk":
        fill_disk()
    elif KIND == "slow":
        time.sleep(3)
    elif KIND == "clock":
        now, now_ns = time.time, time.time_ns
        time.time, time.time_ns = lambda: now() + 3600, lambda: now_ns() + 3600 * 10**9
    elif KIND == "store":
        kill_launcher()
    elif KIND == "corrupt":
        corrupt_parameter()


def fill_disk() -> None:
    """Write until the disk of the run is full."""
    with (HERE / "disk" / "ballast").open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass


def kill_launcher() -> None:
    """Kill the process that holds the store of the ranks."""
    os.kill(int(os.environ["LAUNCHED_BY"]), signal.SIGKILL)


def corrupt_parameter() -> None:
    """Change one bit of one parameter in memory."""
    import torch

    with torch.no_grad():
        found = [each for each in gc.get_objects() if isinstance(each, torch.nn.Parameter)]
        sizes = [each.numel() for each in found]
        (parameter,) = DRAWN.choices(found, sizes)
        words = parameter.data.view(-1).view(torch.int32)
        bit = DRAWN.randrange(32)
        words[DRAWN.randrange(len(words))] ^= 1 << bit if bit < 31 else -(1 << 31)


def corrupt_file(path: Path) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        place = DRAWN.randrange(path.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << DRAWN.randrange(8)]))


def around(holder: Any, name: str, act: Callable[..., bool], *, after: bool = False) -> None:
    """Act before, or after, the calls of a function until the act says that it is done."""
    original = getattr(holder, name)

    def called(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named) if after else None
        if act(*arguments):
            setattr(holder, name, original)
        return result if after else original(*arguments, **named)

    setattr(holder, name, called)


def strike_once(*arguments: object) -> bool:
    """Strike; done."""
    strike()
    return True


def corrupt_written(saver: object, staging: Path, *rest: object) -> bool:
    """Change one bit of what this rank has written of a checkpoint on the disk of the run."""
    if staging.parent != CHECKPOINTS:
        return False
    corrupt_file(DRAWN.choice(sorted(staging.glob("rank-00001*"))))
    (HERE / "corrupted").write_text(staging.name.removesuffix(".tmp"))
    note()
    return True


def corrupt_to_read(path: Path, *rest: object) -> bool:
    """Change one bit of a file of a checkpoint that this rank will read."""
    corrupt_file(path)
    note()
    return True


def strike_in_forward(module: Any, inputs: Any) -> None:
    """Strike in the forward of the first module."""
    handle.remove()
    strike()


def strike_in_backward(module: Any, inputs: Any, output: Any) -> None:
    """Strike when the gradient of the first module's output is there."""
    if getattr(output, "requires_grad", False):
        handle.remove()
        output.register_hook(strike)


if PHASE == "start" and KIND != "corrupt" and is_struck():
    strike()
if PHASE == "load" and is_struck():
    loading = import_module("shoal.checkpoint.load")
    around(loading, "_read_and_verify", corrupt_to_read if KIND == "corrupt" else strike_once)


def begin(step: int, steps: int) -> float:
    """Return the factor of the learning rate in a step, and arm the fault where it is due."""
    global handle
    if KIND == PHASE == "":
        return 1.0
    if (KIND, PHASE) == ("corrupt", "save") and (step >= FAULT + EVERY or (HERE / "struck").exists()):
        while not (HERE / "struck").exists():  # a save is under way, and the training could end before it
            time.sleep(0.002)
        while not (CHECKPOINTS / (HERE / "corrupted").read_text()).exists():
            time.sleep(0.002)
        kill_launcher()  # the next start must find what is wrong with the checkpoint
    if not is_struck():
        return 1.0
    if (KIND, PHASE) == ("corrupt", "start"):
        strike()  # before, there is no parameter
    if step == FAULT:
        from torch.nn.modules import module

        from shoal.checkpoint.save import Saver
        from shoal.parallel.communication import Axis

        if PHASE == "forward":
            handle = module.register_module_forward_pre_hook(strike_in_forward)
        elif PHASE == "backward":
            handle = module.register_module_forward_hook(strike_in_backward)
        elif PHASE == "collective":
            around(Axis, "all_reduce", strike_once)
        elif PHASE == "save" and KIND == "corrupt":
            around(Saver, "_write_part", corrupt_written, after=True)
        elif PHASE == "save":
            around(Saver, "_write_part", strike_once)
    return 1.0


if __name__ == "__main__":
    os.environ["LAUNCHED_BY"] = str(os.getpid())
    if "FAULT_HOST" in os.environ:
        from shoal.testing.hosts import enter_host

        enter_host(int(os.environ["FAULT_HOST"]))
    from shoal.cli.main import main

    sys.exit(main())
