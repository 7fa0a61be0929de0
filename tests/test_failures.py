"""One rank fails: the whole job ends soon, and the first thing said is which rank, and why."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.projects import (
    TORCHRUN,
    environment,
    is_running,
    make_project,
    package_of,
    run,
    status,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TIMEOUT_S = 8

# From the failure to the end of the job. torchrun alone takes 30 s more if a process does not
# answer its SIGTERM.
BOUND_S = 20

PROGRAM = """
import os, resource, signal, sys, time
import torch
from {package} import checkpoint_files, failures, loading, train

kind, bad_rank = sys.argv.pop(1), 1
rank = int(os.environ["RANK"])
ordinary_step, ordinary_write = train.train_step, checkpoint_files.write_files
ordinary_losses = train.compute_losses

def note():
    print("FAILS AT", time.time(), flush=True)

class Broken(torch.utils.data.Dataset):
    def __init__(self, dataset):
        self.dataset = dataset
    def __len__(self):
        return len(self.dataset)
    def __getitem__(self, index):
        if index == 77:
            note()
            if kind == "killed loader process":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("broken file")
        return self.dataset[index]

def train_step(training, window):
    if training.process.rank == bad_rank and training.state.step == 2:
        if kind in ("exception", "killed", "hang", "busy", "memory", "leaves"):
            note()
        if kind == "exception":
            raise ValueError("boom")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(1000)
        if kind == "busy":
            while True:
                pass
        if kind == "memory":
            torch.empty(1 << 50)
        if kind == "leaves":
            os._exit(0)
    return ordinary_step(training, window)

def compute_losses(outputs, targets):
    losses = ordinary_losses(outputs, targets)
    if kind == "not a number" and rank == bad_rank:
        note()
        return losses * float("nan")
    return losses

def build_datasets(seed):
    if kind == "preparing data" and rank == bad_rank:
        note()
        raise ValueError("no data here")
    training, validation = ordinary_datasets(seed)
    return (Broken(training) if "sample" in kind or "loader" in kind else training), validation

def write_files(folder, saved, is_best):
    note()
    if kind == "disk full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    if kind == "folder gone":
        os.rename(folder, str(folder) + "-moved")
    return ordinary_write(folder, saved, is_best)

ordinary_datasets = train.build_datasets
train.train_step, train.compute_losses = train_step, compute_losses
train.build_datasets = build_datasets
if kind in ("disk full", "folder gone"):
    from {package} import checkpoint
    checkpoint.write_files = write_files
if __name__ == "__main__":
    failures.run_and_exit(train.main)
"""

LOADERS = ("--num_workers", "1")

# What fails -> the first line on stderr that is not torchrun's, and further arguments.
FAILURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "exception": (r"\[rank 1 on .*\] failed: ValueError: boom", ()),
    "preparing data": (r"\[rank 1 on .*\] failed: ValueError: no data here", ()),
    "killed": (r"error: Rank 1 is gone without a word\.", ()),
    "leaves": (r"error: Rank 1 is gone without a word\.", ()),
    "hang": (rf"error: Rank 1 did not answer within {TIMEOUT_S} s \(timeout_s\)\.", ()),
    "busy": (rf"error: Rank 1 did not answer within {TIMEOUT_S} s \(timeout_s\)\.", ()),
    "memory": (r"\[rank 1 on .*\] failed: RuntimeError: .*can't allocate memory", ()),
    "not a number": (r"error: Step 1: the loss is nan on rank 1\.", ()),
    "disk full": (
        r"error: The checkpoint of step 5 could not be written to .*: File too large",
        (),
    ),
    "disk full in the background": (
        r"error: The checkpoint of step 5 could not be written to .*: File too large",
        ("--async_save", "true"),
    ),
    "folder gone": (
        r"error: The checkpoint of step 5 could not be written to .*: No such file",
        (),
    ),
    "bad sample": (
        r"\[rank \d on .*\] failed: RuntimeError: sample 77 cannot be read: ValueErr",
        (),
    ),
    "bad sample in a loader process": (
        r"\[rank \d on .*\] failed: RuntimeError: sample 77 cannot be read: ValueError: broken "
        r"file \(in a loader process\)",
        LOADERS,
    ),
    "killed loader process": (
        r"\[rank \d on .*\] failed: RuntimeError: DataLoader worker \(pid.* \d+\) .*signal: Killed",
        LOADERS,
    ),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the program that fails."""
    folder = make_project(tmp_path_factory.mktemp("projects") / "fails")
    (folder / "fails.py").write_text(PROGRAM.format(package=package_of(folder)))
    return folder


CASES = [(2, kind) for kind in FAILURES] + [
    (3, kind) for kind in ("preparing data", "killed", "hang")
]


@pytest.mark.parametrize(("processes", "kind"), CASES)
def test_the_job_ends_soon_and_names_the_rank(
    project: Path, tmp_path: Path, kind: str, processes: int
) -> None:
    first_line, arguments = FAILURES[kind]
    done = run(
        project, *TORCHRUN, f"--nproc-per-node={processes}", "fails.py",
        kind.removesuffix(" in the background"), "--config", "configs/debug.yaml",
        "--timeout_s", str(TIMEOUT_S), "--output_dir", str(tmp_path), *arguments,
    )  # fmt: skip
    ended = time.time()
    failed = float(re.findall(r"FAILS AT ([\d.]+)", done.stdout)[0])
    assert done.returncode != 0
    own = [line for line in done.stderr.splitlines() if not re.match(r"[WE]\d{4} ", line)]
    assert re.match(first_line, own[0]), done.stderr
    assert ended - failed < BOUND_S + (TIMEOUT_S if kind in ("hang", "busy") else 0)
    if kind in ("exception", "preparing data"):
        cause = done.stderr.split("Root Cause")[1]
        assert "rank      : 1" in cause
    if kind in ("hang", "busy"):
        stack = done.stderr.split("rank 1 stands here:")[1]
        assert "fails.py" in stack
        assert "in train_step" in stack


def test_a_failure_of_one_process_alone_is_as_clear(project: Path, tmp_path: Path) -> None:
    """Without torchrun: the error, once, and a code that is not zero."""
    done = run(
        project, sys.executable, "-m", f"{package_of(project)}.train", "--config",
        "configs/debug.yaml", "--output_dir", str(tmp_path / "a file"), "--resume", "nowhere",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: --resume nowhere: there is no such file or folder.")
    assert done.stderr.count("error:") == 1


def test_no_process_outlives_a_killed_torchrun(project: Path, tmp_path: Path) -> None:
    """They would train on, unseen, and keep their GPUs. They save at one step, and end."""
    with subprocess.Popen(
        [*TORCHRUN, "--nproc-per-node=2", "-m", f"{package_of(project)}.train",
         "--config", "configs/debug.yaml", "--epochs", "1000", "--output_dir", str(tmp_path)],
        cwd=project, env=environment(TMPDIR=str(tmp_path)), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as torchrun:  # fmt: skip
        assert torchrun.stdout is not None
        for line in torchrun.stdout:
            if line.startswith("step     10"):
                break
        workers = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        assert len(workers) == 2
        torchrun.kill()
        torchrun.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while alive := [pid for pid in workers if is_running(int(pid))]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)
    assert status(tmp_path / "debug-001")["state"] == "stopped"
    assert status(tmp_path / "debug-001")["reason"] == "SIGTERM"


def test_two_jobs_on_one_machine_never_meet(project: Path, tmp_path: Path) -> None:
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", f"{package_of(project)}.train", "--config",
               "configs/debug.yaml", "--epochs", "1", "--output_dir", str(tmp_path)]  # fmt: skip
    scratch = [tmp_path / name for name in "ab"]
    jobs = []
    for folder in scratch:
        folder.mkdir()
        jobs.append(
            subprocess.Popen(
                command, cwd=project, env=environment(TMPDIR=str(folder)), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    outputs = [job.communicate(timeout=120) for job in jobs]
    assert [(job.returncode, err) for job, (_, err) in zip(jobs, outputs, strict=True)] == [
        (0, "")
    ] * 2
    runs = sorted(path.name for path in tmp_path.glob("debug-*"))
    assert runs == ["debug-001", "debug-002"]
    assert all(status(tmp_path / run)["state"] == "finished" for run in runs)
