"""Starts a training on several machines, follows it, and starts it again when it fails.

Nouns: Host (a machine that may be used), Agent (the launcher of a host's ranks, `shoal.launch.hosts.agent`,
which ssh or Ray starts), Attempt (one start of all ranks), Policy (how often the training is started again,
and which hosts are left out). `shoal launch ssh` and `shoal launch ray` call `train_on`. What this process
and the agents tell each other stands in `shoal.launch.elastic.linked_hosts`.
"""

from shoal.launch.fleet.agent import (
    Agent,
    Host,
    agent_command,
    parse_hosts,
    read_hosts,
    ssh_command,
    start_program,
)
from shoal.launch.fleet.fleet import Attempt, Policy, Work, train_on
from shoal.launch.fleet.ray_actors import RayCluster

__all__ = [
    "Agent",
    "Attempt",
    "Host",
    "Policy",
    "RayCluster",
    "Work",
    "agent_command",
    "parse_hosts",
    "read_hosts",
    "ssh_command",
    "start_program",
    "train_on",
]
