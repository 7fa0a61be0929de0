"""A real Slurm with two machines on this one, in namespaces of its own.

Nothing can stay behind or collide: network, host names and process numbers are private, and when
the first process in there ends, all others do. It ends with the test process, however that ends.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.debian import need
from tests.projects import environment, is_running

NAMESPACES = ("--mount", "--net", "--uts", "--pid")

# The addresses are on the loopback interface, but not of it: names resolve to no others.
INSIDE = """
set -euo pipefail
cd "$1"
ip link set lo up
ip address add 10.0.0.1/32 dev lo
ip address add 10.0.0.2/32 dev lo
mount --bind hosts /etc/hosts
mount -t sysfs sysfs /sys
hostname n1
munged --foreground --force --key-file="$1/munge.key" --socket="$1/munge.socket" \
  --pid-file="$1/munge.pid" --seed-file="$1/munge.seed" --log-file="$1/munge.log" &
slurmctld -c -D &
slurmd -N n1 -D &
unshare --uts bash -c 'hostname n2; exec slurmd -N n2 -D' &
cat >/dev/null  # until the tests are gone
"""

HOSTS = """
127.0.0.1 localhost
10.0.0.1 n1
10.0.0.2 n2
::ffff:10.0.0.1 n1
::ffff:10.0.0.2 n2
"""

# No machine has these cores and GPUs: Slurm only counts them.
CONFIGURATION = """
ClusterName=bed
SlurmctldHost=n1
SlurmctldPort=7001
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
ReturnToService=2
MessageTimeout=5
KillWait=10
MinJobAge=3600
NodeName=n1 Port=7011 CPUs=32 Gres=gpu:4
NodeName=n2 Port=7012 CPUs=32 Gres=gpu:4
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE
"""

FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL")


def wait_for(what: str, happened: Callable[[], object], timeout_s: float = 90) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(0.1)


class Cluster:
    """The running Slurm.

    Attributes:
        folder: Its configuration, state and logs.
        pid: The first process in its namespaces.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder = folder
        self.pid = pid

    def run(self, *command: str, cwd: Path | None = None, **env: str | None) -> str:
        """Run a command on n1 and return what it prints.

        Args:
            command: The command.
            cwd: Where it runs.
            env: Variables; None takes one away.
        """
        variables: dict[str, str | None] = {**environment(), **env}
        enter = ["nsenter", f"--target={self.pid}", *NAMESPACES, f"--wd={cwd or self.folder}"]
        done = subprocess.run(
            [*enter, *command],
            env={
                "SLURM_CONF": str(self.folder / "slurm.conf"),
                **{name: value for name, value in variables.items() if value is not None},
            },
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, folder: Path, *command: str, **env: str | None) -> str:
        """Type sbatch in a folder and return the job's number."""
        return self.run("sbatch", "--parsable", *command, cwd=folder, **env).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        text = self.run("scontrol", "show", "job", number, "--oneliner")
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def state(self, number: str) -> str:
        """Return the state of a job."""
        return self.job(number)["JobState"]

    def wait(self, number: str, *states: str, timeout_s: float = 90) -> dict[str, str]:
        """Wait until a job is in one of these states, by default one of those that are an end."""
        wanted = states or FINAL
        wait_for(
            f"job {number} is {' or '.join(wanted)}",
            lambda: self.state(number) in wanted,
            timeout_s,
        )
        return self.job(number)

    def output(self, number: str) -> str:
        """Return what a job has printed so far."""
        text = self.run("scontrol", "show", "job", number)
        file = Path(re.findall(r"^ *StdOut=(.*)$", text, re.MULTILINE)[0])
        return file.read_text() if file.exists() else ""

    def wait_for_output(self, number: str, words: str, count: int = 1) -> None:
        """Wait until a running job has printed something so often."""
        try:
            wait_for(words, lambda: self.output(number).count(words) >= count)
        except AssertionError as error:
            raise AssertionError(f"{self.job(number)}\n{self.output(number)}") from error

    def requeue_wait_is_over(self, number: str) -> None:
        """Spare a job the two minutes that Slurm lets it wait before it starts again.

        Slurm knows by its clock, in whole seconds, that this is not what was just ended.
        """
        self.wait(number, "PENDING")
        later = time.time() + 2
        wait_for("the clock goes on", lambda: time.time() > later)
        self.run("scontrol", "update", f"job={number}", "starttime=now")

    def end_all(self) -> None:
        """End all jobs that are left."""
        left = self.run("squeue", "--noheader", "--format=%A", "--states=all").split()
        for pid in [pid for number in left for pid in self.processes(number, "train")]:
            os.kill(pid, signal.SIGKILL)
        self.run("scancel", "--user=root")
        wait_for("no job is left", lambda: not self.run("squeue", "--noheader").strip())

    def processes(self, number: str, words: str = "", node: str = "") -> list[int]:
        """Return the processes of a job, by their numbers out here.

        Args:
            number: The job.
            words: Part of the command line.
            node: Only those on this machine.
        """
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns/pid") != os.readlink(f"/proc/{self.pid}/ns/pid"):
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                host = self.node_of(int(entry.name))
            except OSError:  # it has ended, or is none of ours
                continue
            ours = f"SLURM_JOB_ID={number}" in variables or f"slurmstepd: [{number}." in command
            if ours and words in command and node in ("", host):
                found.append(int(entry.name))
        return found

    def node_of(self, pid: int) -> str:
        """Return the machine that a process is on: those of n1 share the host name of the first."""
        first, own = (os.readlink(f"/proc/{process}/ns/uts") for process in (self.pid, pid))
        return "n1" if first == own else "n2"


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a Slurm and end it."""
    need("slurm-wlm", "munge")
    can = subprocess.run(["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"])
    if can.returncode or os.geteuid() != 0:
        pytest.skip("needs root and Linux namespaces to start a Slurm")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket is made in it
    with (folder / "daemons.log").open("w") as log:
        write_configuration(folder)
        process = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc",
             "bash", "-c", INSIDE, "inside", str(folder)],
            stdin=subprocess.PIPE, stdout=log, stderr=log,
            env={**os.environ, "SLURM_CONF": str(folder / "slurm.conf")},
        )  # fmt: skip
    first = 0
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for("the namespaces are there", children.read_text)
        first = int(children.read_text().split()[0])
        cluster = Cluster(folder, first)
        try:
            wait_for("two machines are idle", lambda: idle(cluster) == 2, 30)
        except AssertionError as error:
            raise AssertionError((folder / "daemons.log").read_text()[-5000:]) from error
        yield cluster
    finally:
        process.kill()  # and the kernel ends all that it has started
        process.communicate()
        wait_for("all daemons have ended", lambda: not (first and is_running(first)))
        shutil.rmtree(folder)


def write_configuration(folder: Path) -> None:
    """Write what the daemons read."""
    for name in ("state", "n1", "n2", "cgroup"):
        (folder / name).mkdir()
    (folder / "hosts").write_text(HOSTS)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null,/dev/zero,/dev/full,/dev/random\n")
    (folder / "cgroup.conf").write_text(
        f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n"
    )


def idle(cluster: Cluster) -> int:
    """Return how many machines have nothing to do; 0 while Slurm does not answer."""
    try:
        states = cluster.run("timeout", "5", "sinfo", "--noheader", "--Node", "--format=%T")
    except AssertionError:
        return 0
    return states.split().count("idle")
