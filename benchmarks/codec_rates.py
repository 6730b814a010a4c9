"""Codecs of compressed exchange: the memory traffic of each, beside plain loops and torch's operators.

    python benchmarks/codec_rates.py [--write benchmarks/codec_rates.md] [--rounds 7] [--mib 128]
                                     [--cores 1,2] [--only topk:64,sign] [--unit avx2]
                                     [--beside OTHER/_core.so] [--peers 1]

A rate is the bytes that the work must read and write at least, over the seconds of its thread on a core:

    encode                       4 n read, the payload written
    encode, feedback             4 n read, 4 n of what is left out and the payload written
    decode                       the payload read, 4 n written
    decode_add                   the payload read, 4 n read and written; of kinds that send few elements
                                 instead 64 bytes read and written for each cache line with a sent element

Vectors, of n normally distributed fp32 numbers, are far larger than caches. With several cores each has a
thread with vectors of its own, and rates are summed. In a round each kind of work has its turn next to the
plain loop with which it is compared, and shares are taken round by round: of a copy (torch's `copy_`, 8 n
bytes), and of the loop of torch with the same mix of reads and writes, as named in the table. The time of a
thread on a core leaves out what other processes take, but not what they take of the memory's bandwidth.
`--beside` measures another build of the native core in the same rounds. `--peers` is the number of rounds in
which torch's operators encode and decode into the same bytes; they take long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier

import torch
from rounds import Spread
from torch import Tensor

from shoal.collectives.codecs import codec_of, native, with_torch
from shoal.collectives.ctypes_core import Core, load_core
from shoal.machine.bench import describe
from shoal.spec.plan import Compression

KINDS = ["int8", "int4", "fp8", "sign", "topk:64", "topk:64:2bit", "random:64", "threshold:3"]
_LINE = 64  # bytes
_SEED = 5

Run = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """Something to measure on one core, and the same by torch's operators if there is such."""

    name: str
    bytes: int
    run: Run
    plain: str
    other: Run | None = None
    peer: Run | None = None


@dataclass
class Found:
    """What the rounds gave: bytes a second, shares of other rates, and times as long as others take."""

    rates: list[float] = field(default_factory=list)
    of_copy: list[float] = field(default_factory=list)
    of_plain: list[float] = field(default_factory=list)
    of_other: list[float] = field(default_factory=list)
    of_peer: list[float] = field(default_factory=list)


class Vectors:
    """The vectors of one core."""

    def __init__(self, elements: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.values = torch.randn(elements, generator=generator)
        self.left, self.out = torch.zeros(elements), torch.zeros(elements)
        self.payload = torch.zeros(0, dtype=torch.uint8)

    def plain(self) -> dict[str, Work]:
        """Return torch's loops over memory, by what they do."""
        n = self.values.numel()
        loops: list[tuple[str, int, Run]] = [
            ("copy", 8 * n, lambda: self.out.copy_(self.values)),
            ("triad", 12 * n, lambda: torch.add(self.values, self.left, alpha=3.0, out=self.out)),
            ("read", 4 * n, self.values.sum),
            ("fill", 4 * n, self.out.zero_),
            ("in place", 8 * n, lambda: self.out.mul_(0.5)),
        ]
        return {name: Work(name, nbytes, run, name) for name, nbytes, run in loops}

    def works(self, core: Core, other: Core | None, compression: Compression, peers: bool) -> Iterator[Work]:
        """Yield the ways in which the exchange calls a codec."""
        n, values, left, out = self.values.numel(), self.values, self.left, self.out
        self.payload = payload = torch.zeros(codec_of(compression).payload(n), dtype=torch.uint8)
        written = native.encode(core, compression, values, payload, _SEED, None)
        native.decode(core, compression, payload[:written], out, _SEED)
        added = 8 * n if compression.is_quantised else 2 * touched(out)
        peer_payload = torch.zeros_like(payload) if peers else payload

        def encode(residual: Tensor | None) -> Callable[[Core], object]:
            return lambda core: native.encode(core, compression, values, payload, _SEED, residual)

        def work(name: str, nbytes: int, plain: str, run: Callable[[Core], object], peer: Run) -> Work:
            return Work(
                name,
                nbytes + written,
                lambda: run(core),
                plain,
                None if other is None else lambda: run(other),
                peer if peers else None,
            )

        def torch_encode(residual: Tensor | None) -> Run:
            return lambda: with_torch.encode(compression, values, peer_payload, _SEED, residual)

        yield work("encode", 4 * n, "read", encode(None), torch_encode(None))
        yield work("encode, feedback", 8 * n, "copy", encode(left), torch_encode(left))
        yield work(
            "decode",
            4 * n,
            "fill",
            lambda core: native.decode(core, compression, payload[:written], out, _SEED),
            lambda: with_torch.decode(compression, payload[:written], out, _SEED),
        )
        yield work(
            "decode_add",
            added,
            "in place",
            lambda core: native.add_decoded(core, compression, payload[:written], out, 0.5, _SEED),
            lambda: with_torch.add_decoded(compression, payload[:written], out, 0.5, _SEED),
        )


def touched(decoded: Tensor) -> int:
    """Return the bytes of the cache lines that have an element other than 0."""
    lines = decoded[: decoded.numel() // 16 * 16].view(-1, _LINE // 4)
    return _LINE * int((lines != 0).any(1).sum())


class Cores:
    """Runs one piece of work on each of some cores at once, in a thread each."""

    def __init__(self, count: int) -> None:
        self._barrier = Barrier(count)
        self._pool = ThreadPoolExecutor(count)

    def rate(self, nbytes: Sequence[int], runs: Sequence[Run]) -> float:
        """Return the sum of the cores' bytes a second."""
        return sum(self._pool.map(self._rate, nbytes, runs))

    def _rate(self, nbytes: int, run: Run) -> float:
        torch.set_num_threads(1)
        self._barrier.wait()
        began = time.thread_time()
        run()
        return nbytes / (time.thread_time() - began)


def measure(
    cores: Cores, works: Sequence[Work], plain: Sequence[dict[str, Work]], found: Found, peers: bool
) -> None:
    """Measure one round of one piece of work, given once for each core."""
    nbytes = [each.bytes for each in works]

    def rate_of(loop: str) -> float:
        return cores.rate([each[loop].bytes for each in plain], [each[loop].run for each in plain])

    loop = works[0].plain
    copy, like = rate_of("copy"), rate_of(loop)
    rate = cores.rate(nbytes, [each.run for each in works])
    found.rates.append(rate)
    found.of_copy.append(rate / copy)
    found.of_plain.append(rate / (copy if loop == "copy" else like))
    if works[0].other is not None:
        found.of_other.append(rate / cores.rate(nbytes, [each.other for each in works if each.other]))
    if peers and works[0].peer is not None:
        found.of_peer.append(rate / cores.rate(nbytes, [each.peer for each in works if each.peer]))


def measure_all(options: argparse.Namespace, core: Core, count: int) -> tuple[dict[str, Found], ...]:
    """Return the rates of the plain loops, and those of all work, on so many cores."""
    elements = options.mib * (1 << 20) // 4
    vectors = [Vectors(elements, seed) for seed in range(count)]
    plain = [each.plain() for each in vectors]
    other = None if options.beside is None else Core(options.beside)
    cores = Cores(count)
    loops = {name: Found() for name in plain[0]}
    for _ in range(options.rounds):
        for name, found in loops.items():
            works = [each[name] for each in plain]
            found.rates.append(cores.rate([each.bytes for each in works], [each.run for each in works]))
    results: dict[str, Found] = {}
    for text in options.only or KINDS:
        print(f"{text}, {count} cores", file=sys.stderr)
        each_core = [
            list(each.works(core, other, Compression.parse(text), options.peers > 0)) for each in vectors
        ]
        for number in range(options.rounds + 1):
            for works in zip(*each_core, strict=True):
                found = results.setdefault(f"{text} | {works[0].name} | {works[0].plain}", Found())
                measured = found if number > 0 else Found()  # the first round is for pages and caches
                measure(cores, works, plain, measured, count == 1 and 0 < number <= options.peers)
    return loops, results


def cell(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """Return a median with its range."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0] * scale:.{digits}f}"
    spread = Spread.of([each * scale for each in values])
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def table(loops: dict[str, Found], results: dict[str, Found]) -> Iterator[str]:
    """Yield the lines of the tables for some number of cores."""
    yield "| plain loop of torch | GB/s |"
    yield "| --- | --- |"
    for name, found in loops.items():
        yield f"| {name} | {cell(found.rates, 1, 1e-9)} |"
    beside = any(found.of_other for found in results.values())
    peers = any(found.of_peer for found in results.values())
    yield ""
    yield (
        "| kind | work | loop like it | GB/s | of a copy | of the loop |"
        + " times the other build |" * beside
        + " times torch's operators |" * peers
    )
    yield "| --- | --- | --- | --- | --- | --- |" + " --- |" * (beside + peers)
    for name, found in results.items():
        cells = [cell(found.rates, 1, 1e-9), cell(found.of_copy, 2), cell(found.of_plain, 2)]
        cells += [cell(found.of_other, 2)] * beside + [cell(found.of_peer, 0)] * peers
        yield f"| {name} | {' | '.join(cells)} |"


def page(options: argparse.Namespace, core: Core) -> Iterator[str]:
    """Yield the lines of the page."""
    machine = describe()
    yield "# Codecs\n"
    yield (
        f"Written by `benchmarks/codec_rates.py --rounds {options.rounds} --mib {options.mib}`, which says "
        f"what is counted: GB/s of memory traffic, median and range of {options.rounds} interleaved rounds, "
        f"of vectors of {options.mib} MiB. The goal is 0.7 of a copy.\n"
    )
    yield f"{machine}\n".replace("\n", "  \n") + f"vector unit {core.vector_unit().decode()}"
    for count in options.cores:
        yield f"\n## {count} core{'s' * (count > 1)}\n"
        yield from table(*measure_all(options, core, count))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument("--mib", type=int, default=128, help="MiB of a vector, default 128")
    parser.add_argument("--cores", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2])
    parser.add_argument("--only", type=lambda text: text.split(","), help="kinds, default all")
    parser.add_argument("--unit", help="a vector unit instead of the widest, such as avx2")
    parser.add_argument("--beside", type=Path, help="another build of the core")
    parser.add_argument("--peers", type=int, default=1, help="rounds with torch's operators, default 1")
    parser.add_argument("--write", type=Path, help="file for the page")
    options = parser.parse_args(arguments)
    core = load_core()
    if core is None:
        print("error: the native core was not built", file=sys.stderr)
        return 2
    if options.unit and not core.force_vector_unit(options.unit.encode()):
        print(f"error: this processor has no vector unit {options.unit}", file=sys.stderr)
        return 2
    lines = list(page(options, core))
    print("\n".join(lines))
    if options.write is not None:
        options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
