"""How workers exchange what they learn: the settings of a Plan that belong to it, and which fit together.

A worker is one replica of the model: the ranks with one index along the mesh's axis `replicate`. Within a
worker, ranks reduce gradients and gather weights as its sharding says.

    bucketed   workers average gradients in every step, in buckets that overlap with backward
    naive      workers average each parameter's gradient after backward: the reference
    local      workers make `every` steps by themselves, and then average what these changed (DiLoCo:
               Douillard et al., arXiv:2311.08105)
    server     workers send gradients to parameter servers, which make the optimizer's step, and take values
               from them (Li et al., OSDI 2014). With `staleness` they do not wait for each other (Ho et al.,
               NIPS 2013)
    auto       the first two and `compress`, whichever is predicted to reach a loss soonest at the time: a
               choice from measurements, which guards check (`shoal.train.exchange_tuner`)

With `compress` they send fewer bytes.

What ranks send in place of a vector of fp32 elements: a Plan's `compress`, and its bytes.

    none          every element, 4 bytes each
    int8          8 bits an element, and a scale in fp32 for each block of 1,024: the largest magnitude is 127
    int4          4 bits an element, and a scale for each block: the largest magnitude is 7
    fp8           e4m3, and a scale for each block: the largest magnitude is 448
    sign          1 bit an element, and for each block the mean magnitude (Seide et al., Interspeech 2014)
    topk:64       of each chunk of 4,096 elements the 64th part that is largest in magnitude: a 12-bit index
                  and an fp32 value each (chunks: Wang et al., DeMo, arXiv:2411.19870)
    topk:64:2bit  the same elements; of each value the sign, and which of the chunk's two magnitudes it is
    random:64     the 64th part of the elements, chosen anew in every exchange, alike on all ranks
    threshold:3   the elements whose magnitude is above 3 times the root mean square of their chunk
    powersgd:2    of each matrix the product of two factors of rank 2 (Vogels et al., arXiv:1905.13727)

int8, int4 and fp8 round up or down at random, so that the mean of what is sent is the element itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from shoal.errors import PlanError, nearest
from shoal.spec.plan.sharding import UNSHARDED, Sharding

BLOCK = 1024
"""Elements that share a scale."""

CHUNK = 4096
"""Elements among which sparse kinds choose; a position in a chunk takes 12 bits."""

_QUANTISED: Mapping[str, int] = {"int8": 8, "int4": 4, "fp8": 8, "sign": 1}
"""Kinds that send all elements in fewer bits, with the bits."""

_NUMBERED: Mapping[str, tuple[int, int, str]] = {
    "topk": (2, CHUNK, "topk:N sends the Nth part of the elements"),
    "random": (2, CHUNK, "random:N sends the Nth part of the elements"),
    "threshold": (1, 64, "threshold:N sends elements above N times the root mean square"),
    "powersgd": (1, 64, "powersgd:N sends factors of rank N"),
}
"""Kinds with a number: its least and its greatest value, and what it says."""

_KINDS = ("none", *_QUANTISED, *_NUMBERED)


@dataclass(frozen=True, slots=True)
class Compression:
    """A way to send a vector in fewer bytes.

    Attributes:
        kind: The name before the first colon of the text.
        number: The number after it; 0 for kinds without one.
        bits: Bits of each value that topk sends: 32, or 2.
    """

    kind: str = "none"
    number: int = 0
    bits: int = 32

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, such as `int8` or `topk:64:2bit`.

        Raises:
            PlanError: There is no such kind, or its number is out of range.
        """
        kind, *rest = text.split(":")
        if kind not in _KINDS:
            raise PlanError(
                f"compress={text} does not exist{nearest(kind, _KINDS)}",
                possible=", ".join(
                    (*_QUANTISED, "topk:64", "topk:64:2bit", "random:64", "threshold:3", "powersgd:2")
                ),
                change="write compress=int8, or leave it out",
            )
        if kind not in _NUMBERED:
            if rest:
                raise PlanError(
                    f"compress={text} was given, and {kind} takes no number",
                    possible=f"compress={kind}",
                    change=f"write compress={kind}",
                )
            return cls(kind)
        least, most, meaning = _NUMBERED[kind]
        bits = 2 if kind == "topk" and rest[1:] == ["2bit"] else 32
        numbers = rest[:1] if bits == 2 else rest
        if len(numbers) != 1 or not numbers[0].isdecimal() or not least <= int(numbers[0]) <= most:
            raise PlanError(
                f"compress={text} cannot be read",
                possible=f"{meaning}, with N from {least} to {most}"
                + (", and topk:N:2bit" if kind == "topk" else ""),
                change=f"write, for example, compress={kind}:{max(least, min(64, most))}",
            )
        return cls(kind, int(numbers[0]), bits)

    def __str__(self) -> str:
        text = self.kind if self.kind not in _NUMBERED else f"{self.kind}:{self.number}"
        return f"{text}:2bit" if self.bits == 2 else text

    @property
    def is_quantised(self) -> bool:
        """Whether all elements are sent, each in fewer bits."""
        return self.kind in _QUANTISED

    @property
    def is_sparse(self) -> bool:
        """Whether each rank sends elements of its own choice, with their positions."""
        return self.kind in ("topk", "threshold")

    @property
    def has_fixed_size(self) -> bool:
        """Whether the bytes depend on the number of elements alone."""
        return self.kind not in ("threshold", "powersgd")

    def kept(self, elements: int) -> int:
        """Return how many of `elements` in one chunk topk sends, or of all elements random sends."""
        return -(-elements // self.number)

    def payload(self, elements: int) -> int:
        """Return the bytes in which a vector is sent; the kind has a fixed size.

        topk sends, for each chunk, the kept positions, packed in 12 bits each, then its values: fp32 each, or
        their 2 bits packed, and two magnitudes in bf16.
        """
        if self.is_quantised:
            blocks = -(-elements // BLOCK)
            return 4 * blocks + -(-elements * _QUANTISED[self.kind] // 8)
        if self.kind == "random":
            return 4 * self.kept(elements)
        if self.kind == "topk":
            whole, rest = divmod(elements, CHUNK)
            return whole * self._of_chunk(CHUNK) + (self._of_chunk(rest) if rest else 0)
        assert self.kind == "none", f"{self.kind} has no fixed size"
        return 4 * elements

    def _of_chunk(self, elements: int) -> int:
        kept = self.kept(elements)
        positions = -(-kept * 12 // 8)
        return positions + (-(-kept * 2 // 8) + 4 if self.bits == 2 else 4 * kept)


EXCHANGES = ("bucketed", "naive", "local", "server", "auto")
"""Values of a Plan's `exchange`."""

SETTINGS = (
    "every",
    "fragments",
    "delay",
    "stretch",
    "feedback",
    "dense",
    "servers",
    "staleness",
    "quorum",
    "grace",
    "mirror",
)
"""Settings of an Exchange that a Plan has under the same names."""

_DEFAULTS = {"every": 20, "fragments": 1, "delay": 0, "stretch": 1}
"""Settings that only local updates have, with their defaults."""

_OF_SERVERS = {"servers": 0, "staleness": 0, "quorum": 0, "grace": 0.0, "mirror": 0}
"""Settings that only exchanges through servers have, with their defaults."""

SYNCHRONOUS: Mapping[str, Any] = {
    "exchange": "bucketed",
    "compress": "none",
    "feedback": 1.0,
    "dense": 0,
    **_DEFAULTS,
    **_OF_SERVERS,
}
"""Settings of a Plan that trains as one device does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """The settings of a Plan that say how workers exchange what they learn; see `Plan`.

    Attributes:
        kind: The Plan's `exchange`.
        every: Steps between two merges of a parameter.
        fragments: Parts of the model that are merged in different steps.
        delay: Steps that a merge may take while workers go on.
        stretch: Factor up to which `every` grows while the learning rate falls.
        compression: What is sent in place of a vector.
        feedback: Share of what was left out of one exchange that is added to the next.
        dense: First steps of training, in which every step is exchanged whole.
        servers: Parameter servers, as the Plan gives them; see `processes`.
        staleness: Steps that a worker may be ahead of the slowest.
        quorum: Workers whose arrival closes a round; 0 for all.
        grace: Seconds that a round with a quorum waits for others.
        mirror: Whether each server's part is copied to the next.
    """

    kind: str
    every: int
    fragments: int
    delay: int
    stretch: int
    compression: Compression
    feedback: float
    dense: int
    servers: int
    staleness: float
    quorum: int
    grace: float
    mirror: int

    @property
    def is_served(self) -> bool:
        """Whether workers exchange through parameter servers."""
        return self.kind == "server" or self.servers > 0

    @property
    def processes(self) -> int:
        """Number of parameter servers: at least one for exchange=server."""
        return max(self.servers, 1) if self.is_served else 0

    @property
    def merges(self) -> bool:
        """Whether workers make steps by themselves, and merge what these changed."""
        return self.kind == "local"

    @property
    def is_chosen(self) -> bool:
        """Whether measurements choose the exchange while the training runs; it begins with all gradients."""
        return self.kind == "auto"

    @property
    def keeps_values(self) -> bool:
        """Whether parameters have a second copy, which merges or servers update."""
        return self.merges or self.is_chosen or self.is_served

    @property
    def compresses(self) -> bool:
        """Whether less is sent than the vectors themselves."""
        return self.compression.kind != "none"

    @property
    def leaves_out(self) -> bool:
        """Whether what is sent leaves out elements, or directions, which wait for a later exchange."""
        return self.compresses and not self.compression.is_quantised

    def require(self, sharding: Sharding, *, dp: int, cp: int, ep: int, replicas: int, copies: int) -> None:
        """Check that the settings fit each other and a Plan's degrees.

        Raises:
            PlanError: A setting is out of range, or needs another one.
        """
        if self == _PLAIN:  # most Plans, of which a planner makes many
            return
        self._require_local()
        self._require_chosen()
        self._require_servers(replicas, copies * ep * (cp if sharding is UNSHARDED else 1))
        self._require_compression()
        if self.dense and not (self.merges or self.compresses or self.is_chosen):
            raise PlanError(
                f"dense={self.dense} was given, and every step is dense",
                possible="dense with compress, or with exchange=local or auto",
                change="leave out dense",
            )
        if (self.merges or self.compresses or self.is_chosen) and not self.is_served:
            self._require_workers(sharding, dp, cp, ep, replicas)

    def _require_compression(self) -> None:
        if not 0 <= self.feedback <= 1:
            raise PlanError(
                f"feedback={self.feedback} is not a share",
                possible="feedback from 0, which forgets what was not sent, to 1",
                change="write feedback=1, or leave it out",
            )
        if self.feedback != 1 and not self.compresses:
            raise PlanError(
                f"feedback={self.feedback} was given without compress",
                possible="feedback with compress",
                change="add, for example, compress=int8, or leave out feedback",
            )
        if self.compresses and self.kind == "naive":
            raise PlanError(
                f"compress={self.compression} was given with exchange=naive",
                possible="compress with exchange=bucketed or local",
                change="leave out exchange=naive",
            )

    def _require_chosen(self) -> None:
        if self.is_chosen and self.compresses:
            raise PlanError(
                f"exchange=auto was given with compress={self.compression}",
                possible="exchange=auto, which chooses itself, or compress with exchange=bucketed or local",
                change="leave out compress, or leave out exchange=auto",
            )

    def _require_local(self) -> None:
        if not self.merges:
            for name, default in _DEFAULTS.items():
                if self.is_chosen and name == "every":
                    continue
                if (value := getattr(self, name)) != default:
                    raise PlanError(
                        f"{name}={value} was given with exchange={self.kind}",
                        possible=f"{name} with exchange=local",
                        change=f"add exchange=local, or leave out {name}",
                    )
            return
        if self.fragments > self.every:
            raise PlanError(
                f"fragments={self.fragments} was given with every={self.every}: a step merges one at most",
                possible=f"fragments up to {self.every}",
                change=f"write fragments={self.every}, or a larger every",
            )
        most = self.every // self.fragments - 1
        if self.delay > most:
            raise PlanError(
                f"delay={self.delay} was given, and the next merge begins {most + 1} steps after the last",
                possible=f"delay from 0 to {most} with every={self.every}, fragments={self.fragments}",
                change=f"write delay={most}, or a larger every",
            )

    def _require_servers(self, workers: int, copies: int) -> None:
        """Check the settings of servers; `copies` are the ranks of a worker that may hold equal values."""
        if not self.is_served:
            for name, default in _OF_SERVERS.items():
                if (value := getattr(self, name)) != default:
                    raise PlanError(
                        f"{name}={value:g} was given without parameter servers",
                        possible=f"{name} with exchange=server, or with exchange=local,servers=1",
                        change=f"add exchange=server, or leave out {name}",
                    )
            return
        if self.kind not in ("server", "local"):
            raise PlanError(
                f"servers={self.servers} was given with exchange={self.kind}",
                possible="servers with exchange=server or local",
                change="add exchange=server, or leave out servers",
            )
        given = f"exchange={self.kind},servers={self.processes}"
        if self.fragments > 1 or self.delay or self.stretch > 1 or self.dense:
            raise PlanError(
                f"{given} was given with fragments, delay, stretch or dense",
                possible="these settings where workers exchange without servers",
                change="leave them out, or leave out servers",
            )
        if self.compression.kind == "powersgd":
            raise PlanError(
                f"{given} was given with compress={self.compression}, and a server has parts of matrices",
                possible="with servers: int8, int4, fp8, sign, topk:64, topk:64:2bit, random:64, threshold:3",
                change="write, for example, compress=int8",
            )
        whole = math.isinf(self.staleness) or float(self.staleness).is_integer()
        if not whole or self.staleness < 0 or (self.staleness and self.kind != "server"):
            raise PlanError(
                f"staleness={self.staleness:g} was given with {given}",
                possible="with exchange=server, 0 (workers step together), a whole number of steps, or inf",
                change="write, for example, exchange=server,staleness=4",
            )
        if copies > 1 and (self.staleness or self.compresses):
            name = "staleness" if self.staleness else "compress"
            why = "update in different orders" if self.staleness else "get other payloads for"
            raise PlanError(
                f"{name} was given for {given} with tp, pp, ep, or cp without shard, and then ranks of a "
                f"worker hold copies that servers would {why}",
                possible=f"{name} with dp, and with shard=zero1, zero2 or zero3 with cp too",
                change=f"leave out {name}",
            )
        if self.quorum > workers or (self.quorum and self.staleness) or (self.grace and not self.quorum):
            raise PlanError(
                f"quorum={self.quorum}, grace={self.grace:g}, staleness={self.staleness:g} were given for "
                f"{workers} workers",
                possible=f"quorum up to {workers} without staleness, and grace, in seconds, with a quorum",
                change="leave out quorum and grace",
            )
        if self.grace < 0 or not math.isfinite(self.grace):
            raise PlanError(
                f"grace={self.grace:g} is not a time",
                possible="seconds from 0",
                change="write, for example, grace=2",
            )
        if self.mirror > 1 or (self.mirror and self.processes < 2):
            raise PlanError(
                f"mirror={self.mirror} was given with servers={self.processes}",
                possible="mirror=1 with two servers or more: each keeps a copy for the one before it",
                change="write servers=2,mirror=1, or leave out mirror",
            )

    def _require_workers(self, sharding: Sharding, dp: int, cp: int, ep: int, replicas: int) -> None:
        """Check that workers are whole: that cp and ep are within them."""
        given = f"compress={self.compression}" if self.kind == "bucketed" else f"exchange={self.kind}"
        if sharding is UNSHARDED and cp * ep > 1:
            raise PlanError(
                f"{given} was given with shard=none, cp={cp}, ep={ep}, and then each rank of dp x cp is a "
                "worker by itself",
                possible="cp and ep within workers: with shard=zero1, zero2 or zero3, and replicate workers",
                change=f"add shard=zero1,replicate={dp}",
            )
        if self.compression.kind == "powersgd" and sharding.cuts_optimizer and replicas == 1:
            raise PlanError(
                f"{given} was given with shard={sharding.name}, and no rank has the whole sum of a matrix",
                possible="powersgd with shard=none, or between workers: with replicate=2 or more",
                change="add replicate, write shard=none, or compress=int8",
            )


_PLAIN = Exchange(
    kind="bucketed", compression=Compression(), **{name: SYNCHRONOUS[name] for name in SETTINGS}
)
