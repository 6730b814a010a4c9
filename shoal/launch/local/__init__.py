"""Starts ranks on this machine, finds out which rank this process is, and reports how ranks ended.

Nouns: World (the ranks that this process is one of), Outcome (how a rank ended), StopSignal (a request to
stop), Nursery (the process that ranks are forked from). `shoal train` calls `launch` where no other launcher
started ranks; the trainer's processes call `join` and `run_rank`.
"""

from shoal.launch.local.fork_server import Nursery, has_accelerators, open_nursery
from shoal.launch.local.launcher import TERMINAL, launch, launch_on_node, open_store
from shoal.launch.local.outcome import EXIT_AGAIN, Outcome, root_cause
from shoal.launch.local.output import RankLog, keep_output
from shoal.launch.local.prctl import process_age
from shoal.launch.local.signals import signals_noted
from shoal.launch.local.worker import StopSignal, run_rank
from shoal.launch.local.world import World, choose_device, find_world, join, meet, reports_failures

__all__ = [
    "EXIT_AGAIN",
    "TERMINAL",
    "Nursery",
    "Outcome",
    "RankLog",
    "StopSignal",
    "World",
    "choose_device",
    "find_world",
    "has_accelerators",
    "join",
    "keep_output",
    "launch",
    "launch_on_node",
    "meet",
    "open_nursery",
    "open_store",
    "process_age",
    "reports_failures",
    "root_cause",
    "run_rank",
    "signals_noted",
]
