"""Starts and joins ranks: on this machine, on several hosts, through other systems.

`local` (ranks of this machine), `elastic` (ranks that are lost and come), `hosts` (launchers of several
hosts), `fleet` (hosts by ssh or Ray), `submit` (what Slurm and Kubernetes start; it imports no torch).
"""
