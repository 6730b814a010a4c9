"""Starts ranks, finds out which rank this process is, and reports how ranks ended.

Nouns: World (the ranks that this process is one of), Outcome (how a rank ended), StopSignal (a request to
stop), Nursery (the process that ranks are forked from), Meeting (the hosts of a run), Peer (another host).
`shoal train` calls `launch` where no other launcher started ranks, `launch_elastic` if these may be lost, and
`lead` or `follow` on each of several hosts; the trainer's processes call `join` and `run_rank`. How launchers
of several hosts work together, those that ssh or Ray starts too, stands in `linked_hosts.py`.
"""

from shoal.launch.agent import ranks_here
from shoal.launch.drain import ask_to_leave
from shoal.launch.elastic import Elasticity, launch_elastic
from shoal.launch.follow import follow
from shoal.launch.gate import TOKEN_FILE, find_token, read_token
from shoal.launch.hosts import Meeting, lead, open_meeting
from shoal.launch.kernel import process_age
from shoal.launch.launcher import TERMINAL, launch, launch_on_node, open_store
from shoal.launch.membership import PEER, Membership
from shoal.launch.memory_files import MANIFEST, Held, Peer, held_in, is_there
from shoal.launch.nursery import Nursery, has_accelerators, open_nursery
from shoal.launch.outcome import EXIT_AGAIN, Outcome, root_cause
from shoal.launch.output import RankLog, keep_output
from shoal.launch.roster import Generation
from shoal.launch.stopping import signals_noted
from shoal.launch.worker import StopSignal, run_rank
from shoal.launch.world import World, choose_device, find_world, join, meet, reports_failures
from shoal.submit import EXIT_STOPPED

__all__ = [
    "EXIT_AGAIN",
    "EXIT_STOPPED",
    "MANIFEST",
    "PEER",
    "TERMINAL",
    "TOKEN_FILE",
    "Elasticity",
    "Generation",
    "Held",
    "Meeting",
    "Membership",
    "Nursery",
    "Outcome",
    "Peer",
    "RankLog",
    "StopSignal",
    "World",
    "ask_to_leave",
    "choose_device",
    "find_token",
    "find_world",
    "follow",
    "has_accelerators",
    "held_in",
    "is_there",
    "join",
    "keep_output",
    "launch",
    "launch_elastic",
    "launch_on_node",
    "lead",
    "meet",
    "open_meeting",
    "open_nursery",
    "open_store",
    "process_age",
    "ranks_here",
    "read_token",
    "reports_failures",
    "root_cause",
    "run_rank",
    "signals_noted",
]
