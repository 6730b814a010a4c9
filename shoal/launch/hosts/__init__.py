"""The launchers of several hosts: one leads, the others follow.

Nouns: Meeting (the hosts of a run), Peer (another host), Held (checkpoints in a host's memory). `shoal train
--nodes` calls `lead` or `follow` on each host; `ranks_here` does what a launcher asks that ssh, Ray or
Kubernetes started.
"""

from shoal.launch.hosts.agent import ranks_here
from shoal.launch.hosts.follower import follow
from shoal.launch.hosts.gate import TOKEN_FILE, find_token, read_token
from shoal.launch.hosts.leader import Meeting, lead, open_meeting
from shoal.launch.hosts.memory_files import MANIFEST, Held, Peer, held_in, is_there

__all__ = [
    "MANIFEST",
    "TOKEN_FILE",
    "Held",
    "Meeting",
    "Peer",
    "find_token",
    "follow",
    "held_in",
    "is_there",
    "lead",
    "open_meeting",
    "ranks_here",
    "read_token",
]
