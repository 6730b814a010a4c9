"""A small Slurm cluster on this machine: a real munged, slurmctld, and a slurmd for each of some nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time

from port_stand_ins import free_port

__all__ = ["SlurmCluster", "why_no_slurm"]

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_GPUS = 2


def why_no_slurm():
    """Why there can be no cluster here; empty if there can."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} (of slurm-wlm and munge) not installed"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class SlurmCluster:
    """A cluster of nodes n1, n2, ... A context manager.

    Args:
        folder: Where its state and its logs are.
        nodes: Number of nodes; each has two GPUs, as far as Slurm knows.
    """

    def __init__(self, folder, nodes=2):
        self._folder = folder
        self._nodes = nodes
        self._daemons = []

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(120)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    @property
    def environment(self):
        """What Slurm's commands need to reach the cluster."""
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def run(self, *command):
        """Run a command of Slurm; its output."""
        given = {**os.environ, **self.environment}
        return subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout

    def state(self, job):
        """What Slurm tells of a job, by the names that scontrol prints."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _start(self):
        folder = self._folder
        folder.chmod(0o755)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        munge = folder / "munge"
        munge.mkdir(mode=0o755)
        files = ("socket", "pid-file", "log-file", "seed-file")
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", *(f"--{f}={munge}/{f}" for f in files)
        )
        self._wait_for((munge / "socket").exists)
        ports = [free_port() for _ in range(self._nodes + 1)]
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 RealMemory=1000 "
            f"Gres=gpu:{_GPUS} State=UNKNOWN"
            for number, port in enumerate(ports[1:], start=1)
        )
        (folder / "slurm.conf").write_text(
            f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={munge}/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1
GresTypes=gpu
ReturnToService=2
KillWait=20
MinJobAge=600
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
        )
        (folder / "gres.conf").write_text(f"Name=gpu File=/dev/tty[1-{_GPUS}]\n")
        self._daemon("slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for number in range(1, self._nodes + 1):
            self._daemon("slurmd", "-D", "-N", f"n{number}", "-f", str(folder / "slurm.conf"))
        idle = f"{self._nodes}"
        self._wait_for(lambda: self._idle() == idle)

    def _idle(self):
        try:
            return self.run("sinfo", "--noheader", "--states=idle", "--format=%D").strip()
        except subprocess.CalledProcessError:  # it does not answer yet
            return ""

    def _daemon(self, program, *options):
        with (self._folder / f"{program}.out").open("a") as out:
            command = [shutil.which(program, path=_PATH), *options]
            given = {**os.environ, **self.environment}
            self._daemons.append(subprocess.Popen(command, stdout=out, stderr=out, env=given))

    def _wait_for(self, condition):
        deadline = time.monotonic() + 120
        while not condition():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            assert not ended, f"{ended} ended: {self._said()}"
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.1)

    def _said(self):
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self._folder.glob("*.out"))
