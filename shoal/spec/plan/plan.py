"""The Plan: how one training step is laid over the devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Self

from shoal.errors import PlanError, nearest
from shoal.limits import NUMBER, PLAN, RANKS
from shoal.spec.plan.allowed_values import (
    AXES,
    CHOICES,
    DEFAULT_ORDER,
    WHOLE,
    Recompute,
    axes_of,
    element_bytes,
    require_choice,
    require_order,
    require_whole,
    strides_of,
)
from shoal.spec.plan.exchange import SETTINGS, SYNCHRONOUS, Compression, Exchange
from shoal.spec.plan.group import split_dims
from shoal.spec.plan.offload import OFFLOADED, Tiers
from shoal.spec.plan.schedules import FOUND, Schedule, Times, kind_of, make, require_numbers, search
from shoal.spec.plan.sharding import SHARDINGS, UNSHARDED, Sharding, divisors, require_degrees
from shoal.spec.plan.uneven_micro_batches import EQUAL, Shares
from shoal.units import exact_bytes, parse_bytes

_SIZES = ("bucket",)
_SHARES = ("feedback",)
_REAL = ("staleness", "grace")


def settings_of(text: str, names: Sequence[str], read: Callable[[str, str], Any]) -> dict[str, Any]:
    """Return the settings that a text such as `dp=4,shard=zero1` gives.

    Args:
        text: The text.
        names: The settings that there are.
        read: Returns the value of a setting from its name and its text.

    Raises:
        PlanError: A key is unknown or given twice, or a value cannot be read.
    """
    if len(text) > PLAN:
        raise PlanError(
            f"the Plan has {len(text)} characters: {text[:40]!r} and so on",
            possible=f"at most {PLAN}",
            change="shorten it",
        )
    settings: dict[str, Any] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in names or not equals:
            raise PlanError(
                f"the Plan {text!r} holds {item!r}, which is not one of its settings{nearest(name, names)}",
                possible=f"name=value, separated by commas; the names are {', '.join(names)}",
                change="correct or leave out that setting",
            )
        if name in settings:
            raise PlanError(
                f"the Plan {text!r} gives {name} twice",
                possible="each setting once",
                change=f"leave out one {name}",
            )
        settings[name] = read(name, value)
    return settings


def read_number(name: str, value: str) -> int | float:
    """Return a number: bytes of a size, a share, or a whole number.

    Raises:
        PlanError: It cannot be read.
    """
    try:
        if name in _SIZES:
            return parse_bytes(value)
        if name in _REAL and not value.isdecimal():
            return float(value)
        return float(value) if name in _SHARES else int(value)
    except ValueError:
        kind, example = "a whole number", "2"
        if name in _SIZES:
            kind, example = "a size such as 25MiB, at least 1", "1MiB"
        elif name in _REAL:
            kind, example = "a number, or inf", "4"
        elif name in _SHARES:
            kind, example = "a number from 0 to 1", "0.95"
        raise PlanError(
            f"{name}={value} cannot be read", possible=f"{name} is {kind}", change=f"write {name}={example}"
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How one training step is laid over the devices.

    A Plan is checked when it is made: one that exists is consistent in itself. `require_ranks` and
    `SettledPlan.of` check whether it fits a number of ranks and a batch.

    Attributes:
        dp: Whole data-parallel degree.
        tp: Tensor-parallel degree.
        pp: Number of pipeline stages.
        cp: Context-parallel degree.
        ep: Expert-parallel degree, carved out of dp x cp.
        replicate: Number of replicas of a sharded state; divides dp (hybrid sharding). The states are then
            sharded over dp / replicate x cp ranks, and gradients are all-reduced over the replicas.
        shard: The states sharded over data parallel: none, optimizer state (zero1), also gradients (zero2),
            also parameters (zero3), or optimizer state and parameters, with gradients that are summed whole
            and reduced once a step (zero3-once).
        tensor: How tensor parallelism communicates: with the residual stream split along the sequence
            (sequence), with the stream split and gathers and scatters in chunks that overlap the products
            (async), or with the stream whole on every rank (plain).
        context: How context parallelism attends: keys and values go round a ring (ring), or heads are
            exchanged for parts of the sequence (ulysses).
        schedule: Order in which pipeline stages run forwards and backwards of micro-batches: the schedule
            with this name, or one found for the computed costs of the stages (search).
        virtual: Pipeline stages on each rank; None for the fewest that the schedule takes.
        activations: With schedule=search, the most activations that a rank may hold, in micro-batches of one
            stage; None for pp x virtual, as many as 1f1b holds.
        split: The blocks of each stage: by their seconds on the machines (cost), in equal numbers (count), or
            as the number for each stage, such as 6-7-7-4.
        microbatch: Sequences in one forward of one rank. None for the whole of the rank's batch; with pp > 1,
            for the largest that makes four micro-batches for each stage, or as many as possible.
        shares: The micro-batches of each rank along dp in a step: equally many (equal), or a number for each,
            such as 3x24-2x8, three on each of 24 ranks and two on each of 8. Ranks on slow devices then do
            less, and a batch need not divide over dp. Needs ep=1. With zero2, zero3 or zero3-once, and with
            pp > 1, a rank with fewer makes its last one again without counting it: others wait for it.
        exchange: How workers exchange what they learn; a worker is one replica of the model. They average
            gradients in buckets that overlap with backward (bucketed), or one by one after it (naive, the
            reference); they make steps by themselves, and then average what these changed (local); they send
            gradients to parameter servers and take values from them (server); or measurements choose (auto).
        every: With exchange=local or auto, the steps between two merges of a parameter.
        fragments: With exchange=local, the parts of the model that are merged in different steps.
        delay: With exchange=local, the steps that a merge may take while workers go on.
        stretch: With exchange=local, the factor up to which `every` grows while the learning rate falls: with
            the square of the highest over the present one (Gu et al., arXiv:2310.14423).
        compress: What workers send in place of gradients, or of what local steps changed: all of it (none),
            int8, int4, fp8, sign, topk:64, topk:64:2bit, random:64, threshold:3 or powersgd:2. With a
            sharding and one worker, what its ranks send in place of gradients.
        feedback: The share of what compression left out of one exchange that is added to the next.
        dense: The first steps of training, in which nothing is compressed, and workers average gradients.
        servers: Processes beside the ranks that hold the values and the optimizer, for exchange=server; with
            exchange=local, those that merge.
        staleness: With exchange=server, the steps that a worker may be ahead of the slowest one: none, and
            then all average in each step; a number; or inf.
        quorum: With servers, the workers whose arrival closes a round; 0 for all that are present.
        grace: Seconds that a round with a quorum waits for others.
        mirror: Whether each server's part is copied to the next server, so that one may die: 0 or 1.
        bucket: Bytes of parameters in a bucket, at which it is closed. With zero3 and zero3-once each block
            is a bucket.
        recompute: What a block's backward computes again instead of keeping it: nothing, all but matrix
            products and attention (selective), or everything (full); full:8 does so in 8 of the blocks.
        precision: Type in which the model computes: fp32; tf32, fp32 whose products round their operands to
            tf32 where the device can; bf16; fp8, bf16 whose products in blocks round theirs to 8 bits. The
            optimizer's copy, its state and the sums of gradients are always fp32.
        reduce: Type in which ranks send each other gradients, fp32 or bf16.
        order: The axes, outermost first: ranks that differ along the last one are neighbours, and those that
            differ along the first one are farthest apart. Any order of pp, dp, cp and tp.
        offload: Parts kept outside of the device, joined by +: optimizer:file or optimizer:host (no change on
            CPUs), with zero3 gradients:file and parameters:file, and activations:file, or activations:file:8
            for 8 blocks.
        compile: What torch.compile compiles: nothing (none), or each block and the loss (blocks). auto is
            blocks on GPUs where the cost model predicts that it is quicker, and none elsewhere.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    replicate: int = 1
    shard: str = "none"
    tensor: str = "sequence"
    context: str = "ring"
    schedule: str = "1f1b"
    virtual: int | None = None
    activations: int | None = None
    split: str = "cost"
    microbatch: int | None = None
    shares: str = EQUAL
    exchange: str = "bucketed"
    every: int = 20
    fragments: int = 1
    delay: int = 0
    stretch: int = 1
    compress: str = "none"
    feedback: float = 1.0
    dense: int = 0
    servers: int = 0
    staleness: float = 0
    quorum: int = 0
    grace: float = 0.0
    mirror: int = 0
    bucket: int = 25 << 20
    recompute: str = "none"
    precision: str = "fp32"
    reduce: str = "fp32"
    order: str = DEFAULT_ORDER
    offload: str = OFFLOADED
    compile: str = "auto"

    def __post_init__(self) -> None:
        for name, least in WHOLE.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= NUMBER:  # a planner makes many Plans
                require_whole(name, value, least)
        for name in ("microbatch", "virtual", "activations"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name))
        for name, values in CHOICES.items():
            if getattr(self, name) not in values and name != "recompute":
                require_choice(name, getattr(self, name))
        Recompute.parse(self.recompute)  # raises
        require_whole("dp x tp x pp x cp", self.dp * self.tp * self.pp * self.cp, most=RANKS)
        require_degrees(self.sharding, dp=self.dp, cp=self.cp, ep=self.ep, replicate=self.replicate)
        if self.order != DEFAULT_ORDER:
            self._require_order()
        if self.activations is not None and self.schedule != FOUND:
            raise PlanError(
                f"activations={self.activations} was given with schedule={self.schedule}, "
                "which fixes how many activations a rank holds",
                possible=f"activations with schedule={FOUND}",
                change=f"write schedule={FOUND}, or leave out activations",
            )
        if self.precision == "fp8" and self.tp > 1:
            raise PlanError(
                f"precision=fp8 was given with tp={self.tp}, which splits the products of layers",
                possible="precision=fp8 with tp=1, or precision=bf16 with any tp",
                change="write precision=bf16, or leave out tp",
            )
        if self.pp > 1:
            self._require_stages()
        if self.exchange == "naive" and (
            self.sharding is not UNSHARDED or self.element_bytes < 4 or self.reduce != "fp32" or self.pp > 1
        ):
            raise PlanError(
                f"exchange=naive was given with shard={self.shard}, precision={self.precision}, "
                f"reduce={self.reduce}, pp={self.pp}",
                possible="exchange=naive with shard=none, precision=fp32 or tf32, reduce=fp32 and pp=1",
                change="leave out exchange=naive",
            )
        if self.offload != OFFLOADED:
            object.__setattr__(self, "offload", str(self.tiers.require(self.sharding, self.exchange)))
        if self.shares != EQUAL:
            shares = Shares.parse(self.shares)
            shares.require(dp=self.dp, ep=self.ep, exchange=self.exchange, compress=self.compress)
            object.__setattr__(self, "shares", str(shares))
        degrees = {"dp": self.dp, "cp": self.cp, "ep": self.ep, "copies": self.tp * self.pp}
        self.exchanged.require(self.sharding, replicas=self.replicas, **degrees)

    def _require_order(self) -> None:
        """Check `order`, and that the ranks with other experts are a nested pattern in it."""
        require_order(self.order)
        sizes = dict(zip(AXES, (self.pp, self.replicas, self.shards, self.cp, self.tp), strict=True))
        strides = strides_of(self.order, sizes)
        parted = ("shard" if self.sharding.cuts_optimizer else "replicate", "cp")
        dims = [(sizes[axis], strides[axis]) for axis in axes_of(self.order) if axis in parted]
        if split_dims(dims, self.ep) is None:
            over = math.prod(size for size, _ in dims)
            possible = [ep for ep in divisors(over) if split_dims(dims, ep) is not None]
            raise PlanError(
                f"ep={self.ep} takes ranks along dp and along cp, and order={self.order} has others between "
                "these",
                possible=f"ep is one of {', '.join(map(str, possible))}",
                change="choose one of these, or an order in which dp and cp follow each other",
            )

    def _require_stages(self) -> None:
        """Check `virtual`, `activations` and `split`, as far as possible without a model or a batch."""
        self.require_micro_batches(2 * self.pp)
        virtual = self.stages // self.pp
        if self.activations is not None and self.activations < virtual:
            raise PlanError(
                f"activations={self.activations} was given, and a rank has {virtual} stages",
                possible=f"{virtual} or more: one micro-batch alone holds {virtual}",
                change=f"write activations={virtual} or more, or leave it out",
            )
        if self.split in ("cost", "count"):
            return
        counts = self.split.split("-")
        if len(counts) != self.stages or not all(count.isdecimal() for count in counts):
            raise PlanError(
                f"split={self.split} does not say how many blocks each of {self.stages} stages has",
                possible=f"cost, count, or {self.stages} numbers joined by -",
                change="leave it out, or write, for example, split=" + "-".join(["2"] * self.stages),
            )

    @property
    def sharding(self) -> Sharding:
        """The states that data parallelism cuts over ranks, and when it communicates."""
        return SHARDINGS[self.shard]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the weights that compute."""
        return element_bytes(self.precision)

    @property
    def stages(self) -> int:
        """Number of pipeline stages: stages on a rank, times pp."""
        return self.pp * (kind_of(self.schedule).least_virtual if self.virtual is None else self.virtual)

    @property
    def placement(self) -> tuple[int, ...]:
        """By pipeline stage, the index along the axis `pp` of the rank that holds it."""
        return kind_of(self.schedule).placement(self.pp, self.stages // self.pp)

    @property
    def has_halves(self) -> bool:
        """Whether the schedule may make a backward in two halves."""
        return kind_of(self.schedule).has_halves

    def schedule_for(self, micro_batches: int, times: Times | None = None) -> Schedule:
        """Return the table of a step of this many micro-batches. A search takes seconds: keep the result.

        Args:
            micro_batches: Micro-batches of a step.
            times: Times of the stages, for which schedule=search finds one; None for equal times. Other
                schedules do not depend on them.

        Raises:
            PlanError: The schedule cannot be made for this number, or the number of times is not that of the
                stages.
        """
        virtual = self.stages // self.pp
        if self.schedule != FOUND:
            return make(self.schedule, self.pp, virtual, micro_batches)
        times = Times.equal(self.stages) if times is None else times
        limit = self.stages if self.activations is None else self.activations
        return search(times, self.pp, virtual, micro_batches, limit, self.placement)

    def require_micro_batches(self, number: int) -> None:
        """Check that the schedule can be made for this many micro-batches.

        Raises:
            PlanError: It cannot be made.
        """
        require_numbers(self.schedule, self.pp, self.stages // self.pp, number)

    @property
    def ranks(self) -> int:
        """Number of ranks that the Plan is laid over."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def processes(self) -> int:
        """Number of processes: the ranks and the parameter servers."""
        return self.ranks + self.exchanged.processes

    def of_worker(self) -> Self:
        """Return the Plan by which the ranks of one worker make their steps, if servers join the workers."""
        alone = {name: value for name, value in SYNCHRONOUS.items() if name != "dense"}
        return self.replace(dp=self.dp // self.replicas, replicate=1, **alone)

    @property
    def shared(self) -> Shares | None:
        """The micro-batches of each rank along dp; None if all make equally many."""
        return None if self.shares == EQUAL else Shares.parse(self.shares)

    @property
    def is_padded(self) -> bool:
        """Whether ranks with fewer micro-batches than others make some without a loss: see `Shares`."""
        differ = self.shared is not None and len(self.shared.runs) > 1
        return differ and (self.sharding.communicates_each_micro_batch or self.pp > 1)

    @property
    def tiers(self) -> Tiers:
        """Where each part of a rank's state is kept."""
        return Tiers.parse(self.offload)

    @property
    def recomputed(self) -> Recompute:
        """What is computed again in backward, and in how many blocks."""
        return Recompute.parse(self.recompute)

    @property
    def exchanged(self) -> Exchange:
        """How workers exchange what they learn."""
        return _exchange_of(self.exchange, self.compress, tuple([getattr(self, name) for name in SETTINGS]))

    @property
    def shards(self) -> int:
        """Ranks along the mesh's axis `shard`; a sharded state is cut over these times cp."""
        return 1 if self.sharding is UNSHARDED else self.dp // self.replicate

    @property
    def replicas(self) -> int:
        """Ranks along the mesh's axis `replicate`."""
        return self.dp // self.shards

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, such as `dp=4,shard=zero1,microbatch=2`. Missing settings have their defaults.

        Raises:
            PlanError: A key is unknown or given twice, or a value cannot be read.
        """
        return cls(**parse_settings(text))

    def __str__(self) -> str:
        settings = [f"dp={self.dp}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "dp" and value != field.default:
                settings.append(f"{field.name}={exact_bytes(value) if field.name == 'bucket' else value}")
        return ",".join(settings)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def require_ranks(self, ranks: int) -> None:
        """Check that the Plan is for this number of ranks.

        Raises:
            PlanError: The degrees do not multiply to `ranks`.
        """
        if self.ranks == ranks:
            return
        others = self.ranks // self.dp
        if ranks % others == 0:
            change = f"write dp={ranks // others}, or start {self.ranks} ranks"
        else:
            change = f"start {self.ranks} ranks, or choose degrees whose product is {ranks}"
        raise PlanError(
            f"the Plan {self} is for {self.ranks} ranks, and there are {ranks}",
            possible=f"dp x tp x pp x cp = {ranks}",
            change=change,
        )

    def __eq__(self, other: object) -> bool:
        """Return whether the other is a Plan with equal settings, settled or not."""
        if not isinstance(other, Plan):
            return NotImplemented
        return bool(_VALUES(self) == _VALUES(other))


@lru_cache(maxsize=1 << 8)
def _exchange_of(kind: str, compress: str, settings: tuple[Any, ...]) -> Exchange:
    """Return the Exchange with these values of SETTINGS."""
    named = dict(zip(SETTINGS, settings, strict=True))
    return Exchange(kind=kind, compression=Compression.parse(compress), **named)


_TEXTS = ("split", "shares", "order", "compress", "offload")
_FIELDS = tuple(field.name for field in dataclasses.fields(Plan))
_VALUES = attrgetter(*_FIELDS)


def parse_settings(text: str) -> dict[str, Any]:
    """Return the fields that a Plan's text names, with their values read but not yet checked together.

    Raises:
        PlanError: A key is unknown or given twice, or a value cannot be read.
    """
    return settings_of(text, _FIELDS, _read)


def _read(name: str, value: str) -> int | float | str:
    return value if name in CHOICES or name in _TEXTS else read_number(name, value)
