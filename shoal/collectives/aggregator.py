"""The aggregator of in-network reduction: a process that adds up what the hosts of groups send it."""

from __future__ import annotations

import ctypes

from shoal.collectives.ctypes_core import load_core
from shoal.collectives.options import numeric_address
from shoal.collectives.tcp_store import aggregator_secret
from shoal.errors import ConfigError


class Aggregator:
    """Adds up what the hosts of groups send it, and sends the sums back. A context manager.

    It stands where the switch of the network is, on a machine that every host reaches as fast as its own link
    allows. Its memory does not grow with the buffers. A caller proves that it knows the secret in the file
    that SHOAL_AGGREGATOR_SECRET_FILE names; without this variable it takes everyone who reaches its address.
    A group's hosts find each other by a number made from the group's secret.

    Args:
        address: HOST:PORT to listen at; port 0 is one that the system chooses.

    Raises:
        ConfigError: It cannot listen there, the file of its secret cannot be used, or the native core was not
            built.
    """

    def __init__(self, address: str) -> None:
        core = load_core()
        if core is None:
            raise ConfigError(
                "an aggregator needs the native core, which was not built when Shoal was installed",
                possible="a core that was compiled on this system",
                change="install a C++20 compiler (apt-get install g++), and then Shoal again",
            )
        self._core = core
        self._handle = core.aggregator_create(
            numeric_address(address, "--listen").encode(), aggregator_secret()
        )
        if not self._handle:
            raise ConfigError(
                str(core.failure(f"an aggregator at {address}")),
                possible="an address of this machine, with a port that no other program uses",
                change="give another HOST:PORT",
            )

    @property
    def address(self) -> str:
        """HOST:PORT where it listens, as numbers."""
        text = ctypes.create_string_buffer(128)
        self._core.check(self._core.aggregator_address(self._handle, text, len(text)), "the aggregator")
        return text.value.decode()

    def serve(self) -> None:
        """Serve until a signal handler raises, such as KeyboardInterrupt by Ctrl-C.

        Threads of the core do the work from the beginning on; this only waits.
        """
        self._core.check(self._core.aggregator_serve(self._handle), "the aggregator")

    def close(self) -> None:
        """End all sessions: hosts in the middle of an operation fail."""
        handle, self._handle = self._handle, None
        if handle:
            self._core.aggregator_free(handle)

    def __enter__(self) -> Aggregator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
