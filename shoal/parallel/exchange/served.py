"""Updates on parameter servers: a worker sends what it learnt, and takes the values that all workers share.

With `exchange=server` a worker sends the gradient of each step, and the optimizer's step is made on the
servers (Li et al., OSDI 2014). With `exchange=local` and servers it makes `every` steps by itself, and sends
what these changed; the servers make the outer step (`local_updates.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch.optim import SGD, Optimizer

from shoal.checkpoint import Coordinator
from shoal.collectives import Codec, codec_of
from shoal.errors import TrainingError
from shoal.parallel.communication import Axis
from shoal.parallel.exchange.compressed_sums import ErrorMemory, seed_of
from shoal.parallel.exchange.merge_schedule import Outer, OuterState
from shoal.parallel.exchange.served_state import (
    Loaded,
    give_state,
    pack,
    require_elementwise,
    take_state,
    unpack,
)
from shoal.parallel.exchange.server import Blueprint, Decision, Mode, Servers, Terms
from shoal.parallel.exchange.worker_exchange import Progress, Turn, WorkerUpdates
from shoal.parallel.parallel import Parallel
from shoal.record import NullRecorder, Recorder
from shoal.spec.plan import Compression
from shoal.spec.timeline import Kind, Lane, Purpose


@final
class Conversations:
    """Record the conversations of a rank with the servers.

    Args:
        recorder: Recorder of spans; None for none.
        world: All ranks of the worker.
    """

    def __init__(self, recorder: Recorder | None, world: Axis) -> None:
        self._recorder = NullRecorder() if recorder is None else recorder
        self._group = (world.members[world.index],)

    @contextmanager
    def about(self, name: str, bytes: int) -> Iterator[None]:
        """Record a conversation, for which compute waits."""
        group, purpose = self._group, Purpose.DATA
        lane = Lane.COMMUNICATION
        with (
            self._recorder.span(Kind.COLLECTIVE, name, lane=lane, bytes=bytes, group=group, purpose=purpose),
            self._recorder.span(Kind.WAIT, name, bytes=bytes, group=group, purpose=purpose),
        ):
            yield


@final
class Pushes:
    """Make the parts of a vector that servers get.

    What encoding leaves out of a push stays with this rank, and is added to its next one.

    Args:
        codec: Encodes the parts; None to send the vector itself.
        feedback: Share of what was left out of one push that is added to the next.
    """

    def __init__(self, codec: Codec | None, feedback: float) -> None:
        self._codec = codec
        self._memory = ErrorMemory(feedback)
        self._contents: list[torch.Tensor] = []

    def forget(self) -> None:
        """Forget what was left out: the values that it would have changed are gone."""
        self._memory.left = None

    def parts(self, vector: torch.Tensor, windows: Sequence[slice], seed: int) -> list[torch.Tensor]:
        """Return what each server gets; valid until the next call.

        Args:
            vector: `[elements]`, fp32; what was left out before is added to it.
            windows: The elements of each server.
            seed: Seed of the first part; the others have the next ones.
        """
        if self._codec is None:
            return [vector[window] for window in windows]
        if not self._contents:
            sizes = [self._codec.payload(window.stop - window.start) for window in windows]
            self._contents = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self._memory.add_to(vector)
        part = windows[0].stop
        written = self._memory.encode(self._codec, vector, part, self._contents, seed=seed)
        return [content[:bytes] for content, bytes in zip(self._contents, written, strict=True)]


_NONE = Compression()


@final
class ServedUpdates(WorkerUpdates):
    """Step the optimizer of a model on parameter servers, as one worker of several.

        parallel = shoal.parallelize(model, plan.of_worker())
        optimizer = ServedUpdates(parallel, torch.optim.AdamW(parallel.parameters()), servers, terms, ranks)
        while (share := optimizer.share()) is not None:
            ...  # backward of the share-th part of the data
            optimizer.step()

    Args:
        parallel: The model as the ranks of this worker have it.
        optimizer: The optimizer. Its update of an element must depend on no other element.
        servers: The servers.
        terms: What the workers go by.
        ranks: The ranks of this worker.
        outer: Settings of the outer optimizer, for workers that make steps by themselves; None for workers
            that send each gradient.
        first: The first share of the training.
        clip: Norm to which the mean gradient of a round is scaled down; None for none. With an outer gradient
            nothing is.
        compression: What is sent in place of gradients, and of values.
        feedback: Share of what was left out of one push that is added to the next.
        recorder: Recorder of spans.

    Attributes:
        decision: What the servers answered last; None before the first answer.
        worker: This worker's number; -1 before it has joined.
        staleness: Updates that others made between this worker's last values and its last contribution; the
            largest over the servers.
        leads: Whether this worker is the one that validates and saves.
        first: The first share of the training, before this worker has joined.
        finished: Shares that all workers have finished.
        complete: Shares from the first one on that are all finished.
        counted: Those of `finished` that this worker's caller has taken note of.
        loss: Loss of the samples of the next step, which other workers are told; None if it is not known.
        elements: Number of elements in the mean loss of the next step, by which a round weighs its gradient;
            None if all workers have equally many.
        norm: Norm of the mean gradient of this worker's last round, if it is clipped.
        is_local: Whether workers make steps by themselves, and send what these changed.
        mode: How its next contribution is applied.
        failed: Why this worker finds stale gradients harmful, of which the others are told next; "" if not.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: Optimizer,
        servers: Servers,
        terms: Terms,
        ranks: Coordinator,
        *,
        outer: Outer | None = None,
        first: int = 0,
        clip: float | None = None,
        compression: Compression = _NONE,
        feedback: float = 1.0,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(parallel, optimizer)
        require_elementwise(optimizer)
        self._servers = servers
        self._terms, self._ranks = terms, ranks
        self._talk = Conversations(recorder, parallel.axes.world)
        self.is_local = outer is not None
        self._outer = OuterState(parallel.owned)
        self._outer_settings = outer
        self._stepped: Optimizer = optimizer  # what the servers step
        if outer is not None:
            parameters = [each.parameter for each in parallel.owned]
            rate, momentum, _ = outer
            self._stepped = SGD(parameters, lr=rate, momentum=momentum, nesterov=momentum > 0)
        places = [(each.parameter, each.local.numel()) for each in parallel.owned]
        self._blueprint = Blueprint.of(self._stepped, places)
        self._sent = torch.zeros(self._blueprint.elements)
        self._values = torch.zeros(self._blueprint.elements)
        self._compression = compression
        self._codec = None if compression.kind == "none" else codec_of(compression)
        self._pushes = Pushes(self._codec, feedback)
        self._versions: list[int] = []
        self._nbytes = self._values.nbytes  # of the last push; in rounds a pull has as many
        self._settled: torch.Tensor | None = None  # values that were taken to be saved
        self._loaded = Loaded(parallel)
        self._shares: list[int] = []
        self._first_of_shares = first  # of those that it was given last
        self._clock = 0
        self._made = 0  # steps since the last contribution, without those that were left out
        self.first = first
        self.worker = -1
        self.staleness: int = 0
        self.finished = self.complete = self.counted = first
        self.leads = False
        self.decision: Decision | None = None
        self.loss: torch.Tensor | None = None
        self.elements: float | None = None
        self.norm: float | None = None
        self.mode = Mode(in_rounds=terms.has_rounds)
        self.failed = ""
        self._clip = clip if outer is None else None
        # A worker may hold several whole states, as with cp.
        states = ranks.size // parallel.axes.parts.size
        self._copies = [(each.local.numel(), each.family.copies * states) for each in parallel.owned]

    @property
    def outer(self) -> OuterState | None:
        """See `WorkerUpdates.outer`."""
        return self._outer if self.is_local else None

    @property
    def has_merged(self) -> bool:
        """Whether this worker has just taken the servers' values."""
        return self.decision is not None and tuple(self._shares) == self.decision.shares

    @property
    def is_savable(self) -> bool:
        """See `WorkerExchange.is_savable`."""
        return self.has_merged

    @property
    def weighs_by_elements(self) -> bool:
        """See `WorkerExchange.weighs_by_elements`."""
        return not self.is_local and self.mode.in_rounds

    @property
    def mean_loss(self) -> float | None:
        """Mean loss of what all workers sent since this one's last step; None if not known.

        Workers that make steps by themselves know their own losses alone.
        """
        if self.is_local or self.loss is None or self.decision is None:
            return None
        return self.decision.loss

    @property
    def follows(self) -> bool:
        """Whether no element counted in the last step of this worker, and others made the step."""
        return self.elements == 0 and self.mean_loss is not None

    @property
    def clips(self) -> bool:
        """Whether servers clip the mean gradient, so that workers do not clip their own."""
        return self._clip is not None and self.mode.in_rounds

    @property
    def steps_along_gradients(self) -> bool:
        """Whether servers make steps of plain gradient descent: SGD without momentum."""
        return type(self._stepped) is SGD and not any(group["momentum"] for group in self.param_groups)

    @property
    def is_over(self) -> bool:
        """Whether no share is left for this worker."""
        return self.worker >= 0 and not self._shares

    def turn(self, steps: int, position: int, batch: int) -> Turn:
        """See `WorkerExchange.turn`."""
        if self.worker < 0:
            self.first = steps * self._terms.workers
        share = self.share()
        if share is None:
            raise TrainingError("no samples are left for this worker: the others train on the last of them")
        return Turn(share // self._terms.workers, share * batch)

    def progress(self, turn: Turn, batch: int) -> Progress:
        """See `WorkerExchange.progress`."""
        workers, steps = self._terms.workers, self._terms.shares // self._terms.workers
        before, self.counted = self.counted, self.finished
        if self.is_over:
            return Progress(steps, steps * workers * batch, self.finished - before)
        made = min(self.complete // workers, steps - 1)
        return Progress(made, self.complete * batch, self.finished - before)

    def note(self, loss: torch.Tensor, counted: torch.Tensor | None) -> None:
        """See `WorkerExchange.note`."""
        self.loss, self.elements = loss, None if counted is None else counted.item()

    def loss_of_workers(self, own: torch.Tensor) -> torch.Tensor:
        """See `WorkerExchange.loss_of_workers`."""
        if self.mean_loss is None or not (own.isfinite() or self.follows):
            return own
        return torch.full_like(own, self.mean_loss)

    def norm_of_workers(self, own: torch.Tensor) -> torch.Tensor:
        """See `WorkerExchange.norm_of_workers`."""
        return own if self.norm is None or not own.isfinite() else torch.full_like(own, self.norm)

    def share(self) -> int | None:
        """Return the share of the data to train on next; None if none is left. Joins at the first call.

        Raise a TrainingError if other weights were loaded after that.
        """
        if self.worker < 0:
            self._join()
        self._require_pulled()
        if self._settled is not None:  # go on with the values that were pulled
            self._settled = None
            self._unpack(self._values)
            self._parallel.changed()
        return self._shares[0] if self._shares else None

    def make_step(self) -> None:
        """Make a step: on the servers, or by this worker; exchange when it is due."""
        self._require_pulled()
        self._made += 1
        if self.is_local:
            self._inner.step()
        self._advance()

    @torch.no_grad()
    def pass_over(self) -> None:
        """Count a step that this worker leaves out; exchange when it is due."""
        self._require_pulled()
        self._advance()
        self._parallel.changed()

    @torch.no_grad()
    def settle(self) -> None:
        """Take the values and the optimizer's state from the servers, to be saved."""
        if self.worker < 0:
            return
        self._require_pulled()
        self._settled = values = torch.empty_like(self._values)
        fetched = self._servers.fetch(self._ranks.rank, values)
        windows = self._servers.windows(self._blueprint.elements)
        take_state(self._stepped, self._parallel.owned, self._blueprint, windows, fetched)
        self._unpack(values)
        if self.is_local:
            self._outer.take_momentum(self._stepped, self._parallel.owned)
        self._parallel.changed()
        self.show()

    def retire(self) -> bool:
        """See `WorkerExchange.retire`."""
        if self.worker < 0 or self.leads or not self.is_over:
            return False
        leads = self._servers.retire(self.worker) if self._ranks.rank == 0 else False
        self.leads = self._ranks.all_gather_object(leads)[0]
        return self.leads

    def leave(self) -> None:
        """See `WorkerExchange.leave`."""
        if self.worker >= 0 and self._ranks.rank == 0:
            self._servers.leave(self.worker, is_last=self.leads and not self._shares)
        self._servers.close()

    def _join(self) -> None:
        """Join the training, give the servers the first values, and take theirs."""
        ticket = self._servers.join(self._terms, self.first) if self._ranks.rank == 0 else None
        ticket = self._ranks.all_gather_object(ticket)[0]
        assert ticket is not None
        self.worker, self._clock, self.mode = ticket.worker, ticket.clock, ticket.mode
        self._take_shares(ticket.shares)
        self.leads, self.finished, self.counted = ticket.leads, ticket.finished, ticket.finished
        pack(self._parallel.owned, [each.local for each in self._parallel.owned], self._values)
        windows = self._servers.windows(self._blueprint.elements)
        if self.is_local:
            self._outer.give_momentum(self._stepped, self._parallel.owned)
        states = give_state(self._stepped, self._parallel.owned, windows)
        self._servers.begin(self._ranks.rank, self._blueprint, self._values, states, self._compression)
        self._pull(Decision(ticket.shares, 0, 0, self.leads, mode=self.mode))

    def _advance(self) -> None:
        """Finish a share, and exchange if it was the last of those that this worker was given."""
        self._shares.pop(0)
        if self._shares:
            return
        self._push()
        decision = None
        stale = self._ranks.all_gather_object(self.staleness)  # all ranks have pushed
        if self._ranks.rank == 0:
            with self._talk.about("arrive", 0):
                loss = self.loss.item() if self.loss is not None else 0.0
                loss = loss if self._made else math.nan
                each = 1.0 if self.is_local or self.elements is None else self.elements
                weight = self._made * each
                decision = self._servers.arrive(self.worker, self._clock, weight, loss, self.failed)
        decision = self._ranks.all_gather_object(decision)[0]
        assert decision is not None
        self._note(decision, max(stale))
        limit = self._clip if decision.members else None
        factor = self._clipping(decision, limit) if limit is not None else 1.0
        with self._talk.about("pull:values", self._nbytes):
            self._pull(decision, factor)

    def _clipping(self, decision: Decision, limit: float) -> float:
        """Return the factor of a round's mean gradient; all members of the round get the same one.

        If a square is not known any more, the round is applied on all servers, and no factor has an effect.
        """
        with self._talk.about("measure", 0):
            square = self._servers.measure(self._ranks.rank, self._copies, decision, self._terms.patience)
        squares = self._ranks.all_gather_object(square)
        self.norm = None if None in squares else math.sqrt(sum(squares))
        return min(1.0, limit / self.norm) if self.norm else 1.0

    def _pull(self, decision: Decision, factor: float = 1.0) -> None:
        """Take the servers' values, or the view of them that all workers have."""
        returns = self._servers.returns
        self._versions = self._servers.pull(
            self._ranks.rank,
            self._values,
            decision,
            self._terms.patience,
            factor=factor,
            codec=self._codec,
            base=self._versions,
        )
        if self._servers.returns > returns:
            self._pushes.forget()
        self._unpack(self._values)

    def _push(self) -> None:
        """Send the servers what this worker has learnt, if it has."""
        if not self._made:
            return
        owned, used = self._parallel.owned, []
        if self.is_local:
            pack(owned, [each.local for each in owned], self._sent)
            torch.sub(self._values, self._sent, out=self._sent)
            outer, terms = self._outer_settings, self._terms
            assert outer is not None
            steps = min(terms.shares, self.finished + terms.workers * terms.every) / terms.workers
            settings = [{"lr": outer.rate, "momentum": outer.momentum_after(steps, terms.every)}]
        else:
            pack(owned, [each.gradient for each in owned], self._sent)
            settings = [{"lr": group["lr"]} for group in self.param_groups]
            used = [(each.local.numel(), each.gradient is not None) for each in owned]
        seed = seed_of(self._clock, self.worker * self._ranks.size + self._ranks.rank)
        parts = self._pushes.parts(self._sent, self._servers.windows(len(self._sent)), seed)
        self._nbytes = sum(part.nbytes for part in parts)
        with self._talk.about("push:gradients", self._nbytes):
            stale = self._servers.push(
                self._ranks.rank,
                parts,
                settings,
                worker=self.worker,
                clock=self._clock,
                base=None if self.mode.in_rounds else self._versions,
                share=self._first_of_shares,
                complete=self.complete,
                seed=seed,
                used=used,
            )
        self.staleness = max(stale, default=0)

    def _require_pulled(self) -> None:
        """Check weights that were loaded; beside steps of its own they count as what this worker changed."""
        if self.worker >= 0 and not (self.is_local and self._made):
            self._loaded.require(self._values if self._settled is None else self._settled)

    def _note(self, decision: Decision, staleness: int) -> None:
        """Take note of what the servers answered."""
        workers = [worker for worker, _ in decision.members]
        if self.worker in workers:
            staleness = decision.staleness[workers.index(self.worker)]
        self.staleness = staleness
        self.decision, self.leads, self.mode = decision, decision.leads, decision.mode
        self.failed, self.norm = "", None
        self.finished, self.complete = decision.finished, decision.complete
        self._take_shares(decision.shares)
        self._clock += 1
        self._made = 0

    def _take_shares(self, shares: Sequence[int]) -> None:
        self._shares = list(shares)
        self._first_of_shares = min(shares, default=self._first_of_shares)

    def _unpack(self, vector: torch.Tensor) -> None:
        unpack(self._parallel.owned, vector)
        if self.is_local:
            self._outer.set_anchors(self._parallel.owned)
