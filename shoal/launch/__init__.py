"""Starts ranks, finds out which rank this process is, and reports how ranks ended.

Nouns: World (the ranks that this process is one of), Outcome (how a rank ended), StopSignal (a request to
stop), Nursery (the process that ranks are forked from). `shoal train` calls `launch` where no other launcher
started ranks; the trainer's processes call `join` and `run_rank`.
"""

from shoal.launch.agent import ALONE, open_store, ranks_here
from shoal.launch.devices import choose_device
from shoal.launch.elastic import Elasticity, launch_elastic
from shoal.launch.ended import Ended
from shoal.launch.launcher import TERMINAL, launch, launch_on_node
from shoal.launch.membership import Generation, Membership
from shoal.launch.messages import NOW, PING, Here, Task, from_line, to_line
from shoal.launch.node import Node
from shoal.launch.nursery import Nursery, open_nursery
from shoal.launch.outcome import EXIT_STOPPED, Outcome, root_cause
from shoal.launch.output import RankLog, keep_output, pass_on
from shoal.launch.stopping import SAVE, signals_noted
from shoal.launch.worker import StopSignal, run_rank
from shoal.launch.world import World, find_world, join, meet

__all__ = [
    "ALONE",
    "EXIT_STOPPED",
    "NOW",
    "PING",
    "SAVE",
    "TERMINAL",
    "Elasticity",
    "Ended",
    "Generation",
    "Here",
    "Membership",
    "Node",
    "Nursery",
    "Outcome",
    "RankLog",
    "StopSignal",
    "Task",
    "World",
    "choose_device",
    "find_world",
    "from_line",
    "join",
    "keep_output",
    "launch",
    "launch_elastic",
    "launch_on_node",
    "meet",
    "open_nursery",
    "open_store",
    "pass_on",
    "ranks_here",
    "root_cause",
    "run_rank",
    "signals_noted",
    "to_line",
]
