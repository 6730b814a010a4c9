"""A rank's way to the parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, TypeVar, final

import torch

from shoal.channel import Channel, ChannelStrangerError, dial
from shoal.collectives import Codec
from shoal.collectives.thread_device import callers_device, take_device
from shoal.parallel.exchange.server.protocol import SERVER, Blueprint, Decision, ServerError, Terms, Ticket
from shoal.spec.plan import Compression

_ALIGNED = 1024  # elements: a shard begins at a multiple

_CONNECT = 10.0  # seconds

_NONE = Compression()

Part = TypeVar("Part")
Result = TypeVar("Result")


@final
class Servers:
    """The servers of a training, as one rank of a worker sees them.

    Ranks at the same place in different workers have one `position`: they share a vector, which is cut into
    as many shards of equal bytes as there are servers. If a server is dead and the next one keeps copies,
    that one is asked from then on.

    Args:
        addresses: Host and port of each server.
        token: The word that all processes of the training know.
        mirrored: Whether each server's shards are copied to the next one.
        timeout: Seconds after which a worker that others wait for is lost, and twice of it after which a
            server that does not answer is dead.

    Attributes:
        timeout: See above.
        returns: Number of times that the servers had gone back to a snapshot when values were pulled last.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        token: str,
        *,
        mirrored: bool = False,
        timeout: float = 600.0,
    ) -> None:
        self._addresses = list(addresses)
        self._token = token
        self._mirrored = mirrored
        self.timeout = timeout
        self.returns = 0
        self._asked = {shard: shard for shard in range(-1, len(addresses))}  # the board is -1
        self._asked[-1] = 0
        self._channels: dict[int, Channel] = {}
        self._pushed: dict[int, tuple[dict[str, Any], Sequence[torch.Tensor]]] = {}
        self._threads = ThreadPoolExecutor(
            len(addresses), thread_name_prefix="server", initializer=callers_device()
        )

    @property
    def number(self) -> int:
        """Number of servers."""
        return len(self._addresses)

    def join(self, terms: Terms, first: int) -> Ticket:
        """Become a worker.

        Args:
            terms: What all workers go by.
            first: The first share of the training, if this is its first worker.

        Raises:
            ServerError: The servers cannot be reached, or train by other terms.
        """
        reply, _ = self._ask(-1, {"do": "join", "terms": asdict(terms), "first": first})
        return Ticket.from_json(reply)

    def arrive(self, worker: int, clock: int, weight: float, loss: float, failed: str = "") -> Decision:
        """Wait until this worker may go on; all its ranks have pushed.

        Args:
            worker: Its number.
            clock: Arrivals that it has made before.
            weight: Weight of what it pushed; 0 if it pushed nothing.
            loss: Mean loss of the samples that it was computed from.
            failed: Why this worker finds stale gradients harmful; "" if it does not.

        Raises:
            ServerError: The servers are gone, or have taken this worker for lost.
        """
        head = {"do": "arrive", "worker": worker, "clock": clock, "weight": weight, "loss": loss}
        reply, _ = self._ask(-1, {**head, "failed": failed})
        return Decision.from_json(reply)

    def retire(self, worker: int) -> bool:
        """Wait until the end of the training is saved; return whether this worker has to save it.

        Args:
            worker: Its number; no share is left for it.

        Raises:
            ServerError: The servers are gone.
        """
        saves: bool = self._ask(-1, {"do": "retire", "worker": worker})[0]["saves"]
        return saves

    def leave(self, worker: int, *, is_last: bool = False) -> None:
        """Let the others go on without this worker.

        Args:
            worker: Its number.
            is_last: Whether it has saved the end of the training. It then waits until the others are gone,
                and ends the servers.
        """
        with contextlib.suppress(ServerError):
            self._ask(-1, {"do": "leave", "worker": worker, "is_last": is_last})
        if is_last:
            self._end()

    def begin(
        self,
        position: int,
        blueprint: Blueprint,
        vector: torch.Tensor,
        states: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[torch.Tensor]]] = (),
        compression: Compression = _NONE,
    ) -> list[int]:
        """Give servers the first values, unless they have values already.

        Args:
            position: This rank's place in its worker.
            blueprint: The optimizer of the whole vector.
            vector: `[elements]`, fp32, on the CPU.
            states: For each server, the optimizer's state as `Shard.state` describes it; none for a new one.
            compression: How gradients will be pushed, and values pulled.

        Returns:
            For each server, the version of its values: 0 if they are these.
        """

        def one(shard: int, window: slice) -> int:
            about = {"do": "begin", "shard": shard, "position": position, "compress": str(compression)}
            head = {**about, "blueprint": blueprint.window(window.start, window.stop).as_json()}
            body = [vector[window]]
            if states:
                described, tensors = states[shard]
                head["state"] = described
                body += tensors
            version: int = self._ask(shard, head, body)[0]["version"]
            return version

        return self._of_each(one, self.windows(len(vector)))

    def push(
        self,
        position: int,
        parts: Sequence[torch.Tensor],
        settings: Sequence[Mapping[str, float]],
        *,
        worker: int,
        clock: int,
        base: Sequence[int] | None,
        share: int,
        complete: int,
        seed: int = 0,
        used: Sequence[tuple[int, bool]] = (),
    ) -> list[int]:
        """Send a gradient, or what steps changed.

        Args:
            position: This rank's place in its worker.
            parts: For each server, its part of the vector, in fp32 or encoded, on the CPU; unchanged until
                `pull` returns.
            settings: For each group of the optimizer, its learning rate `lr`, and what else changes.
            worker: The worker's number.
            clock: Arrivals that the worker has made before.
            base: Versions of the values that it was computed from, to be applied at once; None if it waits
                for its round.
            share: The share that it was computed from. What is applied at once is applied once for each.
            complete: A share before which all are finished.
            seed: Seed of the first part, if they are encoded; the others have the next ones.
            used: Number of elements of each parameter in the vector, and whether it has a gradient; empty if
                all have.

        Returns:
            For each server, the updates made since `base`; empty without one.
        """

        windows = self.windows(sum(elements for elements, _ in used))

        def one(shard: int, part: torch.Tensor) -> int | None:
            version = None if base is None else base[shard]
            about = {"do": "push", "shard": shard, "position": position, "settings": list(settings)}
            head = {**about, "worker": worker, "clock": clock, "base": version}
            head |= {"share": share, "complete": complete, "seed": seed + shard}
            head["used"] = [bool(each) for _, _, each in _within(used, windows[shard])] if used else []
            self._pushed[shard] = head, [part]
            staleness: int | None = self._ask(shard, *self._pushed[shard])[0].get("staleness")
            return staleness

        return [each for each in self._of_each(one, parts) if each is not None]

    def measure(
        self, position: int, copies: Sequence[tuple[int, int]], decision: Decision, patience: float
    ) -> float | None:
        """Return the sum of squares of the mean gradient of a round; None if it is not known any more.

        Args:
            position: This rank's place in its worker.
            copies: Numbers of consecutive elements of the vector, and the ranks of a worker that have each.
            decision: What the board answered.
            patience: Seconds to wait for contributions that were lost with a server.
        """
        of_round = {**_of_round(decision), "patience": patience, "position": position}

        def one(shard: int, window: slice) -> float | None:
            here = [(stop - start, ranks) for start, stop, ranks in _within(copies, window)]
            reply, _ = self._ask(shard, {"do": "measure", "shard": shard, **of_round, "copies": here})
            square: float | None = reply["square"]
            return square

        squares = self._of_each(one, self.windows(sum(elements for elements, _ in copies)))
        known = [each for each in squares if each is not None]
        return sum(known) if len(known) == len(squares) else None

    def pull(
        self,
        position: int,
        vector: torch.Tensor,
        decision: Decision,
        patience: float,
        *,
        factor: float = 1.0,
        codec: Codec | None = None,
        base: Sequence[int] = (),
    ) -> list[int]:
        """Take the present values, or the view of them that workers have (`shard.py`).

        Args:
            position: This rank's place in its worker.
            vector: `[elements]`, fp32, on the CPU; gets the values.
            decision: What the board answered; its round is applied first.
            patience: Seconds to wait for contributions that were lost with a server.
            factor: What the mean of the round is multiplied by; equal for all its members.
            codec: Decodes what servers send in place of values.
            base: For each server, the version of the values in `vector`; empty if there are none.

        Returns:
            For each server, the version of its values.
        """
        of_round = {**_of_round(decision), "patience": patience, "position": position}

        def one(shard: int, window: slice) -> tuple[int, int]:
            head = {"do": "pull", "shard": shard, **of_round, "factor": factor}
            head |= {"share": None, "complete": 0, "base": base[shard] if base else None}
            head |= {"snapshots": decision.mode.snapshots, "returns": self.returns}
            reply, body = self._ask(shard, head, into=vector[window])
            if codec is not None and "payloads" in reply:
                sizes = [bytes for bytes, _ in reply["payloads"]]
                for payload, (_, seed) in zip(body.split(sizes), reply["payloads"], strict=True):
                    codec.decode_add(payload, vector[window], seed=seed)
            return reply["version"], reply["returns"]

        self.returns, is_mixed = max(self.returns, decision.mode.returns), True
        while is_mixed:  # another worker may have let some servers go back
            pulled = self._of_each(one, self.windows(len(vector)))
            base = [version for version, _ in pulled]
            most = max((returns for _, returns in pulled), default=0)
            is_mixed, self.returns = most > self.returns, most
        self._pushed.clear()
        return list(base)

    def fetch(self, position: int, vector: torch.Tensor) -> list[tuple[list[dict[str, Any]], torch.Tensor]]:
        """Take the present values and the state of the optimizer.

        Args:
            position: This rank's place in its worker.
            vector: `[elements]`, fp32, on the CPU; gets the values.

        Returns:
            For each server, what `Shard.state` describes, and the tensors' bytes.
        """

        def one(shard: int, window: slice) -> tuple[list[dict[str, Any]], torch.Tensor]:
            reply, body = self._ask(shard, {"do": "fetch", "shard": shard, "position": position})
            bytes = 4 * (window.stop - window.start)
            vector[window] = body[:bytes].view(torch.float32)
            return reply["state"], body[bytes:]

        return self._of_each(one, self.windows(len(vector)))

    def close(self) -> None:
        """End all connections."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._threads.shutdown(wait=False)

    def windows(self, elements: int) -> list[slice]:
        """Return the elements of each server's shard of a vector; the last servers may have none."""
        part = -(-elements // (self.number * _ALIGNED)) * _ALIGNED
        return [slice(start, min(start + part, elements)) for start in range(0, elements, max(part, 1))]

    def _end(self) -> None:
        """End all servers that live."""
        for address in self._addresses:
            with contextlib.suppress(OSError, ServerError):
                channel = connect(address, self._token)
                ask(channel, {"do": "end"})
                channel.close()

    def _of_each(self, one: Callable[[int, Part], Result], parts: Sequence[Part]) -> list[Result]:
        """Call a function with each shard and its part, at the same time; return the results in order."""

        def run(shard: int, part: Part) -> Result:
            take_device()
            return one(shard, part)

        pending = [self._threads.submit(run, shard, part) for shard, part in enumerate(parts)]
        return [each.result() for each in pending]

    def _ask(
        self,
        shard: int,
        head: Mapping[str, Any],
        body: Sequence[torch.Tensor] = (),
        into: torch.Tensor | None = None,
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """Ask the server of a shard, or the next one if it is dead."""
        while True:
            try:
                if shard not in self._channels:
                    address = self._addresses[self._asked[shard]]
                    self._channels[shard] = connect(address, self._token)
                    self._channels[shard].limit(2 * self.timeout)
                    if shard in self._pushed and head["do"] in ("measure", "pull"):
                        ask(self._channels[shard], *self._pushed[shard])
                return ask(self._channels[shard], head, body, into)
            except OSError as error:
                self._turn_to_next(shard, error)

    def _turn_to_next(self, shard: int, error: OSError) -> None:
        """Let the server that keeps the copy of a shard be asked.

        Raises:
            ServerError: There is none.
        """
        if (channel := self._channels.pop(shard, None)) is not None:
            channel.close()
        asked, own = self._asked[shard], max(shard, 0)
        host, port = self._addresses[asked]
        if not self._mirrored or asked != own:
            raise ServerError(
                f"parameter server {asked} at {host}:{port} cannot be reached: {error}; "
                + ("nor can the one before it" if asked != own else "mirror=1 would keep a copy of its part")
            ) from error
        self._asked[shard] = (own + 1) % self.number


def connect(address: tuple[str, int], token: str) -> Channel:
    """Return a channel to a server.

    Raises:
        OSError: It cannot be reached, or does not take the token.
        ServerError: It does not know the token.
    """
    try:
        return dial(address, token.encode(), SERVER, _CONNECT)
    except ChannelStrangerError as error:
        raise ServerError(
            "what listens at the address of a parameter server is none of this training"
        ) from error


def ask(
    channel: Channel,
    head: Mapping[str, Any],
    body: Sequence[torch.Tensor] = (),
    into: torch.Tensor | None = None,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Send a message to a server, and receive the reply; arguments as for a Channel.

    Raises:
        OSError: The server is gone.
        ServerError: It refuses.
    """
    channel.send(head, body)
    reply, received = channel.receive_with_body(into)
    if "refused" in reply:
        raise ServerError(reply["refused"])
    return reply, received


def _of_round(decision: Decision) -> dict[str, Any]:
    return {name: getattr(decision, name) for name in ("round", "members", "weights", "staleness", "lost")}


def _within(runs: Sequence[tuple[int, int]], window: slice) -> Iterator[tuple[int, int, int]]:
    """Yield the first and last element of each run within a window, and the run's number."""
    start = 0
    for elements, number in runs:
        first, stop = max(start, window.start), min(start + elements, window.stop)
        if first < stop:
            yield first, stop, number
        start += elements
