"""Are GPUs, network cards and NUMA nodes paired and balanced?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from shoal.doctor.finding import Finding, Verdict
from shoal.doctor.gpu import GPU_CLASSES, NVIDIA
from shoal.doctor.infiniband import active_ports
from shoal.doctor.machine import Machine, number
from shoal.doctor.window import Window, devices, interfaces

_PCI = "/sys/bus/pci/devices"
_NEAR = ("PIX", "PXB")


def cores_of(text: str | None) -> set[int]:
    """Return the numbers in a list of cores.

    >>> sorted(cores_of("0-2,8"))
    [0, 1, 2, 8]
    """
    found: set[int] = set()
    for part in (text or "").strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found


def check_nodes(machine: Machine, window: Window) -> Iterator[Finding]:
    """Compare the NUMA nodes of GPUs and network cards, by sysfs."""
    row = "GPUs and NUMA"
    nodes = [
        name
        for name in machine.names("/sys/devices/system/node")
        if name[:4] == "node" and name[4:].isdecimal()
    ]
    gpus = {address: _node(machine, f"{_PCI}/{address}") for address in devices(machine, NVIDIA, GPU_CLASSES)}
    cards = _cards(machine)
    if not gpus or len(nodes) < 2:
        return
    unknown = [address for address, node in gpus.items() if node < 0]
    if unknown:
        yield Finding(
            row,
            Verdict.WARN,
            f"{len(unknown)} of {len(gpus)} GPUs tell no NUMA node (numa_node is -1)",
            "turn on NUMA in the BIOS or the hypervisor: ranks cannot be placed near their GPU",
        )
        return
    by_node, cards_by_node = Counter(gpus.values()), Counter(node for node in cards.values() if node >= 0)
    told = ", ".join(
        f"node {node}: {by_node[node]} GPUs, {cards_by_node[node]} network cards"
        for node in sorted({*by_node, *cards_by_node})
    )
    without = [node for node in by_node if cards and not cards_by_node[node]]
    if without:
        yield Finding(
            row,
            Verdict.BAD,
            f"{told}: GPUs of node {without[0]} reach the network over another CPU",
            "move a card to that node's slots, or correct the virtual machine's topology",
        )
    elif len(set(by_node.values())) > 1 or len(by_node) not in (1, len(nodes)):
        yield Finding(row, Verdict.WARN, f"not balanced: {told}", "expect that some GPUs share bandwidth")
    else:
        yield Finding(row, Verdict.OK, told)
    yield from _affinity(machine, set(gpus.values()))


def check_matrix(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge the matrix of `nvidia-smi topo -m`: has each GPU a network card behind its own PCIe switch?"""
    row = "GPUs and cards"
    rows, cards = _matrix(machine.run("nvidia-smi", "topo", "-m") or "")
    if not rows or not cards:
        return
    near = {gpu: [card for card in cards if ways.get(card) in _NEAR] for gpu, ways in rows.items()}
    far = [gpu for gpu, found in near.items() if not found]
    across = [gpu for gpu in far if all(rows[gpu].get(card) in ("SYS", "SOC") for card in cards)]
    if across:
        yield Finding(
            row,
            Verdict.BAD,
            f"{', '.join(across)}: every network card is behind another CPU",
            "move a card to that CPU, or correct the virtual machine's topology",
        )
    elif far:
        yield Finding(
            row,
            Verdict.WARN,
            f"{', '.join(far)}: no network card behind the same PCIe switch",
            "GPUDirect RDMA crosses a CPU: expect less than the link's rate",
        )
    else:
        shared = max(Counter(found[0] for found in near.values()).values())
        yield Finding(
            row, Verdict.OK, f"each GPU has a card behind its own switch, at most {shared} share one"
        )


def _affinity(machine: Machine, nodes: set[int]) -> Iterator[Finding]:
    """Judge whether this process may run on cores of each NUMA node that has GPUs."""
    allowed = cores_of(_field(machine.read("/proc/self/status"), "Cpus_allowed_list"))
    if not allowed:
        return
    missed = [
        node
        for node in sorted(nodes)
        if not allowed & cores_of(machine.read(f"/sys/devices/system/node/node{node}/cpulist"))
    ]
    if missed:
        yield Finding(
            "cores near GPUs",
            Verdict.WARN,
            f"this process may use no core of node {', '.join(map(str, missed))}, which has GPUs",
            "give ranks the cores of their GPU's node (numactl, srun --cpu-bind, the container's cpuset)",
        )


def _cards(machine: Machine) -> dict[str, int]:
    """Return the NUMA node of each network card: those with an active RDMA port, or else all."""
    active = sorted({owner.partition("/")[0] for owner in active_ports(machine)})
    if active:
        return {each: _node(machine, f"/sys/class/infiniband/{each}/device") for each in active}
    return {each: _node(machine, f"/sys/class/net/{each}/device") for each in interfaces(machine)}


def _node(machine: Machine, path: str) -> int:
    found = number(machine.read(f"{path}/numa_node"))
    return -1 if found is None else found


def _field(text: str | None, name: str) -> str:
    lines = (line.partition(":") for line in (text or "").splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "")


def _matrix(text: str) -> tuple[dict[str, Mapping[str, str]], Sequence[str]]:
    """Return for each GPU the way to each column, and the columns that are network cards."""
    head: list[str] = []
    rows: dict[str, Mapping[str, str]] = {}
    for line in text.splitlines():
        words = line.split()
        if not head and words[:1] == ["GPU0"] and "X" not in words:
            head = line.partition("CPU Affinity")[0].split()
        elif head and words and words[0] in head and words[0].startswith("GPU"):
            rows[words[0]] = dict(zip(head, words[1:], strict=False))
    return rows, [name for name in head if not name.startswith("GPU")]
