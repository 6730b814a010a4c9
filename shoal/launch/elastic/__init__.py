"""Ranks that may be lost, and may come: on one host or several.

Nouns: Generation (the ranks of one attempt), Membership (what a rank knows of it), Elasticity (how few and
how many ranks may train). `shoal train --nproc MIN:MAX` calls `launch_elastic`. How launchers of several
hosts work together stands in `linked_hosts.py`.
"""

from shoal.launch.elastic.drain import ask_to_leave
from shoal.launch.elastic.elastic import Elasticity, launch_elastic
from shoal.launch.elastic.elastic_rank import PEER, Membership
from shoal.launch.elastic.roster import Generation

__all__ = [
    "PEER",
    "Elasticity",
    "Generation",
    "Membership",
    "ask_to_leave",
    "launch_elastic",
]
