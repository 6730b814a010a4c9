"""Agents as Ray's actors, one on each node of a Ray cluster.

An actor holds the agent's process. If the actor or its node is lost, the attempt fails, and the next one has
an actor on a node that is left or came.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from shoal.errors import ClusterError, MissingExtraError
from shoal.fleet.channel import AgentChannel, Event, ProcessChannel
from shoal.fleet.hosts import Host

_CONNECT = 10.0  # seconds for a cluster to answer
_WAIT = 0.5  # seconds that an actor waits for lines before it answers
_AT_ONCE = 1000  # events in an answer
_CALLS = 3  # calls of an actor at a time: to read, to send, to hang up


@final
class RayCluster:
    """A Ray cluster, on whose nodes agents are started.

    Args:
        address: Address of the cluster, as `ray.init` takes it; "auto" for the one that this host is in.
        ranks: Number of CPUs, and of GPUs if the nodes have them, that an agent reserves; None for one CPU
            and all GPUs of its node.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: There is no cluster at the address.
    """

    def __init__(self, address: str, ranks: int | None) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise MissingExtraError("shoal launch ray", package="ray", extra="ray") from None
        self._ranks = ranks
        _require_reachable(address)
        try:
            self._ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _no_cluster(address, str(error).splitlines()[0]) from error

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.shutdown()

    def hosts(self) -> list[Host]:
        """Return the nodes of the cluster that are there now."""
        nodes = self._nodes()
        return [Host(name, address=nodes[name]["NodeManagerAddress"]) for name in sorted(nodes)]

    def open_channel(self, host: Host, told: Callable[[Event], object]) -> AgentChannel:
        """Start an agent on a node, as an actor."""
        node = self._nodes().get(host.name, {})
        gpus = int(node.get("Resources", {}).get("GPU", 0))
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            node_id=node.get("NodeID", ""), soft=False
        )
        options = {
            "num_cpus": self._ranks or 1,
            "num_gpus": min(self._ranks or gpus, gpus),
            "max_concurrency": _CALLS,
            "scheduling_strategy": strategy,
        }
        actor = self._ray.remote(_AgentActor).options(**options).remote(host.name)
        return _ActorChannel(self._ray, host.name, actor, told)

    def _nodes(self) -> Mapping[str, Mapping[str, Any]]:
        """The nodes by name: that of the host, with some of the node's id where it is not the only one."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        names = [node["NodeManagerHostname"] for node in alive]
        return {
            name if names.count(name) == 1 else f"{name}-{node['NodeID'][:6]}": node
            for name, node in zip(names, alive, strict=True)
        }


class _AgentActor:
    """Holds the process of an agent, in the process of an actor."""

    def __init__(self, name: str) -> None:
        self._events: queue.Queue[Event] = queue.Queue()  # a SimpleQueue waits for ever after a signal (3.11)
        command = [sys.executable, "-m", "shoal.launch"]
        self._channel = ProcessChannel(name, command, self._events.put)

    def read(self) -> Sequence[tuple[str, bytes]]:
        """Return the next events; none if none come within a moment."""
        events = []
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=_WAIT)
            while True:
                events.append((event.kind, event.line))
                if len(events) == _AT_ONCE:
                    break
                event = self._events.get_nowait()
        return events

    def send(self, line: bytes) -> None:
        """Send a line to the agent."""
        self._channel.send(line)

    def hang_up(self) -> None:
        """End the agent's input."""
        self._channel.hang_up()


def _require_reachable(address: str) -> None:
    """Raise ClusterError if nothing answers at an address; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return  # a name that Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT).close()
    except OSError as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, reason: str) -> ClusterError:
    return ClusterError(
        f"there is no Ray cluster at {address}: {reason}",
        possible="the address of a cluster that runs, or auto on one of its nodes",
        change="start one (ray start --head), or correct --address",
    )


@final
class _ActorChannel(AgentChannel):
    """A channel to the agent that an actor holds."""

    def __init__(self, ray: Any, host: str, actor: Any, told: Callable[[Event], object]) -> None:
        self._ray = ray
        self._host = host
        self._actor = actor
        self._told = told
        self._is_closed = False
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, line: bytes) -> None:
        """Send a line to the agent; if it is gone, do nothing."""
        self._actor.send.remote(line)

    def hang_up(self) -> None:
        """Tell the agent that nothing more is sent: its ranks save, and end."""
        self._actor.hang_up.remote()

    def close(self) -> None:
        """End the actor."""
        self._is_closed = True
        self._ray.kill(self._actor)

    def _read(self) -> None:
        while not self._is_closed:
            try:
                events = self._ray.get(self._actor.read.remote())
            except self._ray.exceptions.RayError as error:
                reason = f"its actor is gone: {str(error).splitlines()[0]}"
                self._told(Event(self._host, "ended", reason.encode()))
                return
            for kind, line in events:
                self._told(Event(self._host, kind, line))
                if kind == "ended":
                    return
