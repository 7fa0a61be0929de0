"""launch/node.sh: several torchrun on one machine, as if on several; what it says of mistakes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.debian import need
from tests.hosts import wait_for
from tests.projects import environment, make_project, metrics, status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Waits in every step, until it is told to hurry.
SLOW = """
import os, time
from digits import failures, train

ordinary = train.train_step

def train_step(training, window):
    if not os.path.exists("hurry"):
        time.sleep(0.2)
    return ordinary(training, window)

train.train_step = train_step
if __name__ == "__main__":
    failures.run_and_exit(train.main)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project, and in it a node script that starts a training that lasts."""
    project = make_project(tmp_path_factory.mktemp("nodes") / "a 'b'", project_name="digits")
    script = (project / "launch/node.sh").read_text()
    assert script.count("-m -- digits.train") == 1
    (project / "launch/slow.sh").write_text(script.replace("-m -- digits.train", "-- slow.py"))
    (project / "slow.py").write_text(SLOW)
    return project


@pytest.fixture
def port() -> str:
    """A free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextmanager
def node(
    project: Path, output: Path, script: str = "node.sh", **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a machine; its words go to a file beside the output. It ends with the block."""
    number = env["NODE_RANK"]
    values = {
        "MASTER_ADDR": "127.0.0.1", "PROCESSES": "1", "INTERFACE": "lo",
        "CONFIG": "configs/debug.yaml", "TMPDIR": str(output.parent),
    }  # fmt: skip
    words = output.parent / f"words-{number}"
    with words.open("w") as file:
        process = subprocess.Popen(
            ["bash", f"launch/{script}", "--output_dir", str(output)],
            cwd=project, env=environment(**(values | env)),
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process
    finally:
        for pid in [process.pid, *workers_of(process)]:
            with_no_regret(pid)
        process.wait(timeout=30)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes that a torchrun has started."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(word) for word in children.split()]


def with_no_regret(pid: int) -> None:
    """Kill a process, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def words(output: Path) -> str:
    """Return what all machines have said."""
    return "".join(path.read_text() for path in sorted(output.parent.glob("words-*")))


def test_the_second_machine_may_be_started_first(project: Path, tmp_path: Path, port: str) -> None:
    """It waits for the first one, and asks at its door without disturbing it."""
    output = tmp_path / "runs"
    with node(project, output, NODE_RANK="1", NODES="2", MASTER_PORT=port) as second:
        wait_for(lambda: has_child(second, "sleep"), 30, "the second machine does not wait")
        with node(project, output, NODE_RANK="0", NODES="2", MASTER_PORT=port) as first:
            assert [first.wait(timeout=120), second.wait(timeout=30)] == [0, 0], words(output)
    assert status(output / "debug-001")["state"] == "finished"
    assert "processes      2 on" in (tmp_path / "words-0").read_text()
    assert "error: " not in words(output)


def has_child(process: subprocess.Popen[bytes], name: str) -> bool:
    """Return whether a process has a child of this name."""
    for pid in workers_of(process):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return False


def test_an_elastic_job_gains_and_loses_a_machine(project: Path, tmp_path: Path, port: str) -> None:
    """One machine trains, a second joins, is lost, and the first goes on to the end."""
    output = tmp_path / "runs"
    run = output / "debug-001"
    env = {"NODES": "1:2", "MASTER_PORT": port, "script": "slow.sh"}

    def last_saved() -> int:
        return max((int(p.name[5:13]) for p in run.glob("checkpoints/step-*.json")), default=0)

    with node(project, output, NODE_RANK="0", **env) as first:
        wait_for(last_saved, 60, "the first machine does not train alone")
        assert "processes      1 on" in words(output)
        with node(project, output, NODE_RANK="1", **env) as second:
            wait_for(lambda: "processes      2 on" in words(output), 60, "nobody joins")
            joined_at = last_saved()
            wait_for(lambda: last_saved() > joined_at, 60, "the two do not train")
            for pid in [*workers_of(second), second.pid]:
                os.kill(pid, signal.SIGKILL)
            lost_at, began = last_saved(), time.monotonic()
            wait_for(lambda: words(output).count("going on with") == 2, 90, "nobody goes on")
            wait_for(lambda: last_saved() > lost_at, 30, "the first machine does not go on")
            print(f"trained on {time.monotonic() - began:.1f} s after the loss")
        (project / "hurry").touch()
        try:
            assert first.wait(timeout=90) == 0, words(output)
        finally:
            (project / "hurry").unlink()
    assert [folder.name for folder in output.iterdir()] == ["debug-001"]
    assert status(run)["state"] == "finished"
    steps = [line["step"] for line in metrics(run, "train")]
    assert steps == sorted(set(steps))
    assert [line["epoch"] for line in metrics(run, "validation")] == [0, 1]
    assert metrics(run, "validation")[-1]["samples"] == 359


# What is set -> what the error says.
MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "no number": ({"NODE_RANK": ""}, r"NODE_RANK: set it to 0 on the first machine, 1 on the sec"),
    "no address": ({"MASTER_ADDR": ""}, "MASTER_ADDR: set it to the name or address of the first"),
    "a machine too many": (
        {"NODE_RANK": "2"},
        "error: NODE_RANK=2, but there are NODES=2 machines, counted from 0: set NODES",
    ),
    "a number that is none": (
        {"NODE_RANK": "first"},
        "error: NODE_RANK=first, but there are NODES=2 machines, counted from 0: set NODES",
    ),
    "a wrong count": ({"NODES": "2:"}, "error: NODES=2:: set it to the number of machines, or LEA"),
    "a wrong name": ({"MASTER_ADDR": "no.such.invalid"}, "error: .* cannot resolve MASTER_ADDR=no"),
    "another machine's address": (
        {"MASTER_ADDR": "198.51.100.7"},
        r"error: MASTER_ADDR=198.51.100.7 is not .*, the first machine \(NODE_RANK=0\)",
    ),
    "no first machine": (
        {"NODE_RANK": "1", "MASTER_PORT": "9", "WAIT_S": "2"},
        r"error: .* cannot reach port 9 of 127.0.0.1: is the first machine \(NODE_RANK=0\) started",
    ),
    "no port": ({"MASTER_PORT": "http"}, "error: MASTER_PORT=http: set it to a number from 1 to 6"),
    "no interface": (
        {"INTERFACE": "eth9"},
        "error: .* has no network interface eth9; it has: .*lo",
    ),
    "no torchrun": ({"PATH": "/usr/bin:/bin"}, "error: torchrun is not found on .*: activate the"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_mistake_is_said_in_one_line(project: Path, mistake: str, nodes: str) -> None:
    env, words = MISTAKES[mistake]
    defaults = {
        "NODES": nodes, "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "2345",
    }  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "launch/node.sh"], cwd=project, env=environment(**(defaults | env)),
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
    assert time.monotonic() - began < 60
    assert done.returncode not in (0, None)
    assert re.search(words.replace("NODES=2 ", f"NODES={nodes} "), done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::"])
def test_a_port_that_is_taken(project: Path, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server((address, 0), family=family) as other:
        port = str(other.getsockname()[1])
        env = {"NODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = subprocess.run(
            ["bash", "launch/node.sh"], cwd=project, env=environment(**env),
            capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match(f"error: port {port} of .* is taken by another program: set MASTER_PORT", line)


def in_a_network_of_its_own(
    project: Path, prepare: str, *command: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a project, in a network namespace; skip where there are none."""
    need("iproute2")
    prepare = f"mount -t proc proc /proc && ip link set lo up && {prepare} && echo prepared"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "bash", "-c", f'{prepare} && exec "$@"', "-", *command],
        cwd=project, env=environment(CONFIG="configs/debug.yaml", CUDA_VISIBLE_DEVICES="", **env),
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip
    if not done.stdout.startswith("prepared"):
        pytest.skip(f"no such namespace can be made here: {done.stderr}")
    return done


def test_a_first_machine_behind_a_wall(project: Path) -> None:
    """Nobody refuses the connection, and nobody answers."""
    wall = (
        "ip link add wall type veth peer name behind && ip address add 203.0.113.1/24 dev wall && "
        "ip link set behind up && ip link set wall up && "
        "ip neighbour add 203.0.113.7 lladdr 02:00:00:00:00:01 dev wall"
    )
    done = in_a_network_of_its_own(
        project, wall, "bash", "launch/node.sh",
        NODES="2", NODE_RANK="1", MASTER_ADDR="203.0.113.7", WAIT_S="4",
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match(r"error: .* cannot reach port 29500 of 203.0.113.7: is the first mach", line)


def test_one_machine_without_ipv6(project: Path, tmp_path: Path) -> None:
    no_ipv6 = "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6"
    done = in_a_network_of_its_own(
        project, f"{no_ipv6} && ! grep -q . /proc/net/if_inet6", "bash", "launch/local.sh",
        "--epochs", "1", "--output_dir", str(tmp_path / "runs"),
        TMPDIR=str(tmp_path), PROCESSES="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert status(tmp_path / "runs/debug-001")["state"] == "finished"
