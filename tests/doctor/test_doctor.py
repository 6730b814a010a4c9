"""`shoal doctor` on recorded machines: a healthy node, and the same node with one fault each."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from recorded_nodes import GPUS, SECONDS, WORDS, Node

from shoal.cli.main import main
from shoal.machine.doctor import Finding, HostReport, LiveMachine, Verdict, across_hosts, examine_quickly
from shoal.machine.doctor.machine import Machine, RecordedMachine, Space

LOG_RDMA = """\
node1:924:1152 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
node1:924:1152 [0] NCCL INFO Using network IB
node1:924:1152 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
"""
LOG_TCP = """\
node1:924:1152 [0] NCCL INFO NET/IB : No device found.
node1:924:1152 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
node1:924:1152 [0] NCCL INFO Using network Socket
node1:924:1152 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0
"""
XID = "[Mon Nov 23 09:00:00 2026] NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.\n"


def examined(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, list[dict[str, str]]]]:
    code = main(["doctor", *arguments, "--json"])
    rows: dict[str, list[dict[str, str]]] = {}
    for findings in json.loads(capsys.readouterr().out)["hosts"].values():
        for each in findings:
            rows.setdefault(each["row"], []).append(each)
    return code, rows


def test_a_healthy_node_has_no_row_that_is_not_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "nccl.log"
    log.write_text(LOG_RDMA)
    root = Node(environment={"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_IFNAME": "eth0"}).write(tmp_path / "node")
    code, rows = examined(capsys, "--root", str(root), "--nccl-log", str(log))
    assert code == 0
    assert {each["row"]: each for found in rows.values() for each in found if each["verdict"] != "ok"} == {}
    # All families spoke: a reader that finds nothing would be silent.
    assert rows.keys() >= {
        *("NCCL network", "GPUDirect RDMA", "NCCL settings", "RDMA or TCP", "RDMA ports", "RDMA rails"),
        *("RDMA errors", "ECN and credits", "PFC pauses", "lost packets", "link speed", "MTU", "GPU clocks"),
        *("GPU memory", "GPU PCIe links", "Xid errors", "GPUs and NUMA", "GPUs and cards", "cores"),
        *("locked memory", "open files", "memory", "/dev/shm", "huge pages", "disk of ."),
    }
    assert f"{WORDS * 4 * 8 / SECONDS / 1e9:.2f} GB/s over RDMA" in rows["RDMA or TCP"][0]["found"]


PORT = "sys/class/infiniband/mlx5_2/ports/1"
FAULTS: dict[str, tuple[Node, str, str, str]] = {
    "fallen back to TCP": (Node(moved=[0] * 8, tcp_bytes=8 * 10**9), "RDMA or TCP", "bad", "active"),
    "RDMA forbidden": (Node(environment={"NCCL_IB_DISABLE": "1"}), "NCCL settings", "bad", "NCCL_IB_DISABLE"),
    "wrong interface": (Node(environment={"NCCL_SOCKET_IFNAME": "=ib9"}), "NCCL settings", "bad", "ib9"),
    "wrong RDMA device": (Node(environment={"NCCL_IB_HCA": "mlx6_0:1"}), "NCCL settings", "bad", "mlx6_0"),
    "idle rail": (Node(moved=[WORDS] * 6 + [0, WORDS]), "RDMA rails", "bad", "mlx5_6/1"),
    "slow rail": (Node(moved=[WORDS] * 6 + [WORDS // 4, WORDS]), "RDMA rails", "warn", "mlx5_6/1"),
    "throttled clock": (
        Node(clock_reasons={"    HW Thermal Slowdown": "Active"}), "GPU clocks", "bad", GPUS[3].upper(),
    ),
    "power cap": (Node(clock_reasons={"SW Power Cap": "Active"}), "GPU clocks", "warn", "SW Power Cap"),
    "ECC errors": (Node(uncorrectable=2), "GPU memory", "bad", "2 uncorrectable ECC errors"),
    "Xid 79": (Node(log=XID), "Xid errors", "bad", "fallen off the bus"),
    "Xid 31": (Node(log=XID.replace(": 79,", ": 31,")), "Xid errors", "warn", "invalid address"),
    "many pauses": (Node(pauses=100_000), "PFC pauses", "bad", "eth0 50000 per second"),
    "few pauses": (Node(pauses=10), "PFC pauses", "warn", "eth0 5 per second"),
    "long pauses": (Node(pauses=2, paused_microseconds=10**6), "PFC pauses", "bad", "50.0% of the time"),
    "cards on one node": (Node(card_nodes=[0] * 8), "GPUs and NUMA", "bad", "node 1: 4 GPUs, 0 network"),
    "cards far from GPUs": (Node(card_nodes=[0] * 8), "GPUs and cards", "bad", "GPU4"),
    "NUMA not told": (
        Node(gpu_nodes=[-1] * 8, files={"commands/nvidia-smi-topo-m.txt": ""}),
        "GPUs and NUMA", "warn", "8 of 8 GPUs tell no NUMA node",
    ),
    "uneven GPUs": (Node(gpu_nodes=[0] * 6 + [1] * 2), "GPUs and NUMA", "warn", "not balanced"),
    "port down": (Node(files={f"{PORT}/state": "1: DOWN\n"}), "RDMA ports", "warn", "mlx5_2/1 not active"),
    "slow port": (
        Node(files={f"{PORT}/rate": "200 Gb/sec (2X NDR)\n"}), "RDMA ports", "bad", "mlx5_2/1 at 200 Gb/s",
    ),
    "link errors": (
        Node(files={f"after/{PORT}/counters/symbol_error": "44\n"}), "RDMA errors", "bad", "symbol_error +44",
    ),
    "congestion": (
        Node(files={f"after/{PORT}/hw_counters/np_cnp_sent": "9000\n"}), "ECN and credits", "bad", "4494",
    ),
    "no locked memory": (
        Node(
            files={
                "proc/self/limits": f"{'Limit':<26}{'Soft Limit':<21}\n"
                f"{'Max locked memory':<26}{'65536':<21}\n"
            }
        ),
        "locked memory", "bad", "64KiB",
    ),
    "memory pressure": (
        Node(files={"proc/pressure/memory": "full avg10=23.50 avg60=0.00 avg300=0.00 total=1\n"}),
        "memory", "bad", "23.5 %",
    ),
    "small /dev/shm": (
        Node(files={"spaces.txt": f"/dev/shm {64 << 20} {64 << 20}\n"}), "/dev/shm", "warn", "64MiB",
    ),
    "full disk": (Node(files={"spaces.txt": f". {1 << 43} 1000\n"}), "disk of .", "bad", "make room"),
    "stolen cores": (
        Node(files={"after/proc/stat": "".join(f"cpu{core} 50 0 0 50 0 0 0 100\n" for core in range(4))}),
        "cores", "bad", "hypervisor",
    ),
    "one full core": (
        Node(
            files={
                "after/proc/stat": "cpu0 200 0 0 0 0 0 0 0\n"
                + "".join(f"cpu{core} 2 0 0 198 0 0 0 0\n" for core in range(1, 4))
            }
        ),
        "cores", "warn", "full: 0",
    ),
    "a neighbour": (
        Node(
            files={
                "proc/99/stat": "99 (ffmpeg) R 1 1 1 0 -1 0 0 0 0 0 100" + " 0" * 24 + " 7",
                "after/proc/99/stat": "99 (ffmpeg) R 1 1 1 0 -1 0 0 0 0 0 500 0 0 0 20 0 1 0 1 1 1",
            }
        ),
        "other processes", "warn", "ffmpeg (process 99) 2.0 cores, last on core 7",
    ),
    "throttled cgroup": (
        Node(
            files={
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/cgroup.controllers": "cpu memory\n",
                "sys/fs/cgroup/job/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/job/cpu.stat": "usage_usec 1\nnr_periods 1000\nnr_throttled 300\n",
            }
        ),
        "cgroup cores", "bad", "at most 4 cores, throttled in 300 of 1000",
    ),
    "mixed MTU": (
        Node(
            files={
                f"sys/class/net/eth1/{name}": text
                for name, text in (
                    ("operstate", "up"), ("speed", "100000"), ("mtu", "1500"), ("device/x", ""),
                )
            }
        ),
        "MTU", "warn", "eth0 9000, eth1 1500",
    ),
    "lost packets": (
        Node(files={"after/sys/class/net/eth0/statistics/rx_dropped": "903\n"}), "lost packets", "bad", "450",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_with_its_evidence(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node, row, verdict, evidence = FAULTS[fault]
    code, rows = examined(capsys, "--root", str(node.write(tmp_path / "node")))
    named = [each for each in rows[row] if each["verdict"] == verdict]
    assert named, rows[row]
    assert any(evidence in each["found"] + each["change"] for each in named), named
    assert all(each["change"] for each in named)
    assert code == (1 if verdict == "bad" else 0)


@pytest.mark.parametrize(
    ("log", "row", "verdict", "evidence"),
    [
        (LOG_TCP, "NCCL network", "bad", "found no RDMA device"),
        (LOG_RDMA.replace("/GDRDMA", ""), "GPUDirect RDMA", "warn", "1 of 1"),
        (LOG_RDMA.replace("/GDRDMA", "/GDRDMA/Shared"), "GPUDirect RDMA", "ok", "all 1"),
        (
            LOG_RDMA.replace("network IB", "network AWS Libfabric").replace(
                "NET/IB/0", "NET/AWS Libfabric/0"
            ),
            "NCCL network",
            "ok",
            "RDMA: AWS Libfabric",
        ),
        ("nothing of NCCL", "NCCL network", "unknown", "names no network"),
    ],
)
def test_the_log_of_nccl_is_judged(
    log: str, row: str, verdict: str, evidence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nccl.log"
    file.write_text(log)
    root = str(Node().write(tmp_path / "node"))
    _, rows = examined(capsys, "--root", root, "--nccl-log", str(file))
    assert rows[row][0]["verdict"] == verdict
    assert evidence in rows[row][0]["found"]


def test_a_recorded_machine_examines_as_the_live_one_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", "--seconds", "0.05", "--record", str(tmp_path / "here")])
    live = capsys.readouterr().out
    main(["doctor", "--root", str(tmp_path / "here")])
    assert capsys.readouterr().out == live
    assert main(["doctor", "--record", str(tmp_path / "here")]) == 2


def test_a_recorded_machine_has_the_answers_that_the_live_one_was_judged_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a process that works at each reading, and a disk that fills."""
    busy = Busy(RecordedMachine(Node().write(tmp_path / "node")))
    monkeypatch.setattr("shoal.cli.doctor.LiveMachine", lambda: busy)
    main(["doctor", "--seconds", "0.01", "--record", str(tmp_path / "copy")])
    live = capsys.readouterr().out
    assert "compiler (process 4711)" in live
    main(["doctor", "--root", str(tmp_path / "copy")])
    assert capsys.readouterr().out == live


class Busy(Machine):
    """Between two readings of this machine process 4711 makes 1,000 ticks, and the disk loses a tenth."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._readings = 0

    @property
    def environment(self) -> Mapping[str, str]:
        return self._machine.environment

    def read(self, path: str) -> str | None:
        if path != "/proc/4711/stat":
            return self._machine.read(path)
        self._readings += 1
        return f"4711 (compiler) R {'0 ' * 10}{1000 * self._readings} 0 {'0 ' * 23}3 0\n"

    def names(self, path: str) -> Sequence[str]:
        return ["4711"] if path == "/proc" else self._machine.names(path)

    def resolve(self, path: str) -> str:
        return self._machine.resolve(path)

    def run(self, *command: str) -> str | None:
        return self._machine.run(*command)

    def space(self, path: str) -> Space | None:
        self._readings += 1
        return Space(10**12, int(10**12 * 0.9**self._readings))


def test_hostile_trees_are_read_without_an_error_and_not_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Node().write(tmp_path / "node")
    for path in [each for each in root.rglob("*") if each.is_file()]:
        path.write_bytes(b"\xff\x00 -1 " * 50)
    secret = tmp_path / "secret"
    secret.write_text("SECRET=1\n")
    (root / "environment.txt").unlink()
    (root / "environment.txt").symlink_to(secret)
    main(["doctor", "--root", str(root), "--json"])
    assert "SECRET" not in capsys.readouterr().out


def test_hosts_of_a_run_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    for host, mtu in (("a", 9000), ("b", 1500)):
        found = [Finding("memory", Verdict.OK, "enough")]
        interfaces = {"eth0": {"mtu": mtu, "speed": 100_000}}
        HostReport(host=host, when=time.time(), findings=found, interfaces=interfaces).write(
            tmp_path / "doctor"
        )
    (tmp_path / "doctor" / "torn.json").write_text('{"host": "c"')
    assert [each.row for each in across_hosts(HostReport.read_all(tmp_path / "doctor"))] == [
        "MTU across hosts"
    ]
    assert main(["doctor", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "eth0: 1500 on b; 9000 on a" in out


@pytest.mark.parametrize(
    "arguments", [["--root", "/nowhere"], ["--seconds", "-1"], ["--nccl-log", "/nowhere"], ["/nowhere"]]
)
def test_wrong_input_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert "change:" in capsys.readouterr().err


def test_the_quick_checks_run_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("a command was run")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert examine_quickly(LiveMachine(), ["/"])
