"""GPUs, as `nvidia-smi -q` and the kernel's log tell: clocks, ECC errors, links and Xid errors.

The report is lines "name : value", indented under sections. Drivers before 535 call the section "Clocks
Throttle Reasons", later ones "Clocks Event Reasons".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from shoal.machine.doctor.machine import Finding, Machine, Verdict, Window, devices, interfaces, number
from shoal.machine.doctor.nccl import active_ports

NVIDIA = "0x10de"
GPU_CLASSES = ("0x0300", "0x0302")

_REASONS = {
    "HW Slowdown": Verdict.BAD,
    "HW Thermal Slowdown": Verdict.BAD,
    "HW Power Brake Slowdown": Verdict.BAD,
    "SW Thermal Slowdown": Verdict.BAD,
    "SW Power Cap": Verdict.WARN,
    "Sync Boost": Verdict.WARN,
}
_HEALED = frozenset({13, 31, 43, 45, 63, 94})
"""Xid numbers of a program's own faults, or of errors that the GPU contained."""
_XID = re.compile(r"NVRM: Xid \(PCI:([\da-fA-F:.]+)\): (\d+),?\s*(.*)")
_MEANINGS = {
    13: "an exception of a program",
    31: "a program read an invalid address",
    43: "a program was stopped",
    45: "a program was cleaned up",
    48: "an uncorrectable ECC error",
    62: "a fault of the GPU's microcontroller",
    63: "a row of memory was remapped",
    64: "a row of memory could not be remapped",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    92: "many single-bit ECC errors",
    94: "a contained ECC error",
    95: "an uncontained ECC error",
    119: "the GPU's system processor does not answer",
    120: "an error of the GPU's system processor",
}


def read_report(text: str) -> dict[str, dict[str, str]]:
    """Return the values of each GPU in the output of `nvidia-smi -q`.

    Returns:
        By the address of the GPU, values by path, such as "Clocks/SM".
    """
    gpus: dict[str, dict[str, str]] = {}
    path: list[tuple[int, str]] = []
    values: dict[str, str] = {}
    for line in text.splitlines():
        if match := re.match(r"GPU ([\dA-Fa-f]+:[\dA-Fa-f]+:[\dA-Fa-f]+\.\d)\s*$", line):
            values = gpus.setdefault(match[1], {})
            path = []
            continue
        name, _, value = line.partition(" : ")
        indent = len(name) - len(name.lstrip())
        if not name.strip():
            continue
        path = [each for each in path if each[0] < indent]
        if value:
            values["/".join([*(section for _, section in path), name.strip()])] = value.strip()
        if indent:
            path.append((indent, name.strip()))
    return gpus


def check_gpus(machine: Machine, window: Window) -> Iterator[Finding]:
    """Judge the clocks, errors and PCIe links that `nvidia-smi -q` tells."""
    there = devices(machine, NVIDIA, GPU_CLASSES)
    report = machine.run("nvidia-smi", "-q")
    if report is None:
        if there:
            yield Finding(
                "GPUs",
                Verdict.BAD,
                f"{len(there)} on the bus, and nvidia-smi is absent or fails",
                "install the driver; look at `dmesg` for NVRM",
            )
        return
    gpus = read_report(report)
    if len(gpus) < len(there):
        yield Finding(
            "GPUs",
            Verdict.BAD,
            f"nvidia-smi tells of {len(gpus)}, and {len(there)} are on the bus",
            "a GPU does not answer: look for Xid errors, and reset or drain the host",
        )
    yield from _clocks(gpus)
    yield from _errors(gpus)
    yield from _links(gpus)


def check_xid(machine: Machine, window: Window) -> Iterator[Finding]:
    """Look for Xid errors in the kernel's log."""
    row = "Xid errors"
    if not devices(machine, NVIDIA, GPU_CLASSES):
        return
    log = machine.run("dmesg", "--ctime") or machine.run("dmesg") or machine.read("/var/log/kern.log")
    if log is None:
        yield Finding(row, Verdict.UNKNOWN, "the kernel's log may not be read", "run this as root")
        return
    found: dict[tuple[str, int], str] = {}
    for address, code, text in _XID.findall(log):
        found[address, int(code)] = text
    if not found:
        yield Finding(row, Verdict.OK, "none in the kernel's log")
        return
    told = "; ".join(
        f"Xid {code} on {address}: {_MEANINGS.get(code, text[:60])}"
        for (address, code), text in found.items()
    )
    is_bad = any(code not in _HEALED for _, code in found)
    yield Finding(
        row,
        Verdict.BAD if is_bad else Verdict.WARN,
        told,
        "drain the host and reset or replace the GPU" if is_bad else "look at the program that ran then",
    )


def _clocks(gpus: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    row = "GPU clocks"
    found: dict[str, list[str]] = {}
    for address, values in gpus.items():
        for path, value in values.items():
            section, _, reason = path.rpartition("/")
            if value == "Active" and section.startswith(("Clocks Event Reasons", "Clocks Throttle Reasons")):
                found.setdefault(reason, []).append(address)
    found = {reason: where for reason, where in found.items() if reason in _REASONS}
    told = [f"{reason} on {', '.join(where)}" for reason, where in found.items()]
    speeds = {values["Clocks/SM"] for values in gpus.values() if "Clocks/SM" in values}
    if not told:
        yield Finding(row, Verdict.OK, f"not throttled; SM clocks {', '.join(sorted(speeds)) or 'not told'}")
        return
    is_bad = any(_REASONS[reason] is Verdict.BAD for reason in found)
    yield Finding(
        row,
        Verdict.BAD if is_bad else Verdict.WARN,
        "; ".join(told),
        "check cooling and power of the host" if is_bad else "the power limit holds the clocks down",
    )


def _errors(gpus: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    row = "GPU memory"
    bad, warn = [], []
    for address, values in gpus.items():
        for path, value in values.items():
            count = int(value) if value.isdecimal() else 0
            if path.startswith("ECC Errors/Volatile") and "Uncorrectable" in path and count:
                bad.append(f"{count} uncorrectable ECC errors on {address}")
            elif path.startswith("ECC Errors/Volatile") and "Correctable" in path and count:
                warn.append(f"{count} corrected ECC errors on {address}")
            elif path == "Remapped Rows/Pending" and value == "Yes":
                bad.append(f"{address} has rows to remap")
            elif path == "Remapped Rows/Remapping Failure Occurred" and value == "Yes":
                bad.append(f"{address} could not remap a row")
            elif path.endswith("SRAM Threshold Exceeded") and value == "Yes":
                bad.append(f"{address} has too many errors of its SRAM")
    if bad:
        yield Finding(row, Verdict.BAD, "; ".join(bad[:4]), "reset the GPU; replace it if this comes back")
    elif warn:
        yield Finding(row, Verdict.WARN, "; ".join(warn[:4]), "watch whether they grow")
    else:
        yield Finding(row, Verdict.OK, f"no ECC errors on {len(gpus)} GPUs")


def _links(gpus: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    row = "GPU PCIe links"
    slow = []
    for address, values in gpus.items():
        told = partial(_number, values)
        width, most = told("PCI/GPU Link Info/Link Width/Current"), told("PCI/GPU Link Info/Link Width/Max")
        if width and width < most:
            slow.append(f"{address} has {width} of {most} lanes")
        # A GPU that does nothing lowers its generation to save power.
        idle = any(path.endswith("Reasons/Idle") and value == "Active" for path, value in values.items())
        now = told("PCI/GPU Link Info/PCIe Generation/Current")
        most = told("PCI/GPU Link Info/PCIe Generation/Max")
        if now and now < most and not idle:
            slow.append(f"{address} runs at generation {now} of {most}")
    if slow:
        yield Finding(
            row, Verdict.BAD, "; ".join(slow[:4]), "seat the GPU or its riser again; check the BIOS"
        )
    elif gpus:
        yield Finding(row, Verdict.OK, "full width")


def _number(values: Mapping[str, str], path: str) -> int:
    text = values.get(path, "").rstrip("x")
    return int(text) if text.isdecimal() else 0


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
