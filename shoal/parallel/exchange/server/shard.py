"""A part of the values that a server holds, with the optimizer that updates them.

The values that workers have, where servers send them less than their own.

After each update a server encodes the difference between its values and the view, and adds to the view what a
worker decodes of it. So what a payload leaves out is in the next difference, and the view depends on the
updates alone: all workers that have the same version have equal bits, and so has the copy on another server.

    version of a worker's view    what a pull gets
    at most a few updates old     the payloads since then, which it adds to its own view
    older, or none                the view itself
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch

from shoal.collectives import Codec, codec_of
from shoal.parallel.exchange.server.protocol import Blueprint, ServerError
from shoal.spec.plan import Compression


class Payload(NamedTuple):
    """What brings a view from one version to the next.

    Attributes:
        before: The version before.
        version: The version after.
        content: Bytes that a Codec decodes; `version` is its seed.
    """

    before: int
    version: int
    content: torch.Tensor


@final
class View:
    """The values `[elements]` that workers have.

    Args:
        codec: Encodes differences.
        values: The first values of the server, which workers get whole.

    Attributes:
        values: The view of the last version; it is replaced, not changed, and so needs no copy to be sent.
    """

    def __init__(self, codec: Codec, values: torch.Tensor) -> None:
        self.values = values.clone()
        self._codec = codec
        self._payloads: list[Payload] = []

    def follow(self, values: torch.Tensor, before: int, version: int) -> None:
        """Go on to the values of a server after an update."""
        difference = values - self.values
        content = torch.empty(self._codec.payload(len(values)), dtype=torch.uint8)
        written = self._codec.encode(difference, content, seed=version)
        content = content[:written].clone() if written < len(content) else content
        self.values = self.values.clone()
        self._codec.decode_add(content, self.values, seed=version)
        self._payloads.append(Payload(before, version, content))
        while self._payloads and sum(each.content.nbytes for each in self._payloads) >= values.nbytes:
            del self._payloads[0]  # the view itself is not longer than all of them

    def since(self, version: int) -> list[Payload] | None:
        """Return the payloads that bring the view of a version to the last one; None if some are gone."""
        if self._payloads and self._payloads[-1].version == version:
            return []
        places = [place for place, each in enumerate(self._payloads) if each.before == version]
        return self._payloads[places[0] :] if places else None


_NONE = Compression()


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a worker has sent.

    Attributes:
        vector: `[elements]`, fp32: a gradient, or what a worker's steps changed; or its payload, uint8.
        settings: For each group of the optimizer, its learning rate `lr`, and what else changes.
        seed: The seed of a payload.
        used: For each run, whether it has a gradient; empty if all have. Others are left as they are, with
            their state, as torch's optimizers leave parameters without a gradient.
    """

    vector: torch.Tensor
    settings: Sequence[Mapping[str, float]]
    seed: int = 0
    used: Sequence[bool] = ()


class _Snapshot(NamedTuple):
    """Values, and the optimizer's state of each of its parameters."""

    values: torch.Tensor
    states: Sequence[Mapping[str, Any]]


@final
class Shard:
    """Values `[elements]` in fp32, their optimizer, and what workers have sent and is not applied yet.

    Threads use it under `lock`, and wait for contributions on it.

    Args:
        blueprint: The optimizer.
        values: The first values.
        compression: How contributions come, and what workers get in place of the values.

    Attributes:
        lock: Held by the thread that reads or changes anything here.
        version: Updates made, with returns to a snapshot.
        rounds: Rounds closed.
        returns: Number of times that it has gone back to a snapshot.
        least: The version before which no values are as they were: none, or the last return to a snapshot.
        view: What workers have, if it is not the values.
        square: The last round whose mean gradient was measured, and the sum of squares of its elements.
    """

    def __init__(self, blueprint: Blueprint, values: torch.Tensor, compression: Compression = _NONE) -> None:
        if len(values) != blueprint.elements:
            raise ServerError(f"a shard of {blueprint.elements} elements was sent {len(values)}")
        self.lock = threading.Condition()
        self.version = self.rounds = self.least = 0
        self._taken = self.returns = 0
        self._newest: _Snapshot | None = None
        self._before: _Snapshot | None = None  # the snapshot before the newest one
        self._applied: set[int] = set()  # shares whose contribution was applied by itself
        self._complete = 0  # all shares before it are finished
        self.values = values
        self._codec = None if compression.kind == "none" else codec_of(compression)
        self.view = None if self._codec is None else View(self._codec, values)
        self._blueprint = blueprint
        self._optimizer = blueprint.build(values)
        self._parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        self._waiting: dict[tuple[int, int], Contribution] = {}
        self._merged: tuple[int, Contribution] | None = None
        self.square: tuple[int, float] | None = None

    def has_applied(self, share: int, complete: int) -> bool:
        """Return whether a contribution of a share was applied by itself, whichever worker sent it.

        Args:
            share: The share.
            complete: A share before which all are finished; these need not be remembered.
        """
        if complete > self._complete:
            self._complete = complete
            self._applied = {each for each in self._applied if each >= complete}
        return share < self._complete or share in self._applied

    def note_applied(self, share: int) -> None:
        """Remember that the contribution of a share was applied by itself."""
        self._applied.add(share)

    def received(
        self, body: torch.Tensor, settings: Sequence[Mapping[str, float]], seed: int, used: Sequence[bool]
    ) -> Contribution:
        """Return the contribution that came as bytes.

        Raises:
            ServerError: It is not for this shard.
        """
        if used and len(used) != len(self._parameters):
            raise ServerError(f"a shard of {len(self._parameters)} parameters was told of {len(used)}")
        if self._codec is None:
            return Contribution(body.view(torch.float32), settings, used=used)
        most = self._codec.payload(len(self.values))
        if len(body) > most or (self._codec.compression.has_fixed_size and len(body) != most):
            raise ServerError(
                f"a shard of {len(self.values)} elements was sent a payload of {len(body)} bytes"
            )
        return Contribution(body, settings, seed, used)

    def decoded(self, contribution: Contribution) -> Contribution:
        """Return a contribution with its vector in fp32."""
        if self._codec is None:
            return contribution
        vector = torch.empty_like(self.values)
        self._codec.decode(contribution.vector, vector, seed=contribution.seed)
        return replace(contribution, vector=vector)

    def keep(self, worker: int, clock: int, contribution: Contribution) -> None:
        """Keep what a worker sent at its clock until its round is closed."""
        self._waiting[worker, clock] = contribution
        self.lock.notify_all()

    def can_merge(self, round: int, members: Sequence[tuple[int, int]]) -> bool:
        """Return whether the contributions of a round, by worker and clock, have all come."""
        if self._merged is not None and self._merged[0] == round:
            return True
        return all(member in self._waiting for member in members)

    def forget(self, workers: Sequence[int]) -> None:
        """Forget what lost workers sent for rounds that they will not be in."""
        lost = set(workers)
        self._waiting = {key: each for key, each in self._waiting.items() if key[0] not in lost}

    def heed(self, snapshots: int, returns: int) -> bool:
        """Take a snapshot, or go back to the one before the newest, if a worker was told of more than these.

        Returns:
            Whether anything was done.
        """
        if returns > self.returns:
            self.returns = returns
            self._return()
        elif snapshots > self._taken:
            self._taken = snapshots
            states = [_copied(self._optimizer.state.get(each, {})) for each in self._parameters]
            newest = _Snapshot(self.values.clone(), states)
            self._before, self._newest = self._newest or newest, newest
        else:
            return False
        return True

    @torch.no_grad()
    def _return(self) -> None:
        self.version += 1
        self.least = self.version
        self._newest = self._before
        if self._before is not None:
            self.values.copy_(self._before.values)
            self._optimizer.state.clear()
            for parameter, state in zip(self._parameters, self._before.states, strict=True):
                if state:
                    self._optimizer.state[parameter] = _copied(state)
        if self._codec is not None:
            self.view = View(self._codec, self.values)

    def merge(self, round: int, members: Sequence[tuple[int, int]], weights: Sequence[float]) -> Contribution:
        """Return the weighted mean of the contributions of a round; they wait no more.

        They are added in the given order, so that all runs with equal contributions have equal bits.
        Contributions that are missing, or have weight 0, are left out.
        """
        if self._merged is None or self._merged[0] != round:
            self._merged = round, self._mean(members, weights)
        return self._merged[1]

    def measure(self, round: int, contribution: Contribution, copies: Sequence[tuple[int, int]]) -> None:
        """Note the sum of squares of a round's mean gradient.

        Args:
            round: The round.
            contribution: What `merge` returned.
            copies: Numbers of consecutive elements, and on how many ranks of a worker each of them lies.
        """
        square = 0.0
        if len(contribution.vector):
            parts = contribution.vector.split([elements for elements, _ in copies])
            for part, (_, ranks) in zip(parts, copies, strict=True):
                square += torch.linalg.vector_norm(part, dtype=torch.float64).item() ** 2 / ranks
        self.square = round, square

    def _mean(self, members: Sequence[tuple[int, int]], weights: Sequence[float]) -> Contribution:
        total, settings = None, None
        sum_of_weights = 0.0
        used: list[bool] = [False] * len(self._parameters)
        for (worker, clock), weight in zip(members, weights, strict=True):
            contribution = self._waiting.pop((worker, clock), None)
            if contribution is None or weight <= 0:
                continue
            sum_of_weights += weight
            settings = settings or contribution.settings
            own = contribution.used or [True] * len(used)
            used = [one or other for one, other in zip(used, own, strict=True)]
            if self._codec is not None:
                total = torch.zeros_like(self.values) if total is None else total
                self._codec.decode_add(contribution.vector, total, factor=weight, seed=contribution.seed)
            elif total is None:
                total = contribution.vector.mul_(weight)
            else:
                total.add_(contribution.vector, alpha=weight)
        if total is None or settings is None:
            return Contribution(torch.zeros(0), [])
        return Contribution(total.div_(sum_of_weights), settings, used=used)

    @torch.no_grad()
    def update(self, contribution: Contribution, version: int, scale: float = 1.0) -> None:
        """Step the optimizer with a gradient, if there is one; go on to a version.

        Args:
            contribution: The gradient and the groups' settings.
            version: The version after it.
            scale: Factor on the learning rates.
        """
        before, self.version = self.version, version
        self._merged = None
        if len(contribution.vector):
            self._step(contribution, scale)
        if self.view is not None:
            self.view.follow(self.values, before, version)

    def _step(self, contribution: Contribution, scale: float) -> None:
        blueprint, optimizer = self._blueprint, self._optimizer
        blueprint.set_groups(optimizer, contribution.settings, scale)
        parts = contribution.vector.split([elements for _, elements in blueprint.runs])
        used = contribution.used or [True] * len(parts)
        for parameter, part, is_used in zip(self._in_order(), parts, used, strict=True):
            parameter.grad = part if is_used else None
        optimizer.step()
        optimizer.zero_grad()

    def state(self) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
        """Return the state of the optimizer.

        Returns:
            For each run, the key, type and number of elements of each tensor; and these tensors.
        """
        described: list[dict[str, Any]] = []
        tensors: list[torch.Tensor] = []
        for parameter in self._in_order():
            here = {
                key: value
                for key, value in self._optimizer.state.get(parameter, {}).items()
                if isinstance(value, torch.Tensor)
            }
            described.append({key: [str(value.dtype), list(value.shape)] for key, value in here.items()})
            tensors += [value.contiguous() for value in here.values()]
        return described, tensors

    def take_state(self, described: Sequence[Mapping[str, Any]], body: torch.Tensor) -> None:
        """Go on with the state that `state` returned, its tensors as bytes one after another."""
        at = 0
        for parameter, here in zip(self._in_order(), described, strict=True):
            state: dict[str, torch.Tensor] = {}
            for key, (name, shape) in here.items():
                dtype = getattr(torch, name.removeprefix("torch."))
                empty = torch.empty(shape, dtype=dtype)
                bytes = empty.numel() * empty.element_size()
                empty.view(-1).view(torch.uint8).copy_(body[at : at + bytes])
                at += bytes
                state[key] = empty
            if state:
                self._optimizer.state[parameter] = state

    def _in_order(self) -> list[torch.nn.Parameter]:
        """Return the parameters in the order of the runs."""
        return sorted(self._parameters, key=lambda each: each.storage_offset())


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in state.items()}
