"""Measures this machine and its neighbours.

`probe` (rates of devices and links, as a Cluster), `bench` (collectives beside other libraries), `doctor`
(what slows or stops training; it imports no torch).
"""
