"""What a fleet and the agent on each of its machines tell each other: lines of text.

    fleet                             agent
      Task ---------------------------> reads it, and forks a nursery
           <--------------------------- Here: its number of ranks, and where the store is if it opened one
      Node ---------------------------> starts its ranks
           <--------------------------- output of the ranks, line by line
      name of a signal ---------------> passes it on to the ranks
      PING, every few seconds --------> knows that the fleet is there
           <--------------------------- Ended
      end of input, or silence -------> the fleet is gone: the ranks save, and end

A message is a line that begins with the token of the Task, which is random. So no output of a rank passes for
a message. What is secret, such as the store's secret and values of the environment, is in no command line.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.values import decode, encode

NOW = "now"
"""In place of a signal's name: the ranks end without saving."""

PING = "ping"
"""In place of a signal's name: nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What an agent is to do.

    Attributes:
        token: What messages begin with.
        name: What stands before the lines of its ranks.
        folder: The working directory of the ranks.
        words: Arguments of the program `shoal`.
        module: Module that is imported once for all ranks.
        environment: Variables that the ranks get besides those of the agent.
        secret: What the ranks of all machines seal their store with, unless SHOAL_SECRET_FILE is set.
        ranks: Number of ranks; None for one for each GPU, or one.
        opens_store: Whether the ranks of all machines meet in a store that this agent opens.
        address: Address of the machine as the others reach it; empty to find it.
        port: Port of the store; 0 for any that is free.
        logs: Directory in which the ranks' output is kept, once it exists.
        grace: Seconds from a signal until the ranks must have ended; None for the default.
    """

    token: str
    name: str
    folder: str
    words: Sequence[str]
    module: str
    environment: Mapping[str, str]
    secret: str
    ranks: int | None = None
    opens_store: bool = False
    address: str = ""
    port: int = 0
    logs: str = ""
    grace: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """An agent is ready.

    Attributes:
        version: Shoal's version there.
        ranks: Number of its ranks.
        address: Its address, as others reach it.
        port: Port of the store; 0 if it opened none.
    """

    version: str
    ranks: int
    address: str
    port: int


def to_line(token: str, value: Any) -> bytes:
    """Return a message as a line.

    Args:
        token: The token of the Task; empty for the Task itself.
        value: A value of `shoal.values`.
    """
    return f"{token} {base64.b64encode(encode(value)).decode()}\n".encode()


def from_line(token: str, line: bytes) -> Any:
    """Return the value of a message; None if the line is none.

    Raises:
        CommunicationError: The line begins like a message, and holds no value.
    """
    before = f"{token} ".encode()
    if not line.startswith(before):
        return None
    return decode(base64.b64decode(line[len(before) :]))
