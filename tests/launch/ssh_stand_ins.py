"""An ssh server on loopback, with keys of its own, that goes by the names of several hosts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from launch_stand_ins import MARK

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
    """A real sshd. A context manager.

    Args:
        folder: Where its keys and configuration are.
        names: Names under which it is reached.
    """

    def __init__(self, folder, names):
        self._folder = folder
        self._names = names

    def __enter__(self):
        if os.geteuid() == 0:
            _PRIVILEGES.mkdir(exist_ok=True, mode=0o755)
        for key in ("host", "user"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / key))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        public = (self._folder / "user.pub").read_text()
        (self._folder / "authorized").write_text(public)
        own = (self._folder / "host.pub").read_text().rsplit(maxsplit=1)[0]
        (self._folder / "known").write_text(f"[127.0.0.1]:{port} {own}\n")
        (self._folder / "sshd").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {self._folder}/host\nPidFile none\n"
            f"AuthorizedKeysFile {self._folder}/authorized\nPasswordAuthentication no\nUsePAM no\n"
            "StrictModes no\nPermitRootLogin prohibit-password\nMaxStartups 50\n"
            f"AcceptEnv {MARK}\n"
        )
        (self._folder / "config").write_text(
            f"Host {' '.join(self._names)}\n  HostName 127.0.0.1\n  Port {port}\n"
            f"  IdentityFile {self._folder}/user\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self._folder}/known\n  StrictHostKeyChecking yes\n"
            f"  SendEnv {MARK}\n"  # so that a test finds what it started
        )
        log = (self._folder / "log").open("w")
        self._process = subprocess.Popen([_SSHD, "-D", "-e", "-f", str(self._folder / "sshd")], stderr=log)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        return self

    def __exit__(self, *error):
        self._process.terminate()
        self._process.wait()

    @property
    def ssh(self):
        """The command ssh that reaches it."""
        return f"ssh -F {self._folder}/config"


def _run(*command):
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
