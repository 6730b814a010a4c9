"""ssh servers with keys of their own: one on loopback with several names, or one on each host of some."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from launch_stand_ins import MARK
from port_stand_ins import free_port

__all__ = ["SshServer", "why_no_ssh"]

_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_PRIVILEGES = Path("/run/sshd")  # where Debian's sshd separates privileges


def why_no_ssh():
    """Why there can be no server here; empty if there can."""
    missing = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    if missing or _SSHD is None:
        return "openssh-client or openssh-server is not installed"
    if os.geteuid() != 0 and not _PRIVILEGES.is_dir():
        return "sshd needs /run/sshd, which root makes"
    return ""


class SshServer:
    """A real sshd for each host. A context manager.

    Args:
        folder: Where its keys and configuration are.
        names: Names of the hosts; all are this machine.
        apart: Hosts of a network, which are reached by these names; None for one server on loopback.
    """

    def __init__(self, folder, names, apart=None):
        self._folder = folder
        self._names = names
        self._apart = apart
        self._servers = []

    def __enter__(self):
        if os.geteuid() == 0:
            _PRIVILEGES.mkdir(exist_ok=True, mode=0o755)
        for key in ("host", "user"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / key))
        (self._folder / "authorized").write_text((self._folder / "user.pub").read_text())
        own = (self._folder / "host.pub").read_text().rsplit(maxsplit=1)[0]
        (self._folder / "known").write_text(f"* {own}\n")
        if self._apart is None:
            port = free_port()
            self._serve("127.0.0.1", port, [])
            blocks = [f"Host {' '.join(self._names)}\n  HostName 127.0.0.1\n  Port {port}\n"]
        else:
            blocks = []
            for index, name in enumerate(self._names):
                address, process = self._apart.addresses[index], self._apart.process(index)
                self._serve(address, 22, ["nsenter", f"--net=/proc/{process}/ns/net"])
                blocks.append(f"Host {name}\n  HostName {address}\n")
        (self._folder / "config").write_text(
            "".join(blocks) + f"Host *\n  IdentityFile {self._folder}/user\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self._folder}/known\n  StrictHostKeyChecking yes\n"
            f"  SendEnv {MARK}\n"  # so that a test finds what it started
        )
        return self

    def __exit__(self, *error):
        for server in self._servers:
            server.terminate()
            server.wait()

    @property
    def ssh(self):
        """The command ssh that reaches it."""
        return f"ssh -F {self._folder}/config"

    def _serve(self, address, port, within):
        settings = self._folder / f"sshd-{address}"
        settings.write_text(
            f"Port {port}\nListenAddress {address}\nHostKey {self._folder}/host\nPidFile none\n"
            f"AuthorizedKeysFile {self._folder}/authorized\nPasswordAuthentication no\nUsePAM no\n"
            f"StrictModes no\nPermitRootLogin prohibit-password\nMaxStartups 50\nAcceptEnv {MARK}\n"
        )
        said = self._folder / f"log-{address}"
        with said.open("w") as log:
            command = [*within, _SSHD, "-D", "-e", "-f", str(settings)]
            self._servers.append(subprocess.Popen(command, stderr=log))
        deadline = time.monotonic() + 120
        while "Server listening" not in said.read_text():
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.02)


def _run(*command):
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
