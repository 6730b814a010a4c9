"""GPUs, as `nvidia-smi -q` and the kernel's log tell: clocks, ECC errors, links and Xid errors.

The report is lines "name : value", indented under sections. Drivers before 535 call the section "Clocks
Throttle Reasons", later ones "Clocks Event Reasons".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from shoal.doctor.finding import Finding, Verdict
from shoal.doctor.machine import Machine
from shoal.doctor.window import Window, devices

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
