"""Agents as Ray's actors, one on each node of a Ray cluster.

An actor holds the agent's process. If the actor or its node is lost, the attempt fails, and the next one has
an actor on a node that is left or came.
"""

from __future__ import annotations

import contextlib
import importlib
import select
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, final

from shoal.channel import carried
from shoal.errors import ClusterError, MissingExtraError
from shoal.launch.fleet.agent import Agent, Host, Said, start_program

_CONNECT = 10.0  # seconds for a cluster to answer
_WAIT = 0.5  # seconds that an actor waits for bytes before it answers
_AT_ONCE = 1 << 20  # bytes in an answer
_CALLS = 2  # calls of an actor at a time: to read, and to send


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

    def start_agent(self, host: Host, said: Said) -> Agent:
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
        return _agent_of(self._ray, self._ray.remote(_AgentActor).options(**options).remote(), said)

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

    def __init__(self) -> None:
        self._said: deque[bytes] = deque()
        self._ended = ""
        self._agent = start_program([sys.executable, "-m", "shoal.launch.hosts"], self._said.append)

    def read(self) -> tuple[bytes | None, Sequence[bytes]]:
        """Return what comes from the agent within a moment, b"" at the end, and lines of its stderr."""
        data = None
        if select.select([self._agent.stream], [], [], _WAIT)[0]:
            data = b""
            with contextlib.suppress(OSError):
                data = self._agent.stream.recv(_AT_ONCE)
            self._ended = "" if data else self._agent.how_ended()
        return data, [self._said.popleft() for _ in range(len(self._said))]

    def send(self, data: bytes) -> None:
        """Send bytes to the agent."""
        with contextlib.suppress(OSError):
            self._agent.stream.sendall(data)

    def how_ended(self) -> str:
        """Return how the agent ended, once its output has."""
        return self._ended


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


def _agent_of(ray: Any, actor: Any, said: Said) -> Agent:
    """Return the agent that an actor holds."""
    lost = ray.exceptions.RayError

    def read() -> bytes:
        data: bytes | None = None
        while data is None:
            try:
                data, lines = ray.get(actor.read.remote())
            except lost:
                return b""
            for line in lines:
                said(line)
        return data

    def write(data: bytes) -> None:
        with contextlib.suppress(lost):
            ray.get(actor.send.remote(data))  # or the next call might overtake this one

    def how_ended() -> str:
        try:
            return str(ray.get(actor.how_ended.remote()))
        except lost as error:
            return f"its actor is gone: {str(error).splitlines()[0]}"

    def close() -> None:
        carries.close()
        ray.kill(actor)

    carries = contextlib.ExitStack()
    return Agent(carries.enter_context(carried(read, write)), how_ended, close)
