"""Threads that may touch CUDA start on the GPU of the thread that starts them."""

from __future__ import annotations

import ast
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import shoal
from shoal.checkpoint import Background as BackgroundSave
from shoal.checkpoint import Piece, Saver, SingleProcess, Staging
from shoal.collectives import thread_device
from shoal.collectives.thread_device import callers_device, on_callers_device
from shoal.collectives.work import Background
from shoal.data.loader import Prefetcher
from shoal.layers import TORCH_FREE, package_of
from shoal.parallel import own_device
from shoal.parallel.exchange.server.client import Servers
from shoal.record.destinations.opening import QueuedLogger

PACKAGE = Path(shoal.__file__).parent

WITHOUT_CUDA = {
    "channel.py": "carries bytes, in a launcher",
    "checkpoint/files.py": "hashes and writes bytes",
    "checkpoint/shard.py": "hashes bytes",
    "collectives/hang_watch.py": "writes pulses, and reads what other processes wrote",
    "data/workers.py": "asks processes through pipes",
    "launch/fleet/agent.py": "reads a pipe of a program, in a launcher",
    "launch/fleet/fleet.py": "serves connections, in a launcher",
    "launch/hosts/follower.py": "serves connections, in a launcher",
    "launch/hosts/gate.py": "serves connections, in a launcher",
    "launch/elastic/linked_hosts.py": "serves connections, in a launcher",
    "launch/elastic/elastic_rank.py": "reads a store",
    "launch/local/worker.py": "ends the process",
    "parallel/offload/storage.py": "moves bytes between files and memory of the host",
    "record/clock_exchange.py": "sends and receives packets",
    "parallel/exchange/server/serve.py": "serves connections, in a process that computes on the CPU",
    "train/save_policy.py": "copies files",
}
"""Files whose threads cannot reach CUDA, and why; all others set the device first."""


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs, of which each thread has one: the first until it sets another."""

    class Gpus(threading.local):
        current = 0

    each = Gpus()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: each.current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(each, "current", device))
    each.current = 2
    return each


def test_a_thread_starts_on_the_gpu_of_the_thread_that_starts_it(gpus):
    found = []

    def look(number, *, name):
        found.append((number, name, gpus.current))

    for target in (look, on_callers_device(look)):
        thread = threading.Thread(target=target, args=(1,), kwargs={"name": "a"})
        thread.start()
        thread.join()
    assert found == [(1, "a", 0), (1, "a", 2)]


def test_the_threads_of_a_pool_start_there_too(gpus):
    with ThreadPoolExecutor(1, initializer=callers_device()) as pool:
        gpus.current = 1  # later, which changes nothing
        assert pool.submit(lambda: gpus.current).result() == 2


def test_a_process_without_cuda_stays_without_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("it used CUDA"))
    with ThreadPoolExecutor(1, initializer=callers_device()) as pool:
        assert pool.submit(lambda: 3).result() == 3


def of_collectives(tmp_path, look):
    background = Background()
    background.run(look)
    assert background.settle(10)


def of_saves(tmp_path, look):
    def values(piece):
        look()
        return piece.tensor

    background = BackgroundSave(Saver(values=values), SingleProcess())
    background.begin(tmp_path, 1, [Piece.whole("a", torch.ones(3))], {})
    background.wait()


def of_staging(tmp_path, look):
    staging = Staging()
    staging.reserve([Piece.whole("a", torch.ones(3))])
    staging._touch_and_lock = lambda pages: look()
    staging.prepare()
    staging.release()


def of_data(tmp_path, look):
    def items():
        look()
        yield 1

    with Prefetcher(items()) as prefetcher:
        assert list(prefetcher) == [1]


@pytest.mark.parametrize("run", [of_collectives, of_saves, of_staging, of_data])
def test_what_runs_beside_training_runs_on_its_gpu(gpus, tmp_path, run):
    found = []
    run(tmp_path, lambda: found.append((gpus.current, threading.current_thread().name)))
    assert found
    assert all(device == 2 for device, _ in found)
    assert threading.current_thread().name not in {name for _, name in found}


def of_pieces_of_data(tmp_path, look, get_device):
    def items():
        for number in range(10):
            look()
            yield number

    with Prefetcher(items(), depth=1) as prefetcher:
        next(prefetcher)
        get_device()
        for _ in prefetcher:
            pass


def of_logged_steps(tmp_path, look, get_device):
    class Looking:
        def log(self, step, values):
            look()

        close = look

    logger = QueuedLogger("a logger", Looking, print)
    logger.log(1, {})
    while logger._waiting:
        time.sleep(0.01)
    get_device()
    logger.log(2, {})
    logger.close()


def of_later_collectives(tmp_path, look, get_device):
    background = Background()
    background.run(look)
    assert background.settle(10)
    get_device()
    background.run(look)
    assert background.settle(10)


def of_servers(tmp_path, look, get_device):
    client = Servers(["a", "b"], "token")
    client._of_each(lambda shard, part: look(), [1, 2])
    get_device()
    client._of_each(lambda shard, part: look(), [1, 2])


@pytest.mark.parametrize("run", [of_pieces_of_data, of_logged_steps, of_later_collectives, of_servers])
def test_what_begins_before_the_rank_has_a_gpu_goes_on_with_it(gpus, tmp_path, monkeypatch, run):
    monkeypatch.setattr(thread_device, "_of_rank", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpus.current = 0
    found = []

    def get_device():
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(
            torch.cuda, "set_device", lambda device: setattr(gpus, "current", index_of(device))
        )
        own_device("cuda:2")

    run(tmp_path, lambda: found.append(gpus.current), get_device)
    assert found[0] == 0
    assert found[-1] == 2


def index_of(device):
    return device if isinstance(device, int) else device.index


def threads_begun(tree):
    """Yield, for each thread or pool that a source makes, whether it sets the device first."""
    wrapped = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and calls(node.value) == "on_callers_device"
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        given = {each.arg: each.value for each in getattr(node, "keywords", ())}
        if calls(node) in ("Thread", "Timer"):
            target = given.get("target")
            yield calls(target) == "on_callers_device" or getattr(target, "id", None) in wrapped
        elif calls(node) == "ThreadPoolExecutor":
            yield calls(given.get("initializer")) == "callers_device"


def calls(node):
    """The last name of what an expression calls; "" if it is no call."""
    function = getattr(node, "func", None) if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", ""))


def test_every_thread_that_may_touch_cuda_sets_its_device_first():
    bare = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE.parent).with_suffix("")
        source = path.read_text()
        if package_of(".".join(name.parts)) not in TORCH_FREE and not all(threads_begun(ast.parse(source))):
            bare.add(str(path.relative_to(PACKAGE)))
            makes_no_context = {"device_count", "is_available"}
            assert set(re.findall(r"\.cuda\.(\w+)", source)) <= makes_no_context, name
    assert bare == set(WITHOUT_CUDA)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("threading.Thread(target=work)", [False]),
        ("Thread(target=on_callers_device(work), daemon=True)", [True]),
        ("run = on_callers_device(self.work)\nthreading.Thread(target=run)", [True]),
        ("run = self.work\nthreading.Thread(target=run)", [False]),
        ("ThreadPoolExecutor(3)", [False]),
        ("ThreadPoolExecutor(3, initializer=callers_device())", [True]),
        ("threading.Timer(3, work)", [False]),
    ],
)
def test_the_rule_sees_what_a_thread_begins_with(source, found):
    assert list(threads_begun(ast.parse(source))) == found
