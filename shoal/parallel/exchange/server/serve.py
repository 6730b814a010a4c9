"""A server: a process that holds shards, and, if it is the first one, the board.

    client             server                                                the next server, if it mirrors
    join, leave    ->  board
    begin          ->  makes the shard, unless it is there               ->  makes the copy
    push           ->  keeps what came for its round, or applies it      ->  applies the same
    arrive         ->  answers when the worker may go on                 ->  keeps the state of the board
    retire         ->  answers when the end of the training is saved, or the worker has to save it
    measure        ->  averages a round; sends the sum of squares
    pull           ->  takes a snapshot, or returns to the last one      ->  does the same
                       averages and applies a round once; sends values   ->  applies the same average
    fetch          ->  sends values and the optimizer's state
    end            ->  ends the process

A thread serves each connection. The copy has applied an update before any worker is told of it, so that after
a server's death the next one goes on with the same bits; workers send it again what the dead one may have
had.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, final

import torch

from shoal.channel import Channel, challenge
from shoal.errors import CommunicationError
from shoal.listener import Listener, listen
from shoal.parallel.exchange.server.client import ask, connect
from shoal.parallel.exchange.server.coordinator import Board
from shoal.parallel.exchange.server.protocol import SERVER, Blueprint, ServerError, Terms
from shoal.parallel.exchange.server.shard import Contribution, Shard
from shoal.spec.plan import Compression

_Reply = tuple[dict[str, Any], Sequence[torch.Tensor]]


@final
class Server:
    """A parameter server. `run` serves until a worker ends it.

    Args:
        index: Its number among the servers.
        token: A word that all processes of the training know; connections without it are closed.
        host: Address of the interface to listen on.
        port: Port to listen on; 0 for any free one.
        record: Called with a JSON object for each contribution that is applied.

    Attributes:
        address: Host and port that it listens on.
    """

    def __init__(
        self,
        index: int,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        record: Callable[[dict[str, Any]], object] = lambda applied: None,
    ) -> None:
        self._index = index
        self._token = token
        self._record = record
        self._listening = listen(host, port)
        name = self._listening.getsockname()
        self.address: tuple[str, int] = (name[0], name[1])
        self._lock = threading.Lock()
        self._shards: dict[tuple[int, int], Shard] = {}
        self._making: dict[int, threading.Lock] = {}
        self._board: Board | None = None
        self._board_kept: Mapping[str, Any] | None = None
        self._next: tuple[str, int] | None = None
        self._copy: Channel | None = None
        self._copying = threading.Lock()
        self._listener: Listener[None] | None = None
        self._channels: set[Channel] = set()
        self._is_over = threading.Event()
        self._last_heard = time.monotonic()

    def mirror_to(self, address: tuple[str, int]) -> None:
        """Let the server at this address keep a copy of all that this one holds."""
        self._next = address

    def run(self, patience: float = 600.0, is_asked_to_stop: Callable[[], bool] = lambda: False) -> None:
        """Serve until a worker ends the training.

        Args:
            patience: Seconds without any connection after which it gives up.
            is_asked_to_stop: Whether to end as soon as all workers are gone.

        Raises:
            ServerError: All workers are gone before the end.
        """
        self._listener = Listener(
            self._listening, lambda: challenge(self._token.encode(), SERVER), self._admit
        )
        while not self._is_over.wait(1.0):
            with self._lock:
                if self._channels:
                    self._last_heard = time.monotonic()
                elif is_asked_to_stop():
                    break
                elif time.monotonic() > self._last_heard + patience:
                    self.close()
                    raise ServerError(
                        f"parameter server {self._index} has had no worker for {patience:g} s: all are gone"
                    )
        self.close()

    def close(self) -> None:
        """End all connections."""
        self._is_over.set()
        if self._listener is None:
            self._listening.close()
        else:
            self._listener.close()
        with self._lock:
            for channel in self._channels:
                channel.close()
            self._channels.clear()

    def _admit(self, connected: socket.socket, _: None) -> None:
        channel = Channel(connected)
        with self._lock:
            self._channels.add(channel)
        try:
            threading.Thread(target=self._serve, args=(channel,), daemon=True).start()
        except RuntimeError:  # no thread
            with self._lock:
                self._channels.discard(channel)
            raise

    def _serve(self, channel: Channel) -> None:
        """Answer the messages of a connection until it ends."""
        worker: int | None = None  # whose worker the board hears through this connection
        try:
            while not self._is_over.is_set():
                head, body = channel.receive_with_body()
                try:
                    reply, tensors = self._handle(head, body)
                except ServerError as error:
                    reply, tensors = {"refused": str(error)}, ()
                if head["do"] in ("join", "arrive", "retire"):
                    worker = reply.get("worker", head.get("worker"))
                channel.send(reply, tensors)
                if head["do"] == "end":
                    self._is_over.set()
        except (OSError, ValueError, KeyError, CommunicationError):
            pass  # the other end is gone, or sent what no client sends
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()
            if worker is not None and self._board is not None and not self._is_over.is_set():
                self._board.leave(worker)

    def _handle(self, head: Mapping[str, Any], body: torch.Tensor) -> _Reply:
        match head["do"]:
            case "join":
                return asdict(self._board_of(head).join()), ()
            case "arrive":
                board = self._board_of(head)
                given = (head[name] for name in ("worker", "clock", "weight", "loss", "failed"))
                return asdict(board.arrive(*given)), ()
            case "retire":
                return {"saves": self._board_of(head).retire(head["worker"])}, ()
            case "leave":
                self._board_of(head).leave(head["worker"], is_last=head["is_last"])
                return {}, ()
            case "begin":
                return self._begin(head, body), ()
            case "push":
                return self._push(head, body), ()
            case "measure":
                return self._measure(head), ()
            case "pull":
                return self._pull(head)
            case "fetch":
                return self._fetch(head)
            case "keep board":
                self._board_kept = head["state"]
                return {}, ()
            case "copy":
                return self._apply_as_copy(head, body), ()
            case "heed":
                shard = self._shard_of(head)
                with shard.lock:
                    shard.heed(head["snapshots"], head["returns"])
                return {}, ()
            case "end":
                return {}, ()
            case other:
                raise ServerError(f"a parameter server was asked to {other!r}, which it cannot do")

    def _board_of(self, head: Mapping[str, Any]) -> Board:
        """Return the board; make it for the first worker, or from the state that was kept here."""
        with self._lock:
            if self._board is None and self._board_kept is not None:
                self._board = Board.of(self._board_kept, keep=lambda state: None)
            if self._board is None:
                if "terms" not in head:
                    raise ServerError("a parameter server has no board, and no worker has joined it")
                self._board = Board(Terms(**head["terms"]), head["first"], self._keep_board)
            board = self._board
        if "terms" in head and Terms(**head["terms"]) != board.terms:
            raise ServerError(
                f"a worker came to parameter servers with {head['terms']}, and they train with "
                f"{asdict(board.terms)}"
            )
        return board

    def _keep_board(self, state: dict[str, Any]) -> None:
        self._to_copy({"do": "keep board", "state": state})

    def _begin(self, head: Mapping[str, Any], body: torch.Tensor) -> dict[str, Any]:
        key = head["shard"], head["position"]
        with self._lock:  # each shard its own: two servers may be copies of each other
            making = self._making.setdefault(head["shard"], threading.Lock())
        with making:
            shard = self._shards.get(key)
            if shard is None:
                blueprint = Blueprint.from_json(head["blueprint"])
                bytes = 4 * blueprint.elements
                compression = Compression.parse(head["compress"])
                shard = Shard(blueprint, body[:bytes].view(torch.float32), compression)
                if "state" in head:
                    shard.take_state(head["state"], body[bytes:])
                if head["shard"] == self._index:
                    self._to_copy(head, [body])
                self._shards[key] = shard
        return {"version": shard.version}

    def _push(self, head: Mapping[str, Any], body: torch.Tensor) -> dict[str, Any]:
        shard, worker, clock = self._shard_of(head), head["worker"], head["clock"]
        contribution = shard.received(body, head["settings"], head["seed"], head["used"])
        with shard.lock:
            if head["base"] is None:
                shard.keep(worker, clock, contribution)
                return {}
            if shard.has_applied(head["share"], head["complete"]):
                return {"staleness": 0}  # it came before, from a lost worker, or through a dead server
            if head["base"] < shard.least:
                return {"staleness": 0}  # its values are gone: the shard has returned to a snapshot
            staleness = shard.version - head["base"]
            contribution = shard.decoded(contribution)
            self._update(shard, head, contribution, 1 / (1 + staleness))
            self._note(head, shard, worker, clock, staleness)
            return {"staleness": staleness}

    def _measure(self, head: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sum of squares of a round's mean gradient; None if later ones were applied since."""
        shard, round = self._shard_of(head), head["round"]
        with shard.lock:
            members = self._wait_for_round(shard, head)
            if shard.rounds <= round and (shard.square is None or shard.square[0] != round):
                shard.measure(round, shard.merge(round, members, head["weights"]), head["copies"])
            is_known = shard.square is not None and shard.square[0] == round
            return {"square": shard.square[1] if is_known and shard.square is not None else None}

    def _pull(self, head: Mapping[str, Any]) -> _Reply:
        shard = self._shard_of(head)
        with shard.lock:
            if shard.heed(head["snapshots"], head["returns"]) and head["shard"] == self._index:
                told = {name: head[name] for name in ("shard", "position", "snapshots", "returns")}
                self._to_copy({"do": "heed", **told})
            if head["members"]:
                self._close_round(shard, head)
            about = {"version": shard.version, "returns": shard.returns}
            if shard.view is None:
                return about, [shard.values.clone()]
            payloads = shard.view.since(head["base"])
            if payloads is None:
                return about, [shard.view.values]
            sizes = [(len(each.content), each.version) for each in payloads]
            return {**about, "payloads": sizes}, [each.content for each in payloads]

    def _close_round(self, shard: Shard, head: Mapping[str, Any]) -> None:
        """Apply the mean of a round's contributions, unless that is done."""
        members = self._wait_for_round(shard, head)
        if shard.rounds > head["round"]:
            return
        for (worker, clock), staleness in zip(members, head["staleness"], strict=True):
            self._note(head, shard, worker, clock, staleness)
        merged = shard.merge(head["round"], members, head["weights"])
        if head["factor"] < 1:
            merged.vector.mul_(head["factor"])
        self._update(shard, head, merged)
        shard.forget(head["lost"])

    @staticmethod
    def _wait_for_round(shard: Shard, head: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Wait until all of a round has come, or the round is applied; return its members."""
        round, members = head["round"], [(worker, clock) for worker, clock in head["members"]]
        expected = [each for each, weight in zip(members, head["weights"], strict=True) if weight > 0]
        shard.lock.wait_for(
            lambda: shard.rounds > round or shard.can_merge(round, expected), timeout=head["patience"]
        )
        return members

    def _update(
        self, shard: Shard, head: Mapping[str, Any], contribution: Contribution, scale: float = 1.0
    ) -> None:
        """Apply a contribution here and to the copy."""
        shard.update(contribution, shard.version + 1, scale)
        if head["share"] is not None:
            shard.note_applied(head["share"])
        else:
            shard.rounds = head["round"] + 1
        if head["shard"] == self._index:
            about = {name: head[name] for name in ("shard", "position", "share", "complete")}
            told = {"version": shard.version, "scale": scale, "settings": contribution.settings}
            told |= {"square": shard.square, "rounds": shard.rounds, "used": list(contribution.used)}
            self._to_copy({"do": "copy", **about, **told}, [contribution.vector])

    def _apply_as_copy(self, head: Mapping[str, Any], body: torch.Tensor) -> dict[str, Any]:
        shard = self._shard_of(head)
        with shard.lock:
            if shard.version >= head["version"]:
                raise ServerError(
                    f"shard {head['shard']} went on here, without the server that it was copied from"
                )
            contribution = Contribution(body.view(torch.float32), head["settings"], used=head["used"])
            shard.update(contribution, head["version"], head["scale"])
            shard.square = None if head["square"] is None else tuple(head["square"])
            shard.rounds = head["rounds"]
            if head["share"] is not None and not shard.has_applied(head["share"], head["complete"]):
                shard.note_applied(head["share"])
        return {}

    def _fetch(self, head: Mapping[str, Any]) -> _Reply:
        shard = self._shard_of(head)
        with shard.lock:
            described, tensors = shard.state()
            values = [shard.values.clone(), *(each.clone() for each in tensors)]
            return {"version": shard.version, "state": described}, values

    def _shard_of(self, head: Mapping[str, Any]) -> Shard:
        key = head["shard"], head["position"]
        with self._lock:
            shard = self._shards.get(key)
        if shard is None:
            raise ServerError(f"parameter server {self._index} does not hold shard {key[0]} of rank {key[1]}")
        return shard

    def _to_copy(self, head: Mapping[str, Any], body: Sequence[torch.Tensor] = ()) -> None:
        """Tell the next server, and wait until it has done it; without one that lives, do nothing."""
        with self._copying:
            if self._next is None:
                return
            try:
                if self._copy is None:
                    self._copy = connect(self._next, self._token)
                ask(self._copy, head, body)
            except OSError:
                self._next = None  # it is dead: nobody keeps a copy any more
            except ServerError:
                self.close()  # workers took this server for dead, and went on with the copy
                raise

    def _note(self, head: Mapping[str, Any], shard: Shard, worker: int, clock: int, staleness: int) -> None:
        if head["position"] == 0:
            applied = {"shard": head["shard"], "update": shard.version, "worker": worker, "clock": clock}
            self._record({**applied, "staleness": staleness, "seconds": time.time()})
