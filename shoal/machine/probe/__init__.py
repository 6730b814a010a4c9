"""Measure the machine that this runs on, and describe it as a Cluster.

Nouns: Place (the ranks and their hosts), Measurement (an operation with its measured and its predicted
    seconds), Probed (the Cluster that fits the measurements best, its errors, and suspicions). Every rank
    calls `probe`; `shoal probe` starts the ranks.
"""

from shoal.machine.probe.fit import FitError
from shoal.machine.probe.links import measure_files
from shoal.machine.probe.measurements import (
    AttentionTime,
    CollectiveTime,
    HostRates,
    Measurement,
    Measurements,
    PassTime,
    ProductTime,
    SendTime,
    read_measurements,
)
from shoal.machine.probe.place import QUICK, THOROUGH, Effort, Place
from shoal.machine.probe.probe import Probed, fitted, measure_device, probe
from shoal.machine.probe.sheet import read_sheet

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
    "fitted",
    "measure_device",
    "measure_files",
    "probe",
    "read_measurements",
    "read_sheet",
]
