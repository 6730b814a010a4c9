"""Tokens a second and bytes of a step over slow links, beside what the cost model says of both.

The Cluster of the prediction is measured in the same run: the probe of this machine gives the device; alpha
and beta of the links are those of a small and a large all-reduce, which have a turn in every round; and
all rates of the device are multiplied by one factor, so that a step of workers that do not exchange takes as
long as the steps of such workers just before and after the turn that is predicted: what else runs on the
machine changes from minute to minute. No method takes part in its own prediction.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch.distributed as dist
from rounds import Spread
from slow_links_hosts import Turn, Workers
from slow_links_methods import (
    ALONE,
    DENSE,
    MODEL,
    NEVER,
    SEQUENCES,
    Method,
    methods,
    plan_of,
    why_absent,
)

from shoal.cli.report import sent_bytes
from shoal.machine.bench import describe
from shoal.machine.bench.settings import Ranks
from shoal.machine.probe import QUICK, Place, fitted, measure_device, read_sheet
from shoal.predict.cost import Costs
from shoal.predict.cost.collectives import collective_seconds
from shoal.predict.cost.outlook.observation import with_all_rates
from shoal.predict.cost.time import workload_on
from shoal.predict.cost.time.buckets import SUM_WIDTH, Wire, compressed_sums, low_rank_share, payload_bytes
from shoal.predict.simulate import played_seconds
from shoal.spec.cluster import Cluster, Level
from shoal.spec.plan import Group
from shoal.spec.workload import Workload, transformer_shape
from shoal.testing.hosts import Hosts
from shoal.testing.ranks import RankPool

__all__ = ["NETWORKS", "formula_bytes", "measure_speed", "predicted_seconds", "with_compute"]

NETWORKS = "4@0.1"
_TURN_SECONDS = 1.0
_PROBE_TIMEOUT = 400.0  # seconds
_PACES = 6  # steps of workers that do not exchange, around each turn
_SMALL, _SMALLS, _LARGE = 256, 20, 8 << 20  # bytes of all-reduces that tell alpha and beta; turns of small
_LAPTOP = Cluster.preset("laptop")
_HALVINGS = 20  # of the search for the rate of compute
_START = time.perf_counter()


@dataclass(slots=True)
class _Row:
    """What is known of a method on one network.

    Attributes:
        method: The method.
        steps: Steps in a turn.
        turns: Its turns.
        alone: Seconds of a step of workers that do not exchange, around each turn.
        predicted: Seconds of a step that are predicted for each turn; empty for peers.
    """

    method: Method
    steps: int = 0
    turns: list[Turn] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Steps a second, by round."""
        return [1 / turn.seconds for turn in self.turns]

    def predict(self, probed: Cluster, workers: int) -> None:
        """Predict each turn, with the pace that compute had around it."""
        if self.method.exchange is not None:
            self.predicted = [
                predicted_seconds(self.method.exchange, workers, with_compute(probed, workers, seconds))
                for seconds in self.alone
            ]


def measure_speed(networks: Sequence[str], only: Sequence[str], rounds: int, out: Path | None) -> None:
    """Measure every method on every network, and print a table of each."""
    print(describe(), end="\n\n")
    absent = why_absent("torchft")
    if absent:
        print(f"Left out: torchft's DiLoCo ({absent}).\n")
    chosen = [
        each
        for each in methods(torchft=not absent)
        if each.name in (ALONE, DENSE) or any(text in each.name for text in only)
    ]
    _say("probing")
    probed = _probed(max(int(text.partition("@")[0]) for text in networks))
    found: dict[str, object] = {}
    for text in networks:
        workers, rate = int(text.partition("@")[0]), float(text.partition("@")[2]) * 1e9
        servers = max(each.servers for each in chosen)
        with Hosts(workers + servers, rate) as hosts, Workers(hosts, workers, chosen) as ranks:
            rows, link = _measured(ranks, chosen, rounds)
        level = link.level(workers)
        for row in rows:
            row.predict(probed.replace(levels=(level,)), workers)
        print(f"### {workers} workers, {rate / 1e9:g} Gbit/s\n")
        print(f"{level.bandwidth / 1e6:.1f} MB/s, {level.latency * 1e6:.0f} us a step.\n")
        loads = [turn.load for row in rows for turn in row.turns]
        print(f"Load average {min(loads):.1f} to {max(loads):.1f}, median {median(loads):.1f}.\n")
        print(_table(rows, workers), end="\n\n", flush=True)
        found[text] = {row.method.name: _figures(row, workers) for row in rows}
        if out is not None:
            out.write_text(json.dumps(found, indent=1), encoding="utf-8")


def predicted_seconds(exchange: str, workers: int, cluster: Cluster) -> float:
    """Return the seconds of a step on a Cluster."""
    batch = SEQUENCES * workers
    return played_seconds(Costs(_workload(cluster), cluster), plan_of(exchange, workers), batch)


def formula_bytes(exchange: str, workers: int) -> float:
    """Return the bytes that the busiest host sends in a mean step, by the cost model's formulas.

    With servers that is a server, if it has more workers than each worker has servers.
    """
    cluster = _LAPTOP.with_devices(workers)
    plan, workload = plan_of(exchange, workers), _workload(cluster)
    group, elements = Group(workers), float(workload.parameters)
    settings = plan.exchanged
    if settings.is_served:
        busiest = max(1.0, workers / settings.processes)
        steps = settings.every if settings.merges else 1
        return busiest * payload_bytes(settings.compression, elements) / steps
    if settings.merges and settings.compresses:
        share = low_rank_share(settings.compression, workload)
        sums = compressed_sums(elements, settings.compression, share, group, cluster)
        sent = [(each.operation, each.nbytes / settings.every) for each in sums]
    elif settings.merges:
        sent = [("all_reduce", SUM_WIDTH * elements / settings.every)]
    else:
        found = Wire.of(plan, workload).sums(elements, Group(1), group, cluster)
        sent = [(each.operation, each.nbytes) for each in found]
    return sum(sent_bytes(name, nbytes, workers) for name, nbytes in sent)


def _workload(cluster: Cluster) -> Workload:
    return workload_on(cluster, transformer_shape(MODEL.model_dump(), "slow-links"))


@dataclass(slots=True)
class _Link:
    """Seconds of an all-reduce of few and of many bytes, by round."""

    small: list[float] = field(default_factory=list)
    large: list[float] = field(default_factory=list)

    def measure(self, ranks: Workers) -> None:
        """Measure a round."""
        self.small.append(ranks.link(_SMALL, _SMALLS))
        self.large.append(ranks.link(_LARGE, 1))

    def level(self, workers: int) -> Level:
        """Return links with the alpha and the beta at which the cost model gives these seconds."""
        group = Group(workers)
        rate = 2 * (workers - 1) / workers * _LARGE / (median(self.large) - median(self.small))
        links = Level(name="network", devices=workers, bandwidth=rate, share=1.0, latency=1e-3)
        steps = collective_seconds("all_reduce", 1.0, group, _LAPTOP.replace(levels=(links,)))
        return replace(links, latency=1e-3 * median(self.small) / steps)


def _probed(workers: int) -> Cluster:
    """Return what the probe finds of this machine without links, with as many ranks."""
    with RankPool() as pool:
        return pool.run(_probe, workers, workers, timeout=_PROBE_TIMEOUT)[0]


def _probe(workers: int) -> Cluster:
    """Probe as one of the ranks."""
    rank = dist.get_rank()
    place = Place.find(Ranks(rank, workers, rank), "shoal")
    measured = measure_device(place, QUICK, lambda _: None)
    return fitted(measured, read_sheet(place), "slow-links").cluster


def with_compute(cluster: Cluster, workers: int, seconds: float) -> Cluster:
    """Return the Cluster with all rates of its devices by one factor: a step alone takes these seconds."""
    low, high = 1e-3, 1e3
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        is_slow = predicted_seconds(NEVER, workers, with_all_rates(cluster, middle)) > seconds
        low, high = (middle, high) if is_slow else (low, middle)
    return with_all_rates(cluster, math.sqrt(low * high))


def _measured(ranks: Workers, chosen: Sequence[Method], rounds: int) -> tuple[list[_Row], _Link]:
    rows, link = [_Row(method) for method in chosen], _Link()
    for index, row in enumerate(rows):
        _say(f"building {row.method.name}")
        ranks.build(index)
        whole = row.method.round
        ranks.run(index, whole if whole > 1 else 2)
        took = ranks.run(index, whole).seconds * whole
        row.steps = whole * max(1 if whole > 1 else 2, round(_TURN_SECONDS / took))
    for number in range(rounds):
        _say(f"round {number + 1} of {rounds}")
        numbered = list(enumerate(rows))
        link.measure(ranks)
        before = ranks.run(0, _PACES).seconds
        for index, row in reversed(numbered) if number % 2 else numbered:
            row.turns.append(ranks.run(index, row.steps))
            after = ranks.run(0, _PACES).seconds
            row.alone.append((before + after) / 2)
            before = after
    return rows, link


_HEADER = ["method", "tokens/s (range)", "over dense", "sent in a step, bytes", "by the formula", "fewer"]
_HEADER += ["predicted, tokens/s", "error"]


def _table(rows: Sequence[_Row], workers: int) -> str:
    dense = next(row for row in rows if row.method.name == DENSE)
    lines = [_HEADER, ["---"] * 2 + ["---:"] * (len(_HEADER) - 2)]
    lines += [_line(row, dense, workers) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(row: _Row, dense: _Row, workers: int) -> list[str]:
    tokens = SEQUENCES * MODEL.seq * workers
    rate = Spread.of([tokens * each for each in row.rates])
    over = median(own / other for own, other in zip(row.rates, dense.rates, strict=True))
    sent, dense_sent = (median(turn.sent for turn in each.turns) for each in (row, dense))
    exchange, is_known = row.method.exchange, row.method.exchange is not None
    formula = (
        "" if not is_known or row.method.name == ALONE else f"{formula_bytes(exchange or '', workers):,.0f}"
    )
    return [
        row.method.name if not is_known else f"`{row.method.name}`",
        f"{rate.median:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})",
        f"{over:.2f}",
        f"{sent:,.0f}",
        formula,
        f"{dense_sent / sent:,.1f}" if sent > 1000 else "",
        f"{median(tokens / each for each in row.predicted):,.0f}" if is_known else "",
        f"{_error(row):+.1%}" if is_known else "",
    ]


def _error(row: _Row) -> float:
    """Return the error of the predicted tokens a second: the median over the rounds."""
    pairs = zip(row.predicted, row.turns, strict=True)
    return median(turn.seconds / predicted for predicted, turn in pairs) - 1


def _figures(row: _Row, workers: int) -> Mapping[str, object]:
    return {
        "tokens a second": [SEQUENCES * MODEL.seq * workers * each for each in row.rates],
        "bytes sent": [turn.sent for turn in row.turns],
        "load": [turn.load for turn in row.turns],
        "steps": row.steps,
        "predicted seconds": row.predicted,
        "seconds alone": row.alone,
    }


def _say(text: str) -> None:
    print(f"{time.perf_counter() - _START:.0f} s: {text}", file=sys.stderr, flush=True)
