"""Collectives between emulated hosts: Shoal beside gloo, the link's bound, and what crosses the links.

    python benchmarks/hosts.py [--networks 2x1@1,2x2@10] [--collectives all_reduce] [--sizes 64MiB] > hosts.md

A network `2x4@10` is 2 hosts with 4 ranks each, on links of 10 Gbit/s: network namespaces, each with one
interface at a common switch (shoal.testing.hosts). That takes root. Everything is gone afterwards, however it
ends.

The bound of a collective is what has to cross the busiest link one way, at the nominal rate's share for
payload. A plain TCP stream from each host to the next, all at once, is measured beside it: it says how much
of the rate the machine itself can carry, as all hosts share its cores.

`in-network` among --algorithms uses an aggregator in the switch. The predicted time is the table's, with the
link's rate of payload in place of the table's; gloo's is that of a ring of all ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from statistics import median
from types import TracebackType

import torch
import torch.distributed as dist
from hosts_network import Network
from torch._C._distributed_c10d import TCPStore

from shoal.collectives import Aggregator, Options
from shoal.errors import UserError, WorkerError
from shoal.machine.bench import COLLECTIVES, describe, parse_sizes
from shoal.machine.bench.contestants import Buffers
from shoal.machine.bench.contestants.contestant import TorchGroup
from shoal.testing.hosts import Hosts, enter_host
from shoal.units import format_bytes

_NETWORKS = "2x1@1,3x1@1,4x1@1,2x2@1,2x1@10,3x1@10,4x1@10,2x2@10"
_STREAM_SECONDS = 0.5
_TURN_SECONDS = 0.2
_FEWEST = 3  # operations in a turn
_TIMEOUT = 120.0  # seconds for anything that the ranks do
_STORE_PORT, _STREAM_PORT, _AGGREGATOR_PORT = 29500, 29501, 29502
_IN_NETWORK = "in-network"


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds of an operation on the slowest rank, and payload bytes that each host sent for it."""

    seconds: float
    sent: tuple[float, ...]


class Ranks:
    """One process for each rank, on its host. A context manager.

    Args:
        hosts: Where.
        network: How many on each.
        contestants: Options of Shoal by name; None for gloo.
    """

    def __init__(self, hosts: Hosts, network: Network, contestants: Mapping[str, Options | None]) -> None:
        self._hosts = hosts
        self._members = []
        context = multiprocessing.get_context("spawn")
        for rank in range(network.ranks):
            ours, theirs = context.Pipe()
            host = rank // network.ranks_per_host
            place = hosts.process(host), hosts.addresses[0]
            process = context.Process(
                target=_serve, args=(theirs, rank, network.ranks, place, contestants), daemon=True
            )
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self._ranks_per_host = network.ranks_per_host
        self._ask([("ready",)] * network.ranks)

    def stream_rate(self) -> float:
        """Bytes a second of a plain TCP stream from each host to the next, the slowest of all at once."""
        questions: list[tuple[object, ...]] = [("ready",)] * len(self._members)
        addresses = self._hosts.addresses
        for host, address in enumerate(addresses):
            following = addresses[(host + 1) % len(addresses)]
            questions[host * self._ranks_per_host] = ("stream", address, following)
        rates = self._ask(questions)
        return min(rate for rate in rates if rate)

    def run(self, contestant: str, collective: str, size: int, operations: int) -> Turn:
        """Some operations in a row, after one that is checked."""
        before = [self._hosts.traffic(host) for host in range(len(self._hosts.addresses))]
        seconds = self._ask([("run", contestant, collective, size, operations)] * len(self._members))
        traffic = [self._hosts.traffic(host) - known for host, known in enumerate(before)]
        sent = tuple(each.sent_payload / (operations + 1) for each in traffic)
        return Turn(max(seconds) / operations, sent)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, connection in self._members:
            process.kill()
            process.join()
            connection.close()

    def _ask(self, questions: Sequence[tuple[object, ...]]) -> list[float]:
        for (_, connection), question in zip(self._members, questions, strict=True):
            connection.send(question)
        deadline = time.monotonic() + _TIMEOUT
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._members)}
        answers = [0.0] * len(self._members)
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(min(waiting.values()), f"no answer within {_TIMEOUT:.0f} s")
            for answering in ready:
                assert isinstance(answering, Connection)
                rank = waiting.pop(answering)
                try:
                    answer = answering.recv()
                except EOFError:
                    raise WorkerError(rank, "its process died") from None
                if isinstance(answer, str):
                    raise WorkerError(rank, answer)
                answers[rank] = answer
        return answers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--networks", default=_NETWORKS, help=f"default {_NETWORKS}")
    parser.add_argument("--collectives", default="all_reduce", help="default all_reduce")
    parser.add_argument("--sizes", default="64MiB", help="of a collective's whole buffer; default 64MiB")
    parser.add_argument(
        "--algorithms",
        default="ring,in-network",
        help="of Shoal, beside what it chooses itself; default ring,in-network",
    )
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    options = parser.parse_args(arguments)
    collectives, sizes = options.collectives.split(","), parse_sizes(options.sizes)
    try:
        print(describe(), end="\n\n")
        for text in options.networks.split(","):
            _measure(Network.parse(text), collectives, sizes, _named(options.algorithms), options.rounds)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _named(algorithms: str) -> list[str]:
    return [name for name in algorithms.split(",") if name]


def _measure(
    network: Network, collectives: Sequence[str], sizes: Sequence[int], algorithms: Sequence[str], rounds: int
) -> None:
    """Measures and prints one network's table."""
    contestants: dict[str, Options | None] = {"gloo": None, "shoal": Options()}
    aggregator = f"{Hosts.switch_address}:{_AGGREGATOR_PORT}"
    for collective in collectives:
        for name in algorithms:
            forced = {collective: name}
            contestants[f"shoal {name}"] = (
                Options(algorithms=forced, aggregator=aggregator)
                if name == _IN_NETWORK
                else Options(algorithms=forced)
            )
    payload_rate = Hosts.payload_rate(network.rate)
    with (
        Hosts(network.hosts, network.rate) as hosts,
        _aggregating(hosts, aggregator),
        Ranks(hosts, network, contestants) as ranks,
    ):
        streams = [ranks.stream_rate()]
        lines = []
        for collective in collectives:
            for size in sizes:
                turns = _rounds(ranks, list(contestants), collective, size, rounds)
                streams.append(ranks.stream_rate())
                lines += [_line(network, collective, size, name, turns) for name in contestants]
    print(f"### {network}\n")
    print(
        f"Payload at the nominal rate: {payload_rate / 1e6:.1f} MB/s each way; "
        f"plain TCP streams round the hosts: {median(streams) / 1e6:.1f} "
        f"({min(streams) / 1e6:.1f} to {max(streams) / 1e6:.1f}) MB/s.\n"
    )
    print(_markdown(_HEADER, lines), end="\n\n", flush=True)


@contextmanager
def _aggregating(hosts: Hosts, address: str) -> Iterator[None]:
    """An aggregator in the switch, for as long as the context lasts."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_aggregate, args=(hosts.switch, address), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _aggregate(switch: int, address: str) -> None:
    enter_host(switch)
    with Aggregator(address) as aggregator:
        aggregator.serve()


def _rounds(
    ranks: Ranks, contestants: Sequence[str], collective: str, size: int, rounds: int
) -> dict[str, list[Turn]]:
    operations = {}
    for name in contestants:
        seconds = ranks.run(name, collective, size, _FEWEST).seconds
        operations[name] = max(_FEWEST, round(_TURN_SECONDS / seconds))
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for index in range(rounds):
        for name in reversed(contestants) if index % 2 else contestants:
            turns[name].append(ranks.run(name, collective, size, operations[name]))
    return turns


_HEADER = [
    "collective",
    "size",
    "",
    "ms (range)",
    "predicted ms",
    "algbw",
    "busbw, MB/s",
    "of the bound",
    "gloo's time over it",
]
_HEADER += ["sent by the busiest host, bytes", "over the formula"]


def _line(
    network: Network, collective: str, size: int, name: str, turns: Mapping[str, Sequence[Turn]]
) -> list[str]:
    seconds = [turn.seconds for turn in turns[name]]
    middle = median(seconds)
    needed = network.bytes_across(collective, size, is_aggregated=name.endswith(_IN_NETWORK))
    bound = needed / Hosts.payload_rate(network.rate)
    sent = median(max(turn.sent) for turn in turns[name])
    gloo = median(
        theirs.seconds / own.seconds for theirs, own in zip(turns["gloo"], turns[name], strict=True)
    )
    return [
        collective,
        format_bytes(size),
        name,
        f"{middle * 1e3:.4g} ({min(seconds) * 1e3:.4g} to {max(seconds) * 1e3:.4g})",
        f"{network.predicted_seconds(collective, size, name) * 1e3:.4g}",
        f"{size / middle / 1e6:.4g}",
        f"{size / middle / 1e6 * COLLECTIVES[collective].bus_factor(network.ranks):.4g}",
        f"{bound / middle:.3f}",
        f"{gloo:.2f}",
        f"{sent:.0f}",
        f"{sent / needed:.4f}",
    ]


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * 3 + ["---:"] * (len(header) - 3)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


# --- in the processes of the ranks ---


def _serve(
    connection: Connection,
    rank: int,
    ranks: int,
    place: tuple[int, str],
    contestants: Mapping[str, Options | None],
) -> None:
    """Answers until the pipe ends. `place`: the host's process, and the first host's address."""
    process, first_address = place
    enter_host(process)
    os.environ |= {"GLOO_SOCKET_IFNAME": Hosts.interface, "MASTER_ADDR": first_address}
    torch.set_num_threads(1)
    try:
        store = TCPStore(first_address, _STORE_PORT, ranks, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        groups = {
            name: dist.new_group(backend="gloo" if options is None else "shoal", pg_options=options)
            for name, options in contestants.items()
        }
        while True:
            match connection.recv():
                case ("ready",):
                    connection.send(0.0)
                case ("stream", own, following):
                    connection.send(_stream(own, following))
                case ("run", name, collective, size, operations):
                    connection.send(_run(groups[name], collective, size, operations))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")


def _run(group: dist.ProcessGroup, name: str, size: int, operations: int) -> float:
    """Seconds of some operations in a row."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    collective = COLLECTIVES[name]
    lengths = {"none": 0, "part": size // 4 // ranks, "whole": size // 4 // ranks * ranks}
    output = torch.full((lengths[collective.output.value],), 1.0)
    given = torch.full((lengths[collective.input.value],), 1.0)
    buffers = Buffers(given if given.numel() else output, output)
    operation = TorchGroup("", group).operation(collective, buffers, "sum")
    operation()
    expected = ranks if collective.reduces and (rank == 0 or name != "reduce") else 1
    if not bool((output == expected).all()) and (rank == 0 or name not in ("reduce", "gather")):
        raise WorkerError(rank, f"{name} gave a wrong result")
    output.fill_(0.0)  # sums of which stay finite
    start = time.perf_counter()
    for _ in range(operations):
        operation()
    return time.perf_counter() - start


def _stream(own: str, following: str) -> float:
    """Bytes a second that come in, while as much as can be goes out to the following host."""
    with socket.create_server((own, _STREAM_PORT)) as listener:
        after = _call(following)
        before, _ = listener.accept()
    end = time.monotonic() + _STREAM_SECONDS
    piece, taken = bytes(1 << 20), bytearray(1 << 20)

    def send() -> None:
        while time.monotonic() < end:
            after.sendall(piece)
        after.shutdown(socket.SHUT_WR)

    with before, after:
        sender = threading.Thread(target=send)
        start = time.perf_counter()
        sender.start()
        received = 0
        while count := before.recv_into(taken):
            received += count
        seconds = time.perf_counter() - start
        sender.join()
    return received / seconds


def _call(address: str) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, _STREAM_PORT))
        except ConnectionRefusedError:
            time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
