"""Parameter servers: processes that hold the model, which workers send gradients to and take values from.

Nouns: Server (holds shards), Shard (a part of the values, with its optimizer), Board (knows the workers,
hands out the samples, and says who may go on), Terms (what the Board goes by), Guard (lets rounds take the
place of stale gradients), Servers (a worker's rank's way to all servers). They talk over a Channel and need
no process group, so workers may come and go.
`shoal.parallel.ServedUpdates` is the optimizer that a worker steps.
"""

from shoal.parallel.exchange.server.client import Servers
from shoal.parallel.exchange.server.protocol import Blueprint, Decision, Mode, ServerError, Terms, Ticket
from shoal.parallel.exchange.server.serve import Server

__all__ = ["Blueprint", "Decision", "Mode", "Server", "ServerError", "Servers", "Terms", "Ticket"]
