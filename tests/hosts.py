"""Two machines on one: network namespaces joined by a cable, with sshd in each."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.debian import need
from tests.projects import environment

NAMES = ("alpha", "beta")
CABLE = "cable0"

# Everything that a host needs is in files of its own, laid over the system's. Names of hosts are
# resolved as Debian does it: a machine finds itself at 127.0.1.1.
START = r"""
set -e
mount --make-rprivate /
mount -t tmpfs none /run
mkdir -p /run/sshd
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/shadow /etc/shadow
mount -t proc proc /proc
mount -t sysfs sysfs /sys
hostname {name}
ip link set lo up
echo ready
# The end of this shell is the end of the host.
exec sleep infinity
"""

SSHD = """
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {bed}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv TMPDIR={scratch} OMP_NUM_THREADS=1
"""

CLIENT = """
Host alpha beta stranger deaf
    User root
    IdentityFile {bed}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {bed}/known_hosts
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
Host alpha
    HostName 10.77.0.1
Host beta
    HostName 10.77.0.2
# The same machine under a name that no key is known for
Host stranger
    HostName 10.77.0.2
    HostKeyAlias stranger
# A machine without sshd: nobody listens at this port
Host deaf
    HostName 10.77.0.2
    Port 2222
"""


@dataclass
class Host:
    """A machine: a process with namespaces of its own; all in them end with it."""

    name: str
    address: str
    folder: Path
    unshare: subprocess.Popen[str]
    pid: int = 0

    def enter(self, *command: str, processes: bool = False) -> list[str]:
        """Return the command line that runs a command on this host.

        Args:
            command: What to run.
            processes: Whether it counts among the host's processes, and has its files. Without,
                signals reach it as they reach any child of the tests.
        """
        spaces = ("--net", "--uts", "--pid", "--mount") if processes else ("--net", "--uts")
        return ["nsenter", "--target", str(self.pid), *spaces, "--", *command]

    def run(self, *command: str) -> str:
        """Run a command on this host and return what it says."""
        return subprocess.run(
            self.enter(*command, processes=True), capture_output=True, text=True, check=True,
            timeout=30,
        ).stdout  # fmt: skip

    def processes(self) -> dict[int, str]:
        """Return pids and command lines on this host, but for its first process and sshd.

        Those of a launching shell too.
        """
        space = os.readlink(f"/proc/{self.pid}/ns/net")
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdecimal() or os.readlink(entry / "ns/net") != space:
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            own = int(entry.name) in (self.pid, self.unshare.pid)
            if command and not own and "sshd" not in command.split(" ")[0]:
                found[int(entry.name)] = command
        return found

    def link(self, state: str) -> None:
        """Pull the cable (down) or put it back (up)."""
        self.run("ip", "link", "set", CABLE, state)


@dataclass
class Bed:
    """Two machines and what is needed to reach them."""

    folder: Path
    hosts: dict[str, Host] = field(default_factory=dict)

    def plug_in(self) -> None:
        """Put the cable back, and wait until alpha finds beta again."""
        self.beta.link("up")
        connect = f": <'/dev/tcp/{self.beta.address}/22'"
        command = self.alpha.enter("timeout", "2", "bash", "-c", connect)
        wait_for(
            lambda: subprocess.run(command, capture_output=True, timeout=10).returncode == 0,
            60,
            "alpha does not reach beta",
        )

    @property
    def alpha(self) -> Host:
        """The first machine; the one that launches, too."""
        return self.hosts["alpha"]

    @property
    def beta(self) -> Host:
        """The second machine."""
        return self.hosts["beta"]

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of a launching shell."""
        return environment(
            **{
                "HOSTS": "alpha beta", "PROCESSES": "1", "INTERFACE": CABLE,
                "SSH_OPTIONS": f"-F {self.folder}/ssh_config", "TMPDIR": str(self.folder / "tmp"),
                "CONFIG": "configs/debug.yaml",
            }
            | more
        )  # fmt: skip

    def launch(self, script: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
        """Start a launch script on the first machine."""
        return subprocess.Popen(
            self.alpha.enter("bash", str(script), *arguments),
            env=self.environment(**env), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_until_idle(self, timeout_s: float) -> float:
        """Wait until no process is left on any host; return the seconds that it took."""
        began = time.monotonic()
        while left := {name: host.processes() for name, host in self.hosts.items()}:
            if not any(left.values()):
                break
            assert time.monotonic() - began < timeout_s, f"still running: {left}"
            time.sleep(0.2)
        return time.monotonic() - began


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@contextmanager
def two_hosts(folder: Path) -> Iterator[Bed]:
    """Start two machines; skip the test where this is not possible."""
    need("openssh-server", "openssh-client", "iproute2")
    bed = Bed(folder)
    try:
        make_keys(folder)
        for number, name in enumerate(NAMES, start=1):
            bed.hosts[name] = start_host(folder, name, f"10.77.0.{number}")
        join(bed)
        for host in bed.hosts.values():
            start_sshd(host, folder)
        yield bed
    finally:
        for host in bed.hosts.values():
            # The first process of a namespace takes all others with it.
            if host.pid:
                os.kill(host.pid, signal.SIGKILL)
            host.unshare.wait(timeout=30)
            assert host.unshare.stdout is not None
            host.unshare.stdout.close()


def make_keys(folder: Path) -> None:
    """Make keys and the settings of the launching side."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tmp").mkdir()
    known = []
    for number, name in enumerate(NAMES, start=1):
        (folder / name).mkdir()
        make_key(folder / name / "host_key")
        public = (folder / name / "host_key.pub").read_text()
        known.append(f"10.77.0.{number},[10.77.0.{number}]:2222 {public}")
    make_key(folder / "user_key")
    (folder / "known_hosts").write_text("".join(known))
    (folder / "ssh_config").write_text(CLIENT.format(bed=folder))


def make_key(path: Path) -> None:
    """Make a pair of keys."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, timeout=30)


def start_host(bed: Path, name: str, address: str) -> Host:
    """Start a machine without a cable."""
    folder = bed / name
    home = folder / "home"
    home.mkdir()
    hosts = "127.0.0.1 localhost\n::1 localhost\n"
    hosts += "".join(
        f"{'127.0.1.1' if other == name else f'10.77.0.{number}'} {other}\n"
        for number, other in enumerate(NAMES, start=1)
    )
    (folder / "hosts").write_text(hosts)
    # The shell of the second machine is not bash.
    shell = "/bin/bash" if name == "alpha" else "/bin/sh"
    (folder / "passwd").write_text(
        f"root:x:0:0:root:{home}:{shell}\n"
        "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin\nnobody:x:65534:65534::/:/bin/false\n"
    )
    (folder / "shadow").write_text("root:*:19000:0:99999:7:::\n")
    unshare = subprocess.Popen(
        [
            "unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child",
            "bash", "-c", START.format(folder=folder, name=name),
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=end_with_the_tests,
    )  # fmt: skip
    assert unshare.stdout is not None
    assert unshare.stderr is not None
    if unshare.stdout.readline() != "ready\n":
        why = unshare.stderr.read().strip()
        unshare.wait(timeout=10)
        pytest.skip(f"no namespaces can be made here: {why}")
    unshare.stderr.close()
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
    return Host(name, address, folder, unshare, int(children[0]))


def end_with_the_tests() -> None:
    """Let the host end when the tests do, also when they are killed."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def join(bed: Bed) -> None:
    """Lay the cable."""
    one, other = bed.hosts.values()
    command = f"ip link add {CABLE} netns {one.pid} type veth peer name {CABLE} netns {other.pid}"
    subprocess.run(shlex.split(command), check=True, timeout=30)
    for host in bed.hosts.values():
        host.run("ip", "address", "add", f"{host.address}/24", "dev", CABLE)
        host.link("up")


def start_sshd(host: Host, bed: Path) -> None:
    """Start sshd and wait until it answers."""
    config = host.folder / "sshd_config"
    config.write_text(
        SSHD.format(address=host.address, folder=host.folder, bed=bed, scratch=bed / "tmp")
    )
    host.run("/usr/sbin/sshd", "-f", str(config), "-E", str(host.folder / "sshd.log"))
    command = ["ssh", "-F", str(bed / "ssh_config"), "-o", "BatchMode=yes", host.name, "true"]
    wait_for(
        lambda: subprocess.run(host.enter(*command), capture_output=True).returncode == 0,
        timeout_s=20,
        what=f"sshd of {host.name}: {(host.folder / 'sshd.log').read_text()}",
    )
