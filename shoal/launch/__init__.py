"""Starts ranks, finds out which rank this process is, and reports how ranks ended.

Nouns: World (the ranks that this process is one of), Outcome (how a rank ended), StopSignal (a request to
stop), Nursery (the process that ranks are forked from). `shoal train` calls `launch` where no other launcher
started ranks; the trainer's processes call `join` and `run_rank`.
"""

from shoal.launch.devices import choose_device
from shoal.launch.elastic import Elasticity, launch_elastic
from shoal.launch.ended import Ended
from shoal.launch.launcher import TERMINAL, launch, launch_on_node
from shoal.launch.membership import Generation, Membership
from shoal.launch.node import Node
from shoal.launch.nursery import Nursery, open_nursery
from shoal.launch.outcome import EXIT_STOPPED, Outcome, root_cause
from shoal.launch.output import RankLog, keep_output
from shoal.launch.worker import StopSignal, run_rank
from shoal.launch.world import World, find_world, join, meet

__all__ = [
    "EXIT_STOPPED",
    "TERMINAL",
    "Elasticity",
    "Ended",
    "Generation",
    "Membership",
    "Node",
    "Nursery",
    "Outcome",
    "RankLog",
    "StopSignal",
    "World",
    "choose_device",
    "find_world",
    "join",
    "keep_output",
    "launch",
    "launch_elastic",
    "launch_on_node",
    "meet",
    "open_nursery",
    "root_cause",
    "run_rank",
]
