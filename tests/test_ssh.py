"""launch/ssh.sh on two machines: it trains, it stops everywhere, and it says what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import pytest
import yaml

from ddpgen import launch_files
from tests.hosts import CABLE, Bed, two_hosts, wait_for
from tests.projects import make_project, metrics, package_of, status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# More than any of these tests takes, on purpose
LONG = ("--epochs", "500", "--timeout_s", "6")


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Two machines."""
    with two_hosts(tmp_path_factory.mktemp("hosts")) as bed:
        yield bed


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in a folder with spaces, quotes and an umlaut."""
    folder = tmp_path_factory.mktemp("projects") / "some dir" / "ü 'q' \"Q\" $HOME" / "my project"
    return make_project(folder, project_name="digits", launchers=("ssh",))


@pytest.fixture(autouse=True)
def nothing_is_left(bed: Bed) -> Iterator[None]:
    """After every test no process is left on any machine, and the cable is where it was."""
    yield
    bed.wait_until_idle(40)


def script_of(project: Path) -> Path:
    return project / "launch/ssh.sh"


def test_two_machines_train_as_one(bed: Bed, project: Path, tmp_path: Path) -> None:
    """All arguments reach the program as they are, whatever the shells on the way make of them."""
    output = str(tmp_path / "out put 'q' \"Q\" $HOME `id` ü*")
    job = bed.launch(script_of(project), "--output_dir", output, "--epochs", "2")
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    run = Path(output) / "debug-001"
    assert yaml.safe_load((run / "config.yaml").read_text())["output_dir"] == output
    assert status(run)["state"] == "finished"
    assert "2 on 2 machine(s)" in out
    ranks = json.loads((run / "environment.json").read_text())
    assert [rank["host"] for rank in ranks] == ["alpha", "beta"]
    assert metrics(run, "validation")[-1]["accuracy"] > 0.9
    assert metrics(run, "validation")[-1]["samples"] == 359


PLAIN = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(1.0)
for _ in range(50):  # long enough to be there together with the other job
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    time.sleep(0.05)
if dist.get_rank() == 0:
    print("TOTAL", int(total), sys.argv[1:], os.environ["GREETING"], os.environ["MASTER_PORT"])
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""


def test_two_jobs_of_plain_scripts_do_not_meet(bed: Bed, tmp_path: Path) -> None:
    """What `ddpgen launch` writes for a script that is no generated project."""
    (tmp_path / "my train.py").write_text(PLAIN)
    values = launch_files.defaults() | {
        "file": "ssh it.sh", "folder": '"$(dirname -- "${BASH_SOURCE[0]}")"', "has_config": False,
        "program": "-- 'my train.py'", "logs": "logs", "nodes": 2, "gpus_per_node": 2,
        "hosts": "alpha root@beta", "interface": CABLE, "env": ["GREETING='it'\\''s me'"],
        "setup": ["umask 077"],
    }  # fmt: skip
    script = tmp_path / "ssh it.sh"
    script.write_text(launch_files.render("ssh", values))
    jobs = [bed.launch(script, "a b", f"'{n}'", HOSTS="", INTERFACE="") for n in range(2)]
    ports = []
    for number, job in enumerate(jobs):
        out, err = job.communicate(timeout=120)
        assert job.returncode == 0, err
        (line,) = re.findall(r"TOTAL .*", out)
        assert line.startswith(f"""TOTAL 2 ['a b', "'{number}'"] it's me """)
        ports.append(int(line.split()[-1]))
    assert len(set(ports)) == 2
    assert all(20000 <= port < 30000 for port in ports)
    assert {folder.name for folder in (tmp_path / "logs").iterdir()} == {"node-0", "node-1"}


def checkpoints(output: Path) -> list[int]:
    """Return the steps of all checkpoints of the first run."""
    files = (output / "debug-001/checkpoints").glob("step-*.json")
    return sorted(int(file.name.split("-")[1].split(".")[0]) for file in files)


def steps(out: str) -> list[int]:
    """Return the steps that a training printed."""
    return [int(step) for step in re.findall(r"^step +(\d+)", out, re.M)]


def goes_on(bed: Bed, project: Path, output: Path) -> None:
    """Start the same job again: it goes on with the last checkpoint. Then SIGTERM ends it."""
    saved = checkpoints(output)[-1]
    job = bed.launch(script_of(project), "--output_dir", str(output), *LONG)
    try:
        wait_for(lambda: checkpoints(output)[-1] > saved, 60, "no new checkpoint")
    except AssertionError as error:
        job.terminate()
        raise AssertionError("".join(job.communicate(timeout=60))) from error
    else:
        job.terminate()
        out, err = job.communicate(timeout=30)
    finally:
        job.kill()
    assert f"going on with {output}/debug-001" in out, err
    assert steps(out)[0] > saved
    assert job.returncode == 128 + signal.SIGTERM
    assert status(output / "debug-001")["state"] == "stopped"
    assert checkpoints(output)[-1] == status(output / "debug-001")["step"]


def test_ctrl_c_at_the_terminal_saves_and_ends_everything(
    bed: Bed, project: Path, tmp_path: Path
) -> None:
    command = bed.alpha.enter("bash", str(script_of(project)), "--output_dir", str(tmp_path), *LONG)
    with pexpect.spawn(
        command[0], command[1:], env=bed.environment(), encoding="utf-8", timeout=60
    ) as terminal:
        terminal.expect("step +5 ")
        wait_for(lambda: checkpoints(tmp_path), 20, "no checkpoint")
        terminal.sendintr()
        assert bed.wait_until_idle(30) < 30
        terminal.expect(pexpect.EOF)
        assert "stopped by SIGTERM after step" in terminal.before
    assert terminal.exitstatus == 130
    assert status(tmp_path / "debug-001")["state"] == "stopped"
    assert checkpoints(tmp_path)[-1] == status(tmp_path / "debug-001")["step"]
    goes_on(bed, project, tmp_path)


def clients_of(pid: int) -> dict[str, int]:
    """Return the ssh processes of a launch script by their host."""
    found = {}
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            arguments = Path(f"/proc/{word}/cmdline").read_bytes().split(b"\0")
            if arguments[0] == b"ssh":
                found[arguments[-4].decode()] = int(word)
            waiting.append(int(word))
    return found


@pytest.mark.parametrize("killed", ["script", "alpha", "beta"])
def test_the_end_of_the_script_or_of_a_connection_saves_and_ends_everything(
    bed: Bed, project: Path, tmp_path: Path, killed: str
) -> None:
    """kill -9: nobody can say good-bye."""
    job = bed.launch(script_of(project), "--output_dir", str(tmp_path), *LONG)
    try:
        wait_for(lambda: checkpoints(tmp_path), 60, "no checkpoint")
        pids = {"script": job.pid, **clients_of(job.pid)}
        os.kill(pids[killed], signal.SIGKILL)
        assert bed.wait_until_idle(30) < 30
        _, err = job.communicate(timeout=10)
    finally:
        job.kill()
    assert job.returncode == (-9 if killed == "script" else 137)
    assert killed == "script" or f"{killed} ended with exit code 137" in err
    assert status(tmp_path / "debug-001")["state"] == "stopped"
    assert checkpoints(tmp_path)[-1] == status(tmp_path / "debug-001")["step"]


def test_a_cut_cable_ends_the_job_on_both_sides(bed: Bed, project: Path, tmp_path: Path) -> None:
    job = bed.launch(script_of(project), "--output_dir", str(tmp_path), *LONG)
    try:
        wait_for(lambda: checkpoints(tmp_path), 60, "no checkpoint")
        bed.beta.link("down")
        _, err = job.communicate(timeout=60)
        assert job.returncode == 1
        assert bed.wait_until_idle(60) < 60
    finally:
        bed.plug_in()
        job.kill()
    assert "error: Rank 1 did not answer within 6 s (timeout_s)." in err
    assert "alpha ended with exit code 1; stopping the other machines" in err
    goes_on(bed, project, tmp_path)


def test_a_failure_on_one_machine_ends_the_other(bed: Bed, project: Path, tmp_path: Path) -> None:
    job = bed.launch(script_of(project), "--output_dir", str(tmp_path), *LONG)
    try:
        wait_for(lambda: checkpoints(tmp_path), 60, "no checkpoint")
        worker = f"-u -m {package_of(project)}.train"
        (pid,) = [pid for pid, line in bed.beta.processes().items() if worker in line]
        os.kill(pid, signal.SIGKILL)
        assert bed.wait_until_idle(20) < 20
        _, err = job.communicate(timeout=10)
    finally:
        job.kill()
    assert job.returncode == 1
    assert "error: Rank 1 is gone without a word." in err
    assert "ended with exit code 1; stopping the other machines" in err


# What is set -> what the line with the error says.
MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "no hosts": ({"HOSTS": " "}, 'HOSTS is empty: set it to the machines, like HOSTS="gpu1 gpu2"'),
    "a host twice": ({"HOSTS": "alpha beta root@alpha"}, "HOSTS has more than once: alpha. Name"),
    "a range of machines": ({"NODES": "1:2"}, "NODES=1:2, but HOSTS has 2 machines: leave NODES"),
    "a wrong name": ({"HOSTS": "alpha nowhere"}, "ssh to nowhere failed: see above, and try: ssh"),
    "no sshd": (
        {"HOSTS": "alpha deaf"},
        "ssh to deaf failed: see above, and try: ssh -F .*/ssh_config deaf true",
    ),
    "an unknown key": ({"HOSTS": "alpha stranger"}, "ssh to stranger failed: see above, and try"),
    "a wrong address": (
        {"MASTER_ADDR": "no.such.invalid"},
        "(alpha|beta) cannot resolve MASTER_ADDR=no.such.invalid: set it to the name or address of",
    ),
    "the address of another machine": (
        {"MASTER_ADDR": "10.77.0.2", "WAIT_S": "5"},
        r"MASTER_ADDR=10.77.0.2 is not alpha, the first machine \(NODE_RANK=0\), which has",
    ),
    "an address that others cannot reach": (
        {"MASTER_ADDR": "127.0.0.1", "WAIT_S": "5"},
        "beta cannot reach port [0-9]+ of 127.0.0.1: is the first machine .* and the port open?",
    ),
    "no port": ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: set it to a number from 1 to 65535"),
    "no interface": (
        {"INTERFACE": "eth9"},
        f"(alpha|beta) has no network interface eth9; it has: {CABLE}, lo",
    ),
    "no torchrun": ({"REMOTE_PATH": "/usr/bin:/bin"}, "torchrun is not found on (alpha|beta): set"),
    "no folder": ({"DIRECTORY": "/no where"}, "(alpha|beta) has no folder /no where: set DIRECT"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said_in_one_line(
    bed: Bed, project: Path, tmp_path: Path, mistake: str
) -> None:
    env, words = MISTAKES[mistake]
    began = time.monotonic()
    job = bed.launch(script_of(project), "--output_dir", str(tmp_path), **env)
    _, err = job.communicate(timeout=60)
    assert job.returncode not in (0, None)
    assert time.monotonic() - began < 60
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    # Each machine that sees the mistake may say so.
    assert 1 <= len(errors) <= 2, err
    assert all(re.match(f"error: {words}", line) for line in errors), errors
    assert "Traceback" not in err or mistake == "an address that others cannot reach"
    assert not (tmp_path / "debug-001").exists()


def test_a_port_that_is_taken(bed: Bed, project: Path, tmp_path: Path) -> None:
    """By a program that listens somewhere else than at the address of the job."""
    listen = (
        "import socket; s = socket.create_server(('127.0.0.1', 23456)); print(flush=True); input()"
    )
    with subprocess.Popen(
        bed.alpha.enter("python3", "-c", listen), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        other.stdout.read(1)
        job = bed.launch(script_of(project), "--output_dir", str(tmp_path), MASTER_PORT="23456")
        _, err = job.communicate(timeout=60)
        other.communicate("\n")
    assert job.returncode == 1
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: port 23456 of alpha is taken by another program: set MASTER_PORT to a free one, "
        "the same on all machines"
    ]
