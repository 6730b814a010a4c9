"""Topologies as NCCL and nvidia-smi write them, for tests: made by the form of real ones, of any size."""

from collections.abc import Sequence

SWITCH = "0000:05:00.0"


def nccl_xml(
    links: Sequence[dict[str, int]],
    *,
    pci: str = "0x2330",
    vendor: str = "0x10de",
    nets: Sequence[Sequence[tuple[str, int]]] = (),
    tag: str = "nvlink",
    speed: str = "32.0 GT/s PCIe",
    far: Sequence[tuple[str, int]] = (),
) -> str:
    """The dump of a node with a PCIe switch for each device.

    Args:
        links: For each device, the links by target: a number of a device in words, or "switch".
        pci: PCI device of the devices.
        vendor: PCI vendor of the devices.
        nets: For each device, name and Mbit/s of interfaces behind its switch.
        tag: "nvlink" or "xgmi".
        speed: Speed of the slots.
        far: Name and Mbit/s of interfaces behind no device's switch.
    """
    trunks = []
    for number, targets in enumerate(links):
        ways = "".join(
            f'<{tag} target="{SWITCH if target == "switch" else bus(int(target))}" count="{count}" '
            'tclass="0x068000"/>'
            for target, count in targets.items()
        )
        own = "".join(map(net, nets[number] if nets else ()))
        trunks.append(
            f'<pci busid="0000:{16 * number:02x}:00.0" class="0x060400" link_speed="{speed}" link_width="16">'
            f'<pci busid="{bus(number)}" class="0x030200" vendor="{vendor}" device="{pci}" '
            f'link_speed="{speed}" link_width="16"><gpu dev="{number}" sm="90" rank="{number}" gdr="1">{ways}'
            f"</gpu></pci>{own}</pci>"
        )
    half = len(trunks) // 2
    others = "".join(map(net, far))
    return (
        '<system version="1">'
        f'<cpu host_hash="0x1" numaid="0" arch="x86_64">{"".join(trunks[:half])}</cpu>'
        f'<cpu host_hash="0x1" numaid="1" arch="x86_64">{"".join(trunks[half:])}{others}</cpu></system>'
    )


def bus(number: int) -> str:
    return f"0000:{16 * number + 3:02x}:00.0"


def net(told: tuple[str, int]) -> str:
    name, speed = told
    return (
        '<pci busid="0000:f0:00.0" class="0x020700" vendor="0x15b3" device="0x1021">'
        f'<nic><net name="{name}" dev="0" speed="{speed}" port="1" latency="0.000000" guid="0x1" gdr="1"/>'
        "</nic></pci>"
    )


def matrix(
    ways: Sequence[Sequence[str]], nics: Sequence[Sequence[str]] = (), *, coloured: bool = True
) -> str:
    """The output of nvidia-smi topo -m.

    Args:
        ways: Ways between devices, row by row, with "X" for a device itself.
        nics: For each interface, its ways to the devices.
        coloured: Whether the head is underlined, as on a terminal.
    """
    devices = [f"GPU{number}" for number in range(len(ways))]
    names = [f"NIC{number}" for number in range(len(nics))]
    head = "\t".join([*devices, *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    lines = [f"\t\x1b[4m{head}\x1b[0m" if coloured else f"\t{head}"]
    for number, row in enumerate(ways):
        cells = [" X " if way == "X" else way for way in row] + [nic[number] for nic in nics]
        lines.append("\t".join([devices[number], *cells, "0-55,112-167", "0", "\tN/A"]))
    for number, nic in enumerate(nics):
        others = [" X " if other == number else "NODE" for other in range(len(nics))]
        lines.append("\t".join([names[number], *nic, *others, "", "", ""]))
    legend = "\n\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n  NV#  = a bonded set\n"
    told = "\n".join(f"  {name}: mlx5_{number}" for number, name in enumerate(names))
    return "\n".join(lines) + legend + (f"\nNIC Legend:\n\n{told}\n" if names else "")


def switched(devices: int, lanes: int) -> list[list[str]]:
    """Ways between devices that all have so many links to a switch."""
    return [["X" if a == b else f"NV{lanes}" for b in range(devices)] for a in range(devices)]
