"""Starts a training on several machines, follows it, and starts it again when it fails.

Nouns: Host (a machine that may be used), AgentChannel (what an agent on a host is talked to over), Attempt
(one start of all ranks), Policy (how often the training is started again, and which hosts are left out).
`shoal launch ssh` and `shoal launch ray` call `train_on`; agents are `shoal.launch.agent`.
"""

from shoal.fleet.attempt import Attempt, Work
from shoal.fleet.channel import AgentChannel, Event, ProcessChannel
from shoal.fleet.fleet import Policy, train_on
from shoal.fleet.hosts import Host, parse_hosts, read_hosts
from shoal.fleet.ray_actors import RayCluster
from shoal.fleet.ssh import agent_command, ssh_command

__all__ = [
    "AgentChannel",
    "Attempt",
    "Event",
    "Host",
    "Policy",
    "ProcessChannel",
    "RayCluster",
    "Work",
    "agent_command",
    "parse_hosts",
    "read_hosts",
    "ssh_command",
    "train_on",
]
