"""A recorded node with 8 H100 and 8 network cards of 400 Gb/s, small, in the formats of public documents.

`Node` writes the tree. Faults are changes of its fields or files before or after that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

GPUS = [f"0000:{bus}:00.0" for bus in ("19", "3b", "4c", "5d", "9b", "bb", "cb", "db")]
SECONDS = 2.0
WORDS = int(40e9 * SECONDS / 4)
"""What a port moves between the two moments, 40 GB/s, in the words of 4 bytes that its counters count."""


@dataclass
class Node:
    gpu_nodes: list[int] = field(default_factory=lambda: [0, 0, 0, 0, 1, 1, 1, 1])
    card_nodes: list[int] = field(default_factory=lambda: [0, 0, 0, 0, 1, 1, 1, 1])
    moved: list[int] = field(default_factory=lambda: [WORDS] * 8)
    tcp_bytes: int = 1_000_000
    environment: dict[str, str] = field(default_factory=dict)
    clock_reasons: dict[str, str] = field(default_factory=dict)
    uncorrectable: int = 0
    log: str = "[Mon Nov 23 08:00:00 2026] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15\n"
    pauses: int = 0
    paused_microseconds: int = 0
    files: dict[str, str] = field(default_factory=dict)

    def write(self, root: Path) -> Path:
        files = {
            **self._pci(),
            **self._ports("", [10**12] * 8),
            **self._ports("after/", [10**12 + words for words in self.moved]),
            **self._ethernet(),
            **self._host(),
            "commands/nvidia-smi-q.txt": self._report(),
            "commands/nvidia-smi-topo-m.txt": self._matrix(),
            "commands/dmesg-ctime.txt": self.log,
            "environment.txt": "".join(f"{key}={text}\n" for key, text in self.environment.items()),
            "seconds.txt": f"{SECONDS}\n",
            **self.files,
        }
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    def _pci(self) -> dict[str, str]:
        files = {}
        for address, node in zip(GPUS, self.gpu_nodes, strict=True):
            folder = f"sys/bus/pci/devices/{address}"
            files |= {f"{folder}/vendor": "0x10de\n", f"{folder}/class": "0x030200\n"}
            files[f"{folder}/numa_node"] = f"{node}\n"
        for node, cores in enumerate(("0-55,112-167", "56-111,168-223")):
            files[f"sys/devices/system/node/node{node}/cpulist"] = cores + "\n"
        return files

    def _ports(self, under: str, words: list[int]) -> dict[str, str]:
        files = {}
        for number, moved in enumerate(words):
            device = f"{under}sys/class/infiniband/mlx5_{number}"
            port = f"{device}/ports/1"
            files |= {
                f"{device}/device/numa_node": f"{self.card_nodes[number]}\n",
                f"{port}/state": "4: ACTIVE\n",
                f"{port}/rate": "400 Gb/sec (4X NDR)\n",
                f"{port}/link_layer": "InfiniBand\n",
                f"{port}/counters/port_xmit_data": f"{moved // 2}\n",
                f"{port}/counters/port_rcv_data": f"{moved // 2}\n",
                f"{port}/counters/symbol_error": "0\n",
                f"{port}/counters/port_xmit_wait": "0\n",
                f"{port}/hw_counters/np_cnp_sent": "12\n",
            }
        return files

    def _ethernet(self) -> dict[str, str]:
        files = {"links.txt": "/sys/class/net/eth0/device/driver -> /sys/bus/pci/drivers/mlx5_core\n"}
        eth = "sys/class/net/eth0"
        for name, text in {"operstate": "up", "speed": "100000", "mtu": "9000", "duplex": "full"}.items():
            files[f"{eth}/{name}"] = text + "\n"
        files[f"{eth}/device/numa_node"] = "0\n"
        for under, moved, pauses, paused in (
            ("", 0, 7, 100),
            ("after/", self.tcp_bytes, 7 + self.pauses, 100 + self.paused_microseconds),
        ):
            files[f"{under}{eth}/statistics/rx_bytes"] = f"{10**9 + moved}\n"
            files[f"{under}{eth}/statistics/tx_bytes"] = f"{10**9 + moved}\n"
            files[f"{under}{eth}/statistics/rx_dropped"] = "3\n"
            files[f"{under}commands/ethtool-S-eth0.txt"] = (
                "NIC statistics:\n"
                "     rx_packets: 123456\n"
                f"     rx_prio3_pause: {pauses}\n"
                f"     rx_prio3_pause_duration: {paused}\n"
                "     tx_prio3_pause: 0\n"
            )
        return files

    def _host(self) -> dict[str, str]:
        stat = "cpu  0 0 0 0 0 0 0 0 0 0\n" + "".join(f"cpu{core} 0 0 0 0 0 0 0 0 0 0\n" for core in range(4))
        later = "cpu  0 0 0 0 0 0 0 0 0 0\n" + "".join(
            f"cpu{core} 100 0 0 100 0 0 0 0 0 0\n" for core in range(4)
        )
        return {
            "proc/stat": stat,
            "after/proc/stat": later,
            "proc/meminfo": "MemTotal: 2113541120 kB\nMemAvailable: 1900000000 kB\n",
            "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
            "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-223\n",
            "proc/self/limits": f"{'Limit':<26}{'Soft Limit':<21}{'Hard Limit':<21}Units\n"
            f"{'Max locked memory':<26}{'unlimited':<21}{'unlimited':<21}bytes\n"
            f"{'Max open files':<26}{'1048576':<21}{'1048576':<21}files\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "spaces.txt": f"/dev/shm {1 << 40} {1 << 40}\n. {1 << 43} {1 << 42}\n",
        }

    def _report(self) -> str:
        reasons = {
            "Idle": "Not Active",
            "SW Power Cap": "Not Active",
            "HW Slowdown": "Not Active",
            "    HW Thermal Slowdown": "Not Active",
            "    HW Power Brake Slowdown": "Not Active",
            "SW Thermal Slowdown": "Not Active",
        }
        text = "\n==============NVSMI LOG==============\n\nDriver Version : 550.54.15\nAttached GPUs : 8\n"
        for number, address in enumerate(GPUS):
            changed = {**reasons, **(self.clock_reasons if number == 3 else {})}
            errors = self.uncorrectable if number == 5 else 0
            text += f"GPU 0000{address.upper()}\n    Product Name : NVIDIA H100 80GB HBM3\n"
            text += "    PCI\n        GPU Link Info\n            PCIe Generation\n"
            text += "                Max : 5\n                Current : 5\n"
            text += "            Link Width\n                Max : 16x\n                Current : 16x\n"
            text += "    Clocks Event Reasons\n"
            text += "".join(f"        {name:<34}: {value}\n" for name, value in changed.items())
            text += "    ECC Errors\n        Volatile\n            SRAM Correctable : 0\n"
            text += f"            DRAM Uncorrectable : {errors}\n        Aggregate\n"
            text += "            DRAM Uncorrectable : 9\n"
            text += "    Remapped Rows\n        Pending : No\n        Remapping Failure Occurred : No\n"
            text += "    Clocks\n        Graphics : 1980 MHz\n        SM : 1980 MHz\n"
        return text

    def _matrix(self) -> str:
        names = [*(f"GPU{each}" for each in range(8)), *(f"NIC{each}" for each in range(8))]
        text = "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        for gpu in range(8):
            ways = ["NV18"] * 8
            ways[gpu] = " X "
            for card in range(8):
                same = self.gpu_nodes[gpu] == self.card_nodes[card]
                ways.append("PIX" if card == gpu and same else "NODE" if same else "SYS")
            text += f"GPU{gpu}\t" + "\t".join(ways) + f"\t0-55,112-167\t{self.gpu_nodes[gpu]}\t\tN/A\n"
        return text + "\nLegend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
