"""Measurements: operations with their measured seconds, and with those that the cost model predicts.

The fit looks for the Cluster with which the two agree best. The formulas are in `shoal.predict.cost`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from shoal.errors import DataError
from shoal.machine.probe.sheet import Sheet
from shoal.predict.cost import Layout
from shoal.predict.cost.collectives import algorithm_seconds, message_seconds
from shoal.predict.cost.time import attention_seconds, pass_seconds, product_seconds, stream_seconds
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Boundary, Group
from shoal.spec.workload import Attention


class Measurement(Protocol):
    """An operation and its seconds, measured while all ranks did the same."""

    @property
    def seconds(self) -> float:
        """Measured seconds."""
        ...

    @property
    def quantity(self) -> str:
        """Name of the quantity for errors of the fit, such as "products fp32"."""
        ...

    def predicted(self, cluster: Cluster) -> float:
        """Return the seconds of the operation on a Cluster, by the cost model."""
        ...


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Seconds of a matrix product `[rows, inputs] x [inputs, outputs]`."""

    precision: str
    rows: int
    inputs: int
    outputs: int
    seconds: float

    @property
    def quantity(self) -> str:
        """See `Measurement`."""
        return f"products {self.precision}"

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return 2.0 * self.rows * self.inputs * self.outputs / self.seconds

    def predicted(self, cluster: Cluster) -> float:
        """See `Measurement`."""
        return product_seconds(cluster.device.alone, self.precision, self.rows, self.inputs, self.outputs)


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of kernels that read and write `nbytes` of memory.

    Their operands are more than caches hold if it is a stream, and lie in the device's cache if it is warm.
    """

    name: str
    nbytes: float
    kernels: int
    seconds: float
    is_stream: bool = False
    is_warm: bool = False

    @property
    def quantity(self) -> str:
        """See `Measurement`."""
        if self.is_warm:
            return "passes within a cache"
        return "streams" if self.is_stream else "passes over memory"

    @property
    def rate(self) -> float:
        """Bytes/s."""
        return self.nbytes / self.seconds

    def predicted(self, cluster: Cluster) -> float:
        """See `Measurement`."""
        seconds = stream_seconds if self.is_stream else pass_seconds
        return seconds(cluster.device, self.nbytes, self.kernels)


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Seconds of the attention of one sample, forward or backward."""

    precision: str
    attention: Attention
    half: Literal["forward", "backward"]
    seconds: float

    @property
    def quantity(self) -> str:
        """See `Measurement`."""
        return f"attention {self.half}"

    def predicted(self, cluster: Cluster) -> float:
        """See `Measurement`."""
        layout = Layout(microbatch=1, precision=self.precision)
        forward, backward = attention_seconds(self.attention, cluster.device.alone, layout)
        return forward if self.half == "forward" else backward


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Seconds of a collective, in all groups of one form at once.

    Attributes:
        level: Index of the outermost level of links that it uses.
        collective: Name of the collective.
        group: The pattern of ranks that take part.
        nbytes: Bytes, as `shoal.predict.cost.collectives.network` counts them.
        seconds: Seconds of the slowest rank.
    """

    level: int
    collective: str
    group: Group
    nbytes: int
    seconds: float

    @property
    def quantity(self) -> str:
        """See `Measurement`."""
        return f"{self.collective}, {_where(self.level)}"

    def predicted(self, cluster: Cluster) -> float:
        """See `Measurement`."""
        # Not `collective_seconds`, which caches every cluster that it is called with: a fit tries thousands.
        return min(algorithm_seconds(self.collective, self.nbytes, self.group, cluster).values())


@dataclass(frozen=True, slots=True)
class SendTime:
    """Seconds of a message to the rank `distance` away, while an equal one arrives from the other side."""

    level: int
    distance: int
    nbytes: int
    seconds: float

    @property
    def quantity(self) -> str:
        """See `Measurement`."""
        return f"send, {_where(self.level)}"

    def predicted(self, cluster: Cluster) -> float:
        """See `Measurement`."""
        return message_seconds(self.nbytes, Boundary(0, self.distance, Group(1)), cluster)


@dataclass(frozen=True, slots=True)
class SynchronisationTime:
    """Seconds that ranks lose when they repeatedly do equal work and then synchronise.

    Attributes:
        ranks: Number of ranks that synchronise.
        work: Seconds of the work alone, the mean over ranks.
        seconds: Seconds that a synchronisation adds beside the collective alone, the mean over ranks.
    """

    ranks: int
    work: float
    seconds: float


@dataclass(frozen=True, slots=True)
class HostRates:
    """Bytes/s from each host to its partner and back, all ranks of a host sending at once.

    Attributes:
        pairing: The pairs of hosts: "even" 0-1 and 2-3, "odd" 1-2 and 3-4, "far" each with the one half of
            all hosts away, "alone" only the first pair of "far".
        rates: Rates by host; hosts without a partner are left out.
    """

    pairing: Literal["even", "odd", "far", "alone"]
    rates: Mapping[int, float]


class HostTimes(NamedTuple):
    """Seconds of starts.

    Attributes:
        launch: Seconds from one kernel's end to the next one's start.
        dispatch: Seconds that the host takes to start an operation, beside what the device does.
        graph: Seconds that the host takes to call a compiled graph, beside the start of its kernels.
    """

    launch: float
    dispatch: float
    graph: float


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """All measurements of a probe.

    Attributes:
        products, passes, attention: Times on this rank's device, medians over the ranks.
        launch, dispatch, graph: See `HostTimes`.
        is_apart: Whether the times of a GPU's operations are the device's alone. If not, those of small
            operations are the host's.
        contention: Share by which a collective within a host slows a product that runs beside it.
        links: Times of collectives and messages, level by level.
        synchronisations: Times of all ranks of a host, with work of several lengths.
        hosts: Rates between pairs of hosts, if there are enough of them.
        paces: By rank, FLOP/s of the quickest product in fp32.
        presence: By rank, the share of the time of its products in which its threads were on a core.
    """

    products: tuple[ProductTime, ...]
    passes: tuple[PassTime, ...]
    attention: tuple[AttentionTime, ...]
    launch: float
    dispatch: float
    contention: float
    graph: float = 0.0
    is_apart: bool = False
    links: tuple[CollectiveTime | SendTime, ...] = ()
    synchronisations: tuple[SynchronisationTime, ...] = ()
    hosts: tuple[HostRates, ...] = ()
    paces: tuple[float, ...] = field(default=())
    presence: tuple[float, ...] = field(default=())

    @property
    def all(self) -> tuple[Measurement, ...]:
        """Return the measurements that the cost model predicts."""
        passes = (each for each in self.passes if not each.is_warm)
        return (*self.products, *passes, *self.attention, *self.links)


def _where(level: int) -> str:
    return "between hosts" if level else "inside a host"


def read_measurements(path: str | Path) -> tuple[Measurements, Sheet]:
    """Return the measurements of a probe, and the facts about its machine.

    Raises:
        DataError: The file cannot be read, or `shoal probe --json` did not write it.
    """
    try:
        read = json.loads(Path(path).read_text("utf-8"))
        return _measurements(read["measurements"]), Sheet(**_tuples(read["sheet"]))
    except OSError as error:
        raise _refused(path, str(error.strerror)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(path, f"{type(error).__name__}: {error}") from None


def _refused(path: str | Path, reason: str) -> DataError:
    return DataError(
        f"the measurements in {path} cannot be read: {reason}",
        possible="a file with the output of `shoal probe --json`",
        change="correct the path, or probe again",
    )


def _measurements(read: Mapping[str, Any]) -> Measurements:
    lists: dict[str, Callable[[Any], Any]] = {
        "products": lambda each: ProductTime(**each),
        "passes": lambda each: PassTime(**each),
        "attention": lambda each: AttentionTime(**{**each, "attention": Attention(**each["attention"])}),
        "links": _link,
        "synchronisations": lambda each: SynchronisationTime(**each),
        "hosts": lambda each: HostRates(
            each["pairing"], {int(host): rate for host, rate in each["rates"].items()}
        ),
    }
    made = {name: tuple(map(make, read[name])) for name, make in lists.items()}
    return Measurements(**{**_tuples(read), **made})


def _link(read: Mapping[str, Any]) -> CollectiveTime | SendTime:
    if "distance" in read:
        return SendTime(**read)
    return CollectiveTime(**{**read, "group": Group(**read["group"])})


def _tuples(read: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}
