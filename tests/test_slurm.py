"""launch/slurm.sbatch on a real Slurm: two machines with two processes each.

What Slurm itself has no part in is tried with stand-ins for its commands.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpgen import launch_files
from tests.projects import environment, make_project, metrics, status
from tests.slurm import Cluster, running_cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = "launch/slurm.sbatch"

# Each test waits until its job trains: it goes slowly as long as there is this file.
SLOW = """

import time
from pathlib import Path

_compute_losses = compute_losses


def compute_losses(outputs, targets):
    if Path("slow").exists():
        time.sleep(0.1)
    return _compute_losses(outputs, targets)
"""

PROGRAM = """
import json, os, pathlib, socket, sys, time
names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "MASTER_PORT", "A", "B")
facts = {name: os.environ.get(name) for name in names}
print("FACTS", json.dumps([socket.gethostname(), facts, sys.argv[1:]]), flush=True)
while pathlib.Path("wait").exists():
    time.sleep(0.05)
"""

# What `ddpgen launch` fills the file with for a program that is no project of ddpgen.
VALUES: dict[str, Any] = launch_files.defaults() | {
    "has_config": False, "program": "-- 'my train.py' --lr 0.1", "logs": "logs",
    "name": "my-train", "nodes": 2, "gpus_per_node": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two idle machines."""
    with running_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project for two machines with two processes each."""
    folder = tmp_path_factory.mktemp("projects") / "it's a ü 'project'"
    made = make_project(
        folder, package_name="digits", launchers=("slurm",), nodes=2, gpus_per_node=2
    )
    model = made / "digits/model.py"
    model.write_text(model.read_text() + SLOW)
    settings = made / "configs/debug.yaml"
    text = settings.read_text()
    settings.write_text(text.replace("log_every_steps: 5", "log_every_steps: 1"))
    return made


@pytest.fixture(autouse=True)
def undisturbed(request: pytest.FixtureRequest) -> Iterator[None]:
    """End what a test has left, so that the next one finds two idle machines."""
    yield
    if "project" in request.fixturenames:
        slowly(request.getfixturevalue("project"), False)
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").end_all()


def submit(cluster: Cluster, project: Path, *command: str, **env: str | None) -> str:
    """Start a training of seconds: options of sbatch, then arguments of the program."""
    command = command if SCRIPT in command else (SCRIPT, *command)
    return cluster.submit(project, *command, CONFIG="configs/debug.yaml", **env)


def trains(cluster: Cluster, number: str, folder: Path) -> None:
    """Wait until a run has made some steps."""

    def has_steps() -> bool:
        state = cluster.state(number)
        assert state in ("PENDING", "CONFIGURING", "RUNNING"), cluster.output(number)
        return (folder / "metrics.jsonl").exists() and bool(metrics(folder, "train"))

    wait_for(f"job {number} trains", has_steps)


def slowly(project: Path, is_slow: bool = True) -> None:
    """Let all trainings of the project go slowly, or not any more."""
    (project / "slow").touch() if is_slow else (project / "slow").unlink(missing_ok=True)


STRAIGHT = ("--epochs", "4", "--exact_resume", "true")


@pytest.fixture(scope="module")
def straight(cluster: Cluster, project: Path) -> str:
    """The number of a job that trains without being disturbed."""
    number = submit(cluster, project, *STRAIGHT, "--output_dir", 'str"ai ght $HOME')
    cluster.wait(number)
    return number


def test_a_job_trains_on_two_machines_with_two_processes_each(
    cluster: Cluster, project: Path, straight: str
) -> None:
    job, printed = cluster.job(straight), cluster.output(straight)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), printed
    assert (project / f"digits-{straight}.out").read_text() == printed
    folder = project / 'str"ai ght $HOME/debug-001'
    assert status(folder)["state"] == "finished"
    ranks = json.loads((folder / "environment.json").read_text())
    assert [rank["host"] for rank in ranks] == ["n1", "n1", "n2", "n2"]
    *_, last = metrics(folder, "validation")
    assert (last["samples"], last["accuracy"] > 0.9) == (359, True)
    assert "4 on 2 machine(s)" in printed
    assert not re.search(r"warning|error|\[W", printed), printed


def test_asked_to_go_on_elsewhere_it_does_so_bit_for_bit(
    cluster: Cluster, project: Path, straight: str
) -> None:
    """scancel --signal=USR1: checkpoint, a new start of the same job, the same numbers."""
    slowly(project)
    number = submit(cluster, project, *STRAIGHT, "--output_dir", "asked", MAX_REQUEUES="1")
    folder = project / "asked/debug-001"
    trains(cluster, number, folder)
    cluster.run("scancel", "--signal=USR1", number)
    cluster.wait(number, "PENDING")
    slowly(project, False)
    stopped = status(folder)
    assert (stopped["state"], stopped["reason"]) == ("stopped", "SIGUSR1")
    assert 0 < stopped["step"] < 40
    cluster.requeue_wait_is_over(number)
    job = cluster.wait(number)
    printed = cluster.output(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), printed
    assert f"job {number} starts again to go on: 1 of MAX_REQUEUES=1\n" in printed
    assert "going on with asked/debug-001\n" in printed
    assert status(folder)["state"] == "finished"
    assert [path.name for path in (project / "asked").iterdir()] == ["debug-001"]
    for kind in ("train", "validation"):
        there = metrics(project / 'str"ai ght $HOME/debug-001', kind)
        assert metrics(folder, kind) == there
        assert len(there) == (44 if kind == "train" else 4)

    # Whoever starts it again: Slurm does so itself when a machine fails.
    cluster.run("scontrol", "requeue", number)
    cluster.requeue_wait_is_over(number)
    job = cluster.wait(number, "FAILED")
    assert job["ExitCode"] == "1:0"
    assert "error: started again 2 times, more than MAX_REQUEUES=1:" in cluster.output(number)


def test_the_warning_before_the_time_limit_does_the_same(cluster: Cluster, project: Path) -> None:
    slowly(project)
    options = ("--time=60", "--signal=USR1@3000")
    number = submit(cluster, project, *options, SCRIPT, "--epochs", "1000", "--output_dir", "time")
    folder = project / "time/debug-001"
    trains(cluster, number, folder)
    # The warning is due now. Slurm looks for what is due every half a minute.
    cluster.run("scontrol", "update", f"job={number}", "timelimit=51")
    cluster.wait(number, "PENDING")
    stopped = status(folder)
    assert (stopped["state"], stopped["reason"]) == ("stopped", "SIGUSR1")
    assert f"job {number} starts again to go on: 1 of MAX_REQUEUES=20\n" in cluster.output(number)
    cluster.run("scancel", number)


# What is killed of a job on the second machine
VICTIMS = {"torchrun": "--nnodes=2", "everything": ""}


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_machine_lost_ends_the_job_soon(cluster: Cluster, project: Path, victim: str) -> None:
    slowly(project)
    number = submit(cluster, project, "--epochs", "1000", "--output_dir", victim)
    trains(cluster, number, project / victim / "debug-001")
    killed = cluster.processes(number, VICTIMS[victim], node="n2")
    assert (len(killed) == 1) == (victim == "torchrun")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    job = cluster.wait(number, timeout_s=60)
    slowly(project, False)
    assert job["JobState"] in ("FAILED", "NODE_FAIL")
    assert job["ExitCode"] != "0:0"
    wait_for("all have ended", lambda: not cluster.processes(number), 30)


def test_scancel_saves_and_leaves_no_process(cluster: Cluster, project: Path) -> None:
    slowly(project)
    number = submit(cluster, project, "--epochs", "1000", "--output_dir", "cancelled")
    folder = project / "cancelled/debug-001"
    trains(cluster, number, folder)
    assert len(cluster.processes(number, "digits.train", node="n2")) > 2
    cluster.run("scancel", number)
    job = cluster.wait(number)
    wait_for("all have ended", lambda: not cluster.processes(number), 30)
    slowly(project, False)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    stopped = status(folder)
    assert (stopped["state"], stopped["reason"]) == ("stopped", "SIGTERM")
    saved = json.loads((folder / "checkpoints/last.json").read_text())
    assert f"{stopped['step']:08d}" in saved["file"]


def test_jobs_on_the_same_machines_do_not_meet(cluster: Cluster, project: Path) -> None:
    """Two tasks of an array: each is a job of its own, here at the same time as the other."""
    slowly(project)
    first = submit(
        cluster, project, "--array=7,9", SCRIPT, "--epochs", "2", "--output_dir", "array"
    )
    numbers = [f"{first}_7", f"{first}_9"]
    for number in numbers:
        trains(cluster, number, project / f"array/train-a{number[-1]}-001")
    assert len({cluster.job(number)["JobId"] for number in numbers}) == 2
    assert [cluster.state(number) for number in numbers] == ["RUNNING", "RUNNING"]
    slowly(project, False)
    for number in numbers:
        job, printed = cluster.wait(number), cluster.output(number)
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), printed
        assert printed.count("finished after step 22") == 1
    names = sorted(path.name for path in (project / "array").iterdir())
    assert names == ["train-a7-001", "train-a9-001"]
    for name in names:
        assert status(project / "array" / name)["state"] == "finished"


WRONG: dict[str, tuple[tuple[str, ...], dict[str, str | None], str]] = {
    "address": (
        (), {"MASTER_ADDR": "no.such.invalid"},
        "error: HOST cannot resolve MASTER_ADDR=no.such.invalid:",
    ),
    "port": ((), {"MASTER_PORT": "7001"}, "error: port 7001 of n1 is taken by another program:"),
    "interface": ((), {"INTERFACE": "ib9"}, "error: HOST has no network interface ib9; it has: lo"),
    "torchrun": ((), {"PATH": "/usr/bin:/bin"}, "error: torchrun is not found on HOST:"),
    "folder": (("--chdir=launch",), {}, "error: there is no configs/debug.yaml in "),
    "image": (
        (), {"IMAGE": "torch.sif"},
        "error: apptainer is not found on HOST, but IMAGE=torch.sif needs it:",
    ),
}  # fmt: skip


def test_what_is_wrong_is_said_soon_in_one_line(cluster: Cluster, project: Path) -> None:
    numbers = {
        name: submit(cluster, project, "--output=%j.wrong", *options, SCRIPT, **env)
        for name, (options, env, _) in WRONG.items()
    }
    for name, number in numbers.items():
        job, printed = cluster.wait(number, timeout_s=60), cluster.output(number)
        assert job["JobState"] == "FAILED", printed
        errors = [line for line in printed.splitlines() if line.startswith("error: ")]
        expected = [WRONG[name][2].replace("HOST", host) for host in ("n1", "n2")]
        assert errors, f"{name}: {printed}"
        for error in errors:  # of each machine, unless the other one was faster
            assert error.startswith(tuple(expected)), error
        assert "Traceback" not in printed


def test_any_program_gets_its_arguments_and_cores(cluster: Cluster, tmp_path: Path) -> None:
    """Without a project; and a warning does no harm to a program that does not know it."""
    (tmp_path / "my train.py").write_text(PROGRAM)
    values = VALUES | {"env": ["A=1", "B='x y'"], "setup": ["B+=!"]}
    (tmp_path / "job.sbatch").write_text(launch_files.render("slurm", values))
    (tmp_path / "wait").touch()
    arguments = ["a b", 'it\'s "ü" $x', "", "--log", "--", "*"]
    options = ("--cpus-per-task=6", "--gpus-per-node=3", "job.sbatch")
    number = cluster.submit(tmp_path, *options, *arguments, OMP_NUM_THREADS=None)
    cluster.wait_for_output(number, "FACTS", 6)
    assert len(cluster.processes(number, "my train.py", node="n2")) > 2
    cluster.run("scancel", "--signal=USR1", number)
    (tmp_path / "wait").unlink()
    job, printed = cluster.wait(number), cluster.output(number)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), printed
    lines = [line for line in printed.splitlines() if "FACTS" in line]
    facts = sorted((json.loads(line.split("FACTS")[1]) for line in lines), key=str)
    assert [host for host, *_ in facts] == 3 * ["n1"] + 3 * ["n2"]
    assert [variables.pop("RANK") for _, variables, _ in facts] == list("012345")
    for _, variables, argv in facts:
        assert argv == ["--lr", "0.1", *arguments]
        assert variables == {
            "WORLD_SIZE": "6", "OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": number,
            "MASTER_PORT": str(10000 + int(number)), "A": "1", "B": "x y!",
        }  # fmt: skip
    assert "was warned, and does not start again: MAX_REQUEUES=0" in printed
    logs = (tmp_path / "logs").glob(f"node-*/{number}_*/attempt_0/*/stdout.log")
    found = sorted((path.parts[-5], path.parts[-2]) for path in logs)
    assert found == [(f"node-{node}", rank) for node in (0, 1) for rank in "012"]


STUBS = {
    "scontrol": 'if [[ $1 == show ]]; then printf "%s\\n" node-{1..500}\n'
    'else echo "[$*]"; exit "$REFUSED"; fi',
    # Runs what it is given, as the second machine.
    "srun": 'printf "SRUN %s\\n" "$*" | head -n 1\nwhile [[ $1 == --* ]]; do shift; done\n'
    'SLURM_NODEID=1 SLURM_STEP_NUM_NODES=500 "$@"\nprintf "$WARNING" >"$WARNED"\nexit "$CODE"',
    "torchrun": 'printf "<%s>" "$@"',
    "apptainer": 'printf "[%s]" "$1" "$2" "$3"; shift 3; "$@"',
    "getent": "echo 10.0.0.1 STREAM $2",
    "timeout": "exit 0",  # the first machine answers
}


def with_stand_ins(
    folder: Path, script: str, *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the script as Slurm would on the first of 500 machines."""
    (folder / "bin").mkdir()
    for name, text in STUBS.items():
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    variables = {
        "SLURM_JOB_ID": "98765432", "SLURM_JOB_NODELIST": "node-[1-500]",
        "SLURM_JOB_NUM_NODES": "500", "SLURM_CPUS_PER_TASK": "7", "SLURM_GPUS_ON_NODE": "8",
        "WARNING": "", "CODE": "0", "REFUSED": "0", "TMPDIR": str(folder),
    }  # fmt: skip
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", script, "job", *arguments],
        cwd=folder, env={**environment(), **variables, "PATH": path, **env},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip


def test_on_five_hundred_machines_all_meet_at_the_first(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", package_name="p", launchers=("slurm",))
    done = with_stand_ins(project, (project / SCRIPT).read_text(), "a b")
    assert (done.returncode, done.stderr) == (0, "")
    srun, torchrun = done.stdout.split("\n", 1)
    assert srun.split(" bash ")[0] == (
        "SRUN --ntasks=500 --ntasks-per-node=1 --cpus-per-task=7 --export=ALL --input=none "
        "--kill-on-bad-exit=1 --wait=20"
    )
    assert torchrun == (
        "<--nnodes=500><--nproc-per-node=8><--node-rank=1><--master-addr=node-1>"
        "<--master-port=15432><--max-restarts=0><--rdzv-id=98765432>"
        "<-m><--><p.train><--config><configs/train.yaml><a b>"
    )


WARNED = {"WARNING": "warned"}
AGAIN = "job 98765432 starts again to go on: "
ENOUGH = "job 98765432 was warned, and does not start again: MAX_REQUEUES="


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [
        ({}, 0, ""),
        ({"CODE": "3"}, 3, ""),
        (WARNED, 0, AGAIN + "1 of MAX_REQUEUES=20\n[requeue 98765432]\n"),
        (WARNED | {"CODE": "3"}, 3, ""),
        (WARNED | {"SLURM_RESTART_COUNT": "19"}, 0, AGAIN + "20 of MAX_REQUEUES=20\n[requeue 9"),
        (WARNED | {"SLURM_RESTART_COUNT": "20"}, 0, ENOUGH + "20;"),
        (WARNED | {"MAX_REQUEUES": "0"}, 0, ENOUGH + "0;"),
        (WARNED | {"REFUSED": "1"}, 1, "error: Slurm does not start job 98765432 again"),
        ({"SLURM_RESTART_COUNT": "21"}, 1, "error: started again 21 times, more than MAX_REQ"),
        ({"SLURM_RESTART_COUNT": "21", "MAX_REQUEUES": "0"}, 0, ""),
    ],
)
def test_the_job_starts_again_after_a_warning_and_only_then(
    tmp_path: Path, env: dict[str, str], code: int, said: str
) -> None:
    values = VALUES | {"has_config": True, "logs": "", "program": "-m -- p.train"}
    done = with_stand_ins(tmp_path, launch_files.render("slurm", values), CONFIG="bin", **env)
    printed = done.stdout + done.stderr
    assert done.returncode == code, printed
    assert said in printed
    for words in (ENOUGH, "error: "):
        assert (words in printed) == (words in said)
    for words in (AGAIN, "[requeue 98765432]"):
        assert (words in printed) == (AGAIN in said or "REFUSED" in env)
    assert [path.name for path in tmp_path.iterdir()] == ["bin"], "the note is removed"


def test_the_shells_wait_for_what_saves_at_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sends it to all processes of a job, and ends those that are left behind a shell."""
    torchrun = (
        'read -r _ _ _ shell _ <"/proc/$PPID/stat"\nkill -TERM "$PPID" "$shell"\n'
        "sleep 1\necho saved"
    )
    srun = STUBS["srun"].replace("\nprintf", "\necho all have ended\nprintf")
    values = VALUES | {"has_config": True, "logs": "", "program": "-m -- p.train"}
    script = launch_files.render("slurm", values)
    monkeypatch.setattr("tests.test_slurm.STUBS", STUBS | {"torchrun": torchrun, "srun": srun})
    done = with_stand_ins(tmp_path, script, CONFIG="bin")
    assert done.stdout.endswith("\nsaved\nall have ended\n"), done.stdout
    assert done.returncode == 0


def test_torchrun_runs_in_the_image(tmp_path: Path) -> None:
    (tmp_path / "my train.py").touch()
    script = launch_files.render("slurm", VALUES | {"image": "torch.sif", "port": "4321"})
    done = with_stand_ins(tmp_path, script, PROCESSES="2", MASTER_ADDR="here")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[exec][--nv][torch.sif]<--nnodes=500><--nproc-per-node=2>" in done.stdout
    assert "<--master-addr=here><--master-port=4321>" in done.stdout
    assert done.stdout.endswith("<--tee><3><--><my train.py><--lr><0.1>")


def test_what_sbatch_reads_is_what_was_asked_for() -> None:
    values = VALUES | {"nodes": "2:4", "partition": "gpu", "account": "me", "time": "1:00:00"}
    script = launch_files.render("slurm", values)
    options = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert [option.split()[1] for option in options] == [
        "--job-name=my-train", "--nodes=2-4", "--gpus-per-node=2", "--cpus-per-task=8",
        "--ntasks-per-node=1", "--time=1:00:00", "--partition=gpu", "--account=me",
        "--signal=USR1@120", "--requeue", "--output=%x-%j.out", "--open-mode=append",
    ]  # fmt: skip
    assert script.index("#SBATCH --open-mode") < script.index("set -euo pipefail")


def test_started_without_slurm_it_says_how(tmp_path: Path) -> None:
    script = launch_files.render("slurm", VALUES)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert "SLURM_JOB_ID: start this with sbatch" in done.stderr
