"""Seconds until a group of ranks has formed, against their number: Shoal beside gloo, and simulated to 1,024.

    python benchmarks/bootstrap.py [--rounds 5] [--ranks 2,4,8,16,64] [--simulated 16,64,256,1024]

Real ranks are processes of this machine. They connect to a TCPStore, meet at a barrier, form the default
group, and then further groups of all of them. The connections are torch's, and their time is told apart:
its store asks for the name of each client's host, one after the other, which takes long where nobody
answers. (The line "::ffff:127.0.0.1 localhost" in /etc/hosts answers.) Simulated ranks are threads that
tell each other, through one TCPStore, texts as long as those of real ones, in as many rounds: what a store
bears, without the memory and the connections of so many processes. Beside them, the plain way: each rank
reads the text of each other.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import torch.distributed as dist
from rounds import Spread

import shoal.collectives
from shoal.collectives.tcp_store import Assembly
from shoal.machine.bench import describe

assert shoal.collectives

_FURTHER_GROUPS = 10
_PROCESSES = 8
"""That hold the simulated ranks."""
_TEXTS = {"host": 60, "introduction": 220, "joined": 1}
"""Bytes that a rank of a first group tells, by subject (shoal/collectives/rendezvous.py)."""
_ACQUAINTANCE = {"acquaintance": 280}
"""Bytes that a rank of a group within another tells."""
_MOST_PLAIN = 256
"""Ranks from which on the plain way takes minutes."""
_TIMEOUT = timedelta(seconds=600)

Times = tuple[float, float, float, float]
"""Seconds that a rank's connection to the store took; when it began to form its first group, when that was
formed, and when the further ones were."""


# --- real ranks ---


def _form(tell: Connection, barrier: Barrier, backend: str, rank: int, size: int, port: int) -> None:
    gc.disable()  # or all ranks' garbage would be collected at the same moment, which takes 0.1 s each
    barrier.wait()
    asked = time.monotonic()
    store = dist.TCPStore("127.0.0.1", port, None, False, _TIMEOUT)
    connected = time.monotonic() - asked
    barrier.wait()
    began = time.monotonic()
    dist.init_process_group(backend, store=store, timeout=_TIMEOUT, rank=rank, world_size=size)
    formed = time.monotonic()
    for _ in range(_FURTHER_GROUPS):
        dist.new_group(range(size), backend=backend)
    tell.send((connected, began, formed, time.monotonic()))
    barrier.wait()
    dist.destroy_process_group()


def _form_for_real(backend: str, size: int) -> tuple[float, float, float]:
    """Seconds for the connections, for the first group, and for each of the further ones."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shoal.collectives", "rounds"])
    store = dist.TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, wait_for_workers=False)
    barrier = context.Barrier(size)
    pipes = []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=_form, args=(theirs, barrier, backend, rank, size, store.port)).start()
        theirs.close()
        pipes.append(ours)
    times: list[Times] = [pipe.recv() for pipe in pipes]
    for process in multiprocessing.active_children():
        process.join()
    connected, begun, formed, further = (max(each) for each in zip(*times, strict=True))
    return connected, formed - begun, (further - formed) / _FURTHER_GROUPS


# --- simulated ranks ---

Tell = Callable[[Any, int, int, str, str], None]
"""Tells everyone a text: store, rank, size, subject, text."""


def _tell_plainly(store: Any, rank: int, size: int, subject: str, text: str) -> None:
    store.set(f"{subject}/{rank}", text)
    for each in range(size):
        store.get(f"{subject}/{each}")


def _simulate(store: Any, rank: int, size: int, texts: dict[str, int], name: str, is_plain: bool) -> None:
    prefixed = dist.PrefixStore(name, store)
    if is_plain:
        for subject, length in texts.items():
            _tell_plainly(prefixed, rank, size, subject, "x" * length)
        return
    assembly = Assembly(prefixed, rank, size, _TIMEOUT)
    for subject, length in texts.items():
        assembly.tell(subject, "x" * length)


def _hold_ranks(tell: Connection, barrier: Barrier, ranks: Sequence[int], size: int, port: int) -> None:
    """Runs some of the simulated ranks, each in a thread with a connection of its own to the store."""
    with ThreadPoolExecutor(32) as pool:
        stores = list(pool.map(lambda _: dist.TCPStore("127.0.0.1", port, None, False, _TIMEOUT), ranks))
    cases = [("first", _TEXTS, False), ("further", _ACQUAINTANCE, False)]
    if size <= _MOST_PLAIN:
        cases.append(("plain", _TEXTS, True))
    times = {}
    for name, texts, is_plain in cases:
        threads = [
            threading.Thread(target=_simulate, args=(store, rank, size, texts, name, is_plain))
            for store, rank in zip(stores, ranks, strict=True)
        ]
        barrier.wait()
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        times[name] = began, time.monotonic()
    tell.send(times)


def _form_simulated(size: int) -> dict[str, float]:
    """Seconds by case."""
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, wait_for_workers=False)
    processes = min(_PROCESSES, size)
    barrier = context.Barrier(processes)
    pipes = []
    for index in range(processes):
        ours, theirs = context.Pipe(duplex=False)
        ranks = range(index, size, processes)
        context.Process(target=_hold_ranks, args=(theirs, barrier, ranks, size, store.port)).start()
        theirs.close()
        pipes.append(ours)
    told = [pipe.recv() for pipe in pipes]
    for process in multiprocessing.active_children():
        process.join()
    return {
        name: max(each[name][1] for each in told) - max(each[name][0] for each in told) for name in told[0]
    }


# --- the page ---


def _spread(seconds: Sequence[float]) -> str:
    spread = Spread.of(seconds)
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--ranks", type=_numbers, default=[2, 4, 8, 16, 64], help="real ones")
    parser.add_argument("--simulated", type=_numbers, default=[16, 64, 256, 1024], help="simulated ones")
    options = parser.parse_args()
    machine = describe()
    print("# Forming a group\n")
    print(
        f"Written by `benchmarks/bootstrap.py --rounds {options.rounds}`: seconds, median and range of "
        f"{options.rounds} interleaved rounds. *Store*: until all ranks are connected to torch's store. "
        "*First*: from then on, from the last rank's call of `init_process_group` until all have returned. "
        f"*Further*: each of {_FURTHER_GROUPS} `new_group` of all ranks after it.\n"
    )
    print(f"{machine}\n".replace("\n", "  \n"))
    print("\n## Ranks that are processes, on these cores\n")
    print("| ranks | store | Shoal, first | gloo, first | Shoal, further | gloo, further |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in options.ranks:
        seconds: dict[str, list[tuple[float, float, float]]] = {"shoal": [], "gloo": []}
        for number in range(options.rounds):
            print(f"{size} ranks, round {number + 1} of {options.rounds}", file=sys.stderr)
            for backend in sorted(seconds, reverse=number % 2 == 1):
                seconds[backend].append(_form_for_real(backend, size))
        connected = [each[0] for times in seconds.values() for each in times]
        cells = [_spread([each[kind] for each in seconds[who]]) for kind in (1, 2) for who in seconds]
        print(f"| {size} | {_spread(connected)} | {' | '.join(cells)} |", flush=True)
    print("\n## Simulated ranks\n")
    print(
        "| ranks | three rounds (a first group) | one round (a further group) "
        "| three rounds, each text read alone |"
    )
    print("| --- | --- | --- | --- |")
    for size in options.simulated:
        cases: dict[str, list[float]] = {"first": [], "further": [], "plain": []}
        for number in range(options.rounds):
            print(f"{size} simulated ranks, round {number + 1} of {options.rounds}", file=sys.stderr)
            for name, value in _form_simulated(size).items():
                cases[name].append(value)
        cells = [_spread(values) if values else "not tried" for values in cases.values()]
        print(f"| {size} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
