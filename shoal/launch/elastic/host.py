"""A host of a training on several, as the launcher sees it that leads, and what the end of a link says."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.channel import Channel
from shoal.release import release

SILENCE = 15.0
"""Seconds without a message after which a host is gone."""

BEAT = 1.0
"""Seconds between two messages of a host that has nothing to tell."""

_PATIENCE = 2.0  # seconds for a system to answer


@dataclass(eq=False)
class Host:
    """A host that joined, or is to.

    Attributes:
        link: The link to its launcher; None for the host of this process.
        name: Its name.
        address: Its address, as the launcher that leads reaches it.
        ranks: Number of ranks that it can start; 0 until it has told.
        port: The port of its launcher.
        run: The absolute path of the run that it was started for, if that was given.
        version: Its version of Shoal.
        settings: The settings of the training that it was given; all of them on the host that leads.
        session: What it is called in this run, and may use the store as.
        numbers: Its ranks; empty while it stands by.
        is_begun: Whether its ranks were started.
        votes: Whether it was one of those that trained last.
        is_leaving: Whether it ends once its ranks have left.
        stopped: Those of its ranks whose processes are stopped.
        apart: Addresses of launchers that it could not reach, when it was asked last.
        heard: Time of its last message.
        store: Of an agent: the address at which other hosts reach it, and the port of the store if it has it.
        how_ended: Of an agent: tells how the program ended that links it.
        gone: How it was lost, before its ranks had ended; None if it was not.
    """

    link: Channel | None
    name: str
    address: str
    ranks: int = 0
    port: int = 0
    run: str = ""
    version: str = field(default_factory=release)
    settings: Mapping[str, Any] = field(default_factory=dict)
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    numbers: range = range(0)
    is_begun: bool = False
    votes: bool = False
    is_leaving: bool = False
    stopped: list[int] = field(default_factory=list)
    apart: list[tuple[str, int]] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)
    store: tuple[str, int] = ("", 0)
    how_ended: Callable[[], str] | None = None
    gone: Gone | None = None

    def introduce(self, told: Mapping[str, Any]) -> None:
        """Take what the host tells of itself."""
        self.name = str(told.get("name", self.name))
        self.ranks = int(told.get("ranks", 0))
        self.port = int(told.get("port", 0))
        self.run = str(told.get("run", ""))
        self.version = str(told.get("version", "an older one"))
        self.settings = dict(told.get("settings", {}))
        address, port = told.get("store", self.store)
        self.store = str(address), int(port)

    def __str__(self) -> str:
        return f"host {self.address}" + (f" ({self.name})" if self.name else "")

    def tell(self, **message: Any) -> None:
        """Send a message; if that fails, the thread that listens to the host notices it."""
        if self.link is not None:
            with contextlib.suppress(OSError):
                self.link.send(message)

    def unlike(self, leads: Host) -> str:
        """Return why this host cannot train with the one that leads; "" if it can."""
        if self.version != leads.version:
            ours = leads.version
            return f"it has Shoal {self.version}, and the host that leads has {ours}: install the same on all"
        if self.run and self.run != leads.run:
            return (
                f"it was started for the run {self.run}, and the host that leads trains {leads.run}: give "
                "each run a --rendezvous of its own, or all hosts the same --run"
            )
        if self.ranks != leads.ranks:
            ours = str(leads.ranks)
            return f"it has {self.ranks} ranks, and the others have {ours}: give all the same --nproc"
        for key, value in self.settings.items():
            if key in leads.settings and value != leads.settings[key]:
                own, ours = json.dumps(value), json.dumps(leads.settings[key])
                return f"it was given {key}={own}, and the host that leads {ours}: give all hosts the same"
        return ""


@dataclass(frozen=True, slots=True)
class Gone:
    """The end of a link.

    Attributes:
        why: What is known, as a sentence without its subject.
        is_dead: Whether the launcher of the host has surely ended.
    """

    why: str
    is_dead: bool


def end_of(host: Host, error: OSError, closes: str) -> Gone:
    """Return what the end of a link says of the host."""
    if isinstance(error, TimeoutError):
        return Gone(f"was silent for {SILENCE:g} s", is_dead=False)
    if host.how_ended is not None:
        return Gone(f"{'was lost' if host.is_begun else 'did not start'}: {host.how_ended()}", is_dead=False)
    is_there = answers((host.address, host.port))
    if is_there is False:
        return Gone("ended", is_dead=True)
    if closes:
        return Gone(f"closed its link: {closes}", is_dead=False)
    cut = "lost its link, and its launcher is there" if is_there else "lost its link, and does not answer"
    return Gone(cut, is_dead=False)


def answers(address: tuple[str, int]) -> bool | None:
    """Return whether a program listens at an address; None if not even its system answers.

    A link that ends says only that it has ended: its process may have, or a machine between the two may have
    forgotten the connection.
    """
    try:
        socket.create_connection(address, timeout=_PATIENCE).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True
