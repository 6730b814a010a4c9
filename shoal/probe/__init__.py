"""Measures the machine that it runs on, and describes it as a Cluster.

Nouns: Place (the ranks and their hosts), Measurement (an operation, what it took, what the cost model says),
Probed (the Cluster that fits the measurements best, how well it does, and what looks wrong). Every rank calls
`probe`; `shoal probe` starts them.
"""

from shoal.probe.measurements import (
    AttentionTime,
    CollectiveTime,
    HostRates,
    Measurement,
    Measurements,
    PassTime,
    ProductTime,
    SendTime,
)
from shoal.probe.place import Place
from shoal.probe.probe import FitError, Probed, probe
from shoal.probe.turns import QUICK, THOROUGH, Effort

__all__ = [
    "QUICK",
    "THOROUGH",
    "AttentionTime",
    "CollectiveTime",
    "Effort",
    "FitError",
    "HostRates",
    "Measurement",
    "Measurements",
    "PassTime",
    "Place",
    "Probed",
    "ProductTime",
    "SendTime",
    "probe",
]
