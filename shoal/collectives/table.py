"""The cost of each algorithm on this machine, and the choice of the one with the least predicted time.

The time of every algorithm is a straight line over the size of the buffer, so the best for each size is on
the lower envelope of a few lines. The envelope is computed once per kind of call; then a choice is a
bisection.

The table of algorithms as a TOML file, which comes with Shoal or was written by a calibration.

[all_reduce.shared-memory]
one-shot = { alpha = 5e-07, beta = 2.5e-10 }
"""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ConfigError, nearest
from shoal.predict.cost import LEVELS, Algorithm, AlphaBeta, algorithms_of, find_algorithm

_TURN_SECONDS = 20e-6
"""Seconds that a step takes longer for each rank that shares a core, until all of them have run. Measured
with 4 and 8 ranks on two virtual cores (docs/log.md, 2026-11-22)."""


class Call(NamedTuple):
    """One kind of call, whatever the size of its buffer.

    Attributes:
        collective: Name of the collective, such as "all_reduce".
        level: "shared-memory" or "network".
        ranks: Number of ranks in the group.
        hosts: Number of hosts that they are on, with equally many ranks on each.
        widening: Bytes in which partial sums travel, over those of the tensor: 2 for sums of 16-bit floats.
        turns: Number of ranks that share a core, in shared memory: 1 if each has a core of its own.
        aggregated: Whether an aggregator stands between the hosts, for the algorithm in-network.
    """

    collective: str
    level: str
    ranks: int
    hosts: int = 1
    widening: int = 1
    turns: int = 1
    aggregated: bool = False

    @property
    def waiting(self) -> float:
        """Seconds in which a step waits for ranks that have no core."""
        return _TURN_SECONDS * self.turns if self.turns > 1 else 0.0

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks that share a network interface. Over the loopback of one host each has its own."""
        shares = self.level == "network" and self.hosts > 1
        return -(-self.ranks // self.hosts) if shares else 1


class Choices(NamedTuple):
    """The best algorithm for each size of one kind of call.

    Attributes:
        bounds: Sizes in bytes, ascending: from each size on, the next name is the best.
        names: Names of algorithms, one more than bounds.
    """

    bounds: tuple[float, ...]
    names: tuple[str, ...]

    def choose(self, nbytes: int) -> str:
        """Return the best algorithm for a buffer of S bytes."""
        return self.names[bisect_right(self.bounds, nbytes)]


class _Line(NamedTuple):
    """Seconds of an algorithm over the bytes of the buffer."""

    name: str
    at_zero: float
    per_byte: float

    def at(self, nbytes: float) -> float:
        return self.at_zero + self.per_byte * nbytes


@dataclass(frozen=True)
class Table:
    """Alpha and beta by (collective, algorithm, level); algorithms without an entry are never chosen.

    In shared memory the values hold for ranks that have a core each. Between hosts, beta is that of a host's
    whole network interface.
    """

    entries: Mapping[tuple[str, str, str], AlphaBeta]
    _choices: dict[Call, Choices] = field(default_factory=dict, init=False, repr=False, compare=False)

    def choose(
        self, collective: str, level: str, ranks: int, hosts: int, nbytes: int, widening: int = 1
    ) -> str:
        """Return the algorithm with the least predicted time for a buffer of `nbytes` bytes.

        The other arguments are those of `Call`.

        Raises:
            ConfigError: The table has no algorithm for this call.
        """
        return self.choices(Call(collective, level, ranks, hosts, widening)).choose(nbytes)

    def choices(self, call: Call) -> Choices:
        """Return the best algorithm for each size; a group calls this once and keeps the result.

        Raises:
            ConfigError: The table has no algorithm for this call.
        """
        if call not in self._choices:
            self._choices[call] = _lower_envelope([self._line(name, call) for name in self.candidates(call)])
        return self._choices[call]

    def candidates(self, call: Call) -> tuple[str, ...]:
        """Return the algorithms that the table has for a call.

        They include hierarchical if there are several hosts with several ranks each, and in-network if an
        aggregator stands between several hosts.

        Raises:
            ConfigError: The table has no algorithm for this call.
        """
        levelled = 1 < call.hosts < call.ranks and call.ranks % call.hosts == 0
        aggregated = call.aggregated and call.hosts > 1
        names = tuple(
            each.name
            for each in algorithms_of(call.collective, call.level)
            if (each.collective, each.name, each.level) in self.entries
            and (aggregated if each.aggregated else levelled or not each.inside)
        )
        if not names:
            known = sorted({f"{collective} on {level}" for collective, _, level in self.entries})
            raise ConfigError(
                f"the table of algorithms has no algorithm for {call.collective} on {call.level}",
                possible=", ".join(known),
                change=f"add a section [{call.collective}.{call.level}] to the table",
            )
        return names

    def predict(self, name: str, call: Call, nbytes: int) -> float:
        """Return the seconds that an algorithm takes for a buffer of `nbytes` bytes.

        Raises:
            ConfigError: There is no such algorithm, or the table does not have it.
        """
        return self._line(name, call).at(nbytes)

    def predict_inside(self, name: str, call: Call, nbytes: int) -> float:
        """Return the seconds of an algorithm's collectives inside the hosts, before and after.

        Raises:
            ConfigError: There is no such algorithm, or the table does not have that part of it.
        """
        algorithm = find_algorithm(call.collective, name, call.level)
        return sum(line.at(nbytes) for line in self._lines_inside(algorithm, call))

    def _line(self, name: str, call: Call) -> _Line:
        algorithm = find_algorithm(call.collective, name, call.level)
        cost = self._cost(call.collective, name, call.level)
        sharing = call.ranks_per_host
        carried = call.widening if algorithm.forwards_sums else 1
        inside = self._lines_inside(algorithm, call)
        return _Line(
            name,
            at_zero=(cost.alpha + call.waiting) * algorithm.steps(call.ranks, sharing)
            + sum(line.at_zero for line in inside),
            per_byte=cost.beta * call.turns * algorithm.bytes_on_path(call.ranks, carried, sharing)
            + sum(line.per_byte for line in inside),
        )

    def _lines_inside(self, algorithm: Algorithm, call: Call) -> list[_Line]:
        return [
            self._line(name, Call(collective, LEVELS[0], call.ranks_per_host))
            for collective, name in algorithm.inside
        ]

    def _cost(self, collective: str, name: str, level: str) -> AlphaBeta:
        if (collective, name, level) not in self.entries:
            known = [each for one, each, on in self.entries if (one, on) == (collective, level)]
            raise ConfigError(
                f"the table of algorithms has no alpha and beta for {name} of {collective} on {level}",
                possible=", ".join(known) or "none: it has nothing there",
                change=f"add {name} to the section [{collective}.{level}] of the table",
            )
        return self.entries[collective, name, level]


def _lower_envelope(lines: Sequence[_Line]) -> Choices:
    """Return the lowest line for each size from 0 on.

    Start with the line that is lowest at 0. The next line is the one that crosses it first; if several cross
    it there, the least steep one, which stays lowest.
    """
    best = min(lines, key=lambda line: (line.at_zero, line.per_byte))
    bounds: list[float] = []
    names = [best.name]
    while flatter := [line for line in lines if line.per_byte < best.per_byte]:
        crossing = {line: _crossing(best, line) for line in flatter}
        best = min(flatter, key=lambda line: (crossing[line], line.per_byte))
        bounds.append(crossing[best])
        names.append(best.name)
    return Choices(tuple(bounds), tuple(names))


def _crossing(low: _Line, flat: _Line) -> float:
    """Return the size from which `flat` is lower, which is higher at 0 and less steep."""
    return (flat.at_zero - low.at_zero) / (low.per_byte - flat.per_byte)


def built_in_table() -> Table:
    """Return values that hold roughly on most machines, to use before this machine is measured."""
    text = resources.files("shoal.collectives").joinpath("table.toml").read_text(encoding="utf-8")
    return _parse(text, "table.toml")


def load_table(file: Path) -> Table:
    """Return the table in a file; built-in values replace what the file leaves out.

    Raises:
        ConfigError: The file cannot be read, or a name or a value in it is wrong.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the table of algorithms {file} cannot be read: {error}",
            possible="a TOML file, such as `shoal bench --calibrate FILE` writes",
            change="correct the path",
        ) from None
    return Table({**built_in_table().entries, **_parse(text, str(file)).entries})


def save_table(table: Table, file: Path, heading: str) -> None:
    """Write a table in the form that `load_table` reads.

    Args:
        table: The table to write.
        file: The path to write to; a file there is replaced.
        heading: A comment for the file, which says what was measured and where.
    """
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    section = None
    for (collective, name, level), cost in sorted(
        table.entries.items(), key=lambda entry: (entry[0][0], entry[0][2], entry[0][1])
    ):
        if section != (collective, level):
            section = (collective, level)
            lines += ["", f"[{collective}.{level}]"]
        lines.append(f"{name} = {{ alpha = {cost.alpha!r}, beta = {cost.beta!r} }}")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _parse(text: str, source: str) -> Table:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"the table of algorithms {source} is not TOML: {error}",
            possible="sections as [all_reduce.network], with lines as ring = { alpha = 2e-5, beta = 1e-9 }",
            change="correct that line",
        ) from None
    entries = {}
    for collective, levels in _items(content, source):
        for level, algorithms in _items(levels, f"{source}, {collective}"):
            for name, values in _items(algorithms, f"{source}, {collective}.{level}"):
                find_algorithm(collective, name, level)
                where = f"{source}, {collective}.{level}.{name}"
                entries[collective, name, level] = _cost(dict(_items(values, where)), where)
    return Table(entries)


def _items(value: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{value!r} in {where} is not a section",
            possible="[collective.level] with lines algorithm = { alpha = seconds, beta = seconds per byte }",
            change="put an alpha and a beta there",
        )
    return list(value.items())


def _cost(values: dict[str, Any], where: str) -> AlphaBeta:
    for key in values:
        if key not in AlphaBeta._fields:
            raise ConfigError(
                f"{key!r} in {where} is not a part of a cost{nearest(key, AlphaBeta._fields)}",
                possible="alpha (seconds per step) and beta (seconds per byte)",
                change="use these two names",
            )
    for key in AlphaBeta._fields:
        value = values.get(key, "missing")
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise ConfigError(
                f"{key} is {value!r} in {where}",
                possible="a finite number of seconds, not below 0",
                change=f"give {key} such a number",
            )
    return AlphaBeta(float(values["alpha"]), float(values["beta"]))
