"""Machines of one and two levels of links, for tests of what collectives cost on them."""

from shoal.predict.cost.collectives import algorithm_seconds
from shoal.spec.cluster import Cluster, Device, Level
from shoal.spec.plan import Group

DEVICE = Device(name="d", memory=80e9, bandwidth=3e12, peak={"bf16": 1e15}, units=132)
EXACT = 1e-9  # relative: both sides compute the same, in another order of operations
S = 256e6  # bytes
A, B = 5e-6, 100e9  # of one level
G, K, INSIDE, NETWORK = 8, 4, 400e9, 25e9  # of two levels: devices of a node, nodes, and rates
A_I, A_E = 4e-6, 30e-6


def level(devices, bandwidth, latency=5e-6, **fields):
    return Level(
        name=f"of {devices}", devices=devices, bandwidth=bandwidth, latency=latency, share=1.0, **fields
    )


def cluster(*levels):
    return Cluster(name="c", device=DEVICE, levels=levels)


def one_level(ranks, **fields):
    return cluster(level(ranks, 100e9, **fields))


def seconds(collective, algorithm, machine, ranks=None, nbytes=S):
    return algorithm_seconds(collective, nbytes, Group(ranks or machine.devices), machine)[algorithm]


def two_levels(nodes=K, inside=INSIDE, network=NETWORK, reduces=(False, False)):
    links = level(G, inside, A_I, reduces=reduces[0]), level(G * nodes, network, A_E, reduces=reduces[1])
    return cluster(*links)
