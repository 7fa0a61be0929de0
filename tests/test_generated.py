"""Generated projects, really run: under torchrun, with two processes, on real data."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.projects import (
    TORCHRUN,
    asked,
    environment,
    every_pair,
    files_of,
    is_running,
    make_project,
    metrics,
    package_of,
    run,
    status,
    train,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEBUG = ("--config", "configs/debug.yaml")

CHOICES: dict[str, list[Any]] = {
    "tracker": ["none", "tensorboard", "wandb", "mlflow"],
    "precision": ["fp32", "bf16", "fp16"],
    "checkpoint": ["epoch", "steps", "none"],
    "starter": ["vision", "text"],
    "sync_batchnorm": [False, True],
    "save_best": [False, True],
    "accumulation_steps": [1, 3],
}


def trackers_that_count(folder: Path) -> Path:
    """Write stand-ins for wandb and mlflow that note every run that is started."""
    folder.mkdir()
    note = f"open({str(folder / 'started')!r}, 'a').write('run\\n')"
    (folder / "wandb.py").write_text(
        f"class Run:\n    log = finish = lambda *a, **k: None\ndef init(**k):\n    {note}\n"
        "    return Run()\n"
    )
    (folder / "mlflow.py").write_text(
        f"def start_run(**k):\n    {note}\n"
        "log_params = log_metrics = end_run = lambda *a, **k: None\n"
    )
    return folder


@pytest.mark.parametrize(
    "answers", every_pair(CHOICES), ids=lambda a: "-".join(map(str, a.values()))
)
def test_every_pair_of_answers_trains(tmp_path: Path, answers: dict[str, Any]) -> None:
    project = make_project(tmp_path / "project", **asked(answers), gpus_per_node=2)
    trackers = trackers_that_count(tmp_path / "trackers")
    done = run(
        project, "bash", "launch/local.sh", "--epochs", "1", "--micro_batch_size", "16",
        "--save_every_steps", "10", "--log_every_steps", "5",
        PYTHONPATH=str(trackers), CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    folder = project / "runs/train-001"
    assert status(folder)["state"] == "finished"
    losses = [line["loss"] for line in metrics(folder, "train")]
    assert losses[-1] < 0.9 * losses[0]
    (validation,) = metrics(folder, "validation")
    assert validation["samples"] == (359 if answers["starter"] == "vision" else 537)
    files = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert bool(files) == (answers["checkpoint"] != "none")
    assert ("best.json" in files) == (answers["checkpoint"] != "none" and answers["save_best"])
    warned = "sync_batchnorm needs GPUs: plain BatchNorm is used"
    assert done.stdout.count(warned) == answers["sync_batchnorm"]
    started = trackers / "started"
    assert started.exists() == (answers["tracker"] in ("wandb", "mlflow"))
    if started.exists():
        assert started.read_text() == "run\n", "one run per job, not one per rank"
    assert (folder / "tensorboard").exists() == (answers["tracker"] == "tensorboard")


@pytest.mark.parametrize(
    "answers",
    [{}, {"starter": "text", "precision": "bf16", "accumulation_steps": 4, "checkpoint": "steps"}],
    ids=["default", "text"],
)
def test_the_projects_own_tests_pass(tmp_path: Path, answers: dict[str, Any]) -> None:
    project = make_project(tmp_path / "project", **answers)
    done = run(project, sys.executable, "-m", "pytest", "-q", timeout_s=600)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the default answers."""
    return make_project(tmp_path_factory.mktemp("projects") / "digits")


def test_ten_runs_in_a_row_end_well(digits: Path, tmp_path: Path) -> None:
    """An exit that crashes in one of four processes was the rule before `run_and_exit`."""
    for number in range(10):
        done = train(digits, 2, *DEBUG, "--epochs", "1", "--output_dir", str(tmp_path))
        assert (done.returncode, done.stderr) == (0, ""), f"run {number}: {done.stderr}"
    assert len(list(tmp_path.glob("debug-*"))) == 10


def test_killed_and_started_again_the_weights_are_the_same_bits(
    digits: Path, tmp_path: Path
) -> None:
    """kill -9 of one rank in mid-epoch, then the same command."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    done = train(digits, 2, *DEBUG, "--output_dir", str(straight))
    assert done.returncode == 0, done.stderr

    command = [*TORCHRUN, "--nproc-per-node=2", "-m", f"{package_of(digits)}.train"]
    with subprocess.Popen(
        [*command, *DEBUG, "--output_dir", str(killed)],
        cwd=digits, env=environment(TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step     30"):  # the second epoch goes from step 22 to 44
                os.kill(children_of(process.pid)[-1], signal.SIGKILL)
                break
        process.communicate(timeout=60)
        assert process.returncode != 0
    assert status(killed / "debug-001")["state"] == "running"

    done = train(digits, 2, *DEBUG, "--output_dir", str(killed))
    assert (done.returncode, done.stderr) == (0, "")
    assert "going on with" in done.stdout
    assert [folder.name for folder in killed.iterdir()] == ["debug-001"]
    assert last_weights(straight / "debug-001") == last_weights(killed / "debug-001")
    for kind in ("train", "validation"):
        assert metrics(straight / "debug-001", kind) == metrics(killed / "debug-001", kind)


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started, oldest first."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def last_weights(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the last checkpoint's weights."""
    import torch

    name = json.loads((folder / "checkpoints/last.json").read_text())["file"]
    weights = torch.load(folder / "checkpoints" / name, weights_only=True)["model"]
    return {key: tensor.numpy().tobytes() for key, tensor in weights.items()}


EVALUATE = """
from {package} import distributed, failures, train
from {package}.config import load_config

def main():
    config = load_config()
    with distributed.process_group(config.device, config.timeout_s) as process:
        metrics = train.evaluate(train.set_up(config, process))
        if process.is_main:
            print("RESULT", metrics["samples"], metrics["accuracy"], metrics["loss"])

failures.run_and_exit(main)
"""


def test_any_number_of_processes_measures_the_same_weights_alike(
    digits: Path, tmp_path: Path
) -> None:
    done = train(digits, 2, *DEBUG, "--output_dir", str(tmp_path / "trained"))
    assert done.returncode == 0, done.stderr
    (checkpoint,) = (tmp_path / "trained/debug-001/checkpoints").glob("*-epoch-*.pt")
    program = digits / "evaluate_only.py"
    program.write_text(EVALUATE.format(package=package_of(digits)))
    results = []
    for processes in (1, 2, 3):
        launcher = (
            [sys.executable] if processes == 1 else [*TORCHRUN, f"--nproc-per-node={processes}"]
        )
        done = run(
            digits, *launcher, str(program), *DEBUG,
            "--resume", str(checkpoint), "--output_dir", str(tmp_path / str(processes)),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        results.append([float(word) for word in line.split()[1:]])
    counts, accuracies, losses = zip(*results, strict=True)
    assert set(counts) == {359.0}
    assert len(set(accuracies)) == 1
    assert accuracies[0] > 0.9
    assert max(losses) - min(losses) < 1e-6


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler here")
def test_a_compiled_model_trains_and_its_checkpoint_fits_everywhere(
    digits: Path, tmp_path: Path
) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    command = [sys.executable, "-m", f"{package_of(digits)}.train", *DEBUG, "--epochs", "1"]
    runs = [("plain", "false"), ("compiled", "true")]
    names = []
    for name, on in runs:
        output = ("--output_dir", str(tmp_path / name))
        done = run(digits, *command, "--compile", on, *output, timeout_s=400, **env)
        assert (done.returncode, done.stderr) == (0, "")
        names.append(list(last_weights(tmp_path / name / "debug-001")))
    assert names[0] == names[1]
    losses = [metrics(tmp_path / name / "debug-001", "validation")[0]["loss"] for name, _ in runs]
    assert losses[0] == pytest.approx(losses[1], rel=0.2)  # dropout draws other numbers


COUNT = """
import torch
from torch.distributed import GradBucket
from torch.futures import Future

from {package} import distributed, failures, train
from {package}.config import load_config

def main():
    config = load_config()
    with distributed.process_group(config.device, config.timeout_s) as process:
        training = train.set_up(config, process)
        sent = []
        def hook(state: None, bucket: GradBucket) -> Future[torch.Tensor]:
            sent.append((training.state.step, bucket.index()))
            work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])
        training.ddp_model.register_comm_hook(None, hook)
        train.fit(training)
        if process.is_main:
            steps = training.state.step
            buckets = [len({{b for s, b in sent if s == step}}) for step in range(steps)]
            print("RESULT", steps, len(sent), sum(buckets), buckets[-1])

failures.run_and_exit(main)
"""


def test_every_bucket_of_gradients_is_sent_once_per_optimizer_step(
    digits: Path, tmp_path: Path
) -> None:
    """With 4 forward passes per step; 4 times as many without no_sync."""
    program = digits / "count_only.py"
    program.write_text(COUNT.format(package=package_of(digits)))
    done = run(
        digits, *TORCHRUN, "--nproc-per-node=2", str(program), *DEBUG, "--epochs", "1",
        "--micro_batch_size", "8", "--accumulation_steps", "4", "--output_dir", str(tmp_path),
        "--bucket_cap_mb", "0.05",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    steps, sent, steps_times_buckets, buckets = (int(word) for word in line.split()[1:])
    assert steps == 22
    assert buckets > 1
    assert sent == steps_times_buckets


def test_two_machines_train_together(digits: Path, tmp_path: Path) -> None:
    """launch/node.sh, started twice on this machine with a port of its own."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = environment(
        TMPDIR=str(digits.parent), NODES="2", PROCESSES="1", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port, CONFIG="configs/debug.yaml", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    nodes = [
        subprocess.Popen(
            ["bash", "launch/node.sh", "--output_dir", str(tmp_path)],
            cwd=digits, env={**env, "NODE_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert [folder.name for folder in tmp_path.iterdir()] == ["debug-001"]
    assert status(tmp_path / "debug-001")["state"] == "finished"
    assert len(list((tmp_path / "debug-001/logs").iterdir())) == 2


RESTARTED = """
import os
from {package} import failures, train

ordinary = train.train_step

def train_step(training, window):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and training.process.rank == 1 and training.state.step == 7:
        raise ValueError("boom")
    return ordinary(training, window)

train.train_step = train_step
if __name__ == "__main__":
    failures.run_and_exit(train.main)
"""


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_a_restart_by_torchrun_goes_on(digits: Path, tmp_path: Path, resume: str) -> None:
    """torchrun keeps its store, and in it the addresses of the processes that are gone."""
    program = digits / "restarted.py"
    program.write_text(RESTARTED.format(package=package_of(digits)))
    done = run(
        digits, *TORCHRUN, "--max-restarts=1", "--nproc-per-node=2", str(program), *DEBUG,
        "--epochs", "1", "--output_dir", str(tmp_path), "--resume", resume,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "failed: ValueError: boom" in done.stderr
    assert f"going on with {tmp_path}/debug-001" in done.stdout
    assert [folder.name for folder in tmp_path.iterdir()] == ["debug-001"]


def test_a_finished_job_that_is_started_again_does_nothing(digits: Path, tmp_path: Path) -> None:
    """A scheduler may start a job again that ended just when it was warned of its time limit."""
    command = (
        *TORCHRUN[:-1], "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job-7",
        "--nproc-per-node=2", "-m", f"{package_of(digits)}.train", *DEBUG,
        "--epochs", "1", "--output_dir", str(tmp_path),
    )  # fmt: skip
    first = run(digits, *command)
    before = files_of(tmp_path)
    again = run(digits, *command)
    assert (first.returncode, again.returncode) == (0, 0), again.stderr
    assert f"going on with {tmp_path}/debug-001" in again.stdout
    assert "step " not in again.stdout.replace("finished after step", "")
    written = {name for name, content in files_of(tmp_path).items() if before.get(name) != content}
    assert all(
        "logs/" in name or name.endswith(("config.yaml", "environment.json")) for name in written
    )


def test_a_signal_saves_and_the_same_command_goes_on(digits: Path, tmp_path: Path) -> None:
    straight = train(digits, 2, *DEBUG, "--output_dir", str(tmp_path / "straight"))
    assert straight.returncode == 0
    stopped = tmp_path / "stopped"
    with subprocess.Popen(
        [*TORCHRUN, "--nproc-per-node=2", "-m", f"{package_of(digits)}.train", *DEBUG,
         "--output_dir", str(stopped)],
        cwd=digits, env=environment(TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step     10"):
                process.send_signal(signal.SIGTERM)
                break
        out, _ = process.communicate(timeout=60)
    assert "stopped by SIGTERM" in out
    assert status(stopped / "debug-001")["state"] == "stopped"
    done = train(digits, 2, *DEBUG, "--output_dir", str(stopped))
    assert (done.returncode, done.stderr) == (0, "")
    assert last_weights(tmp_path / "straight/debug-001") == last_weights(stopped / "debug-001")


LOADERS = """
import os, signal, sys, torch
from {package} import loading
from {package}.seeding import generator

class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(os.getpid()), torch.tensor(0)

if __name__ == "__main__":
    context = loading.worker_context
    loading.worker_context = lambda on_gpu, start: context(sys.argv[1] == "gpu", start)
    device = torch.device("cpu")
    loader = loading.build_loader(Data(), [[i] for i in range(8)], generator(0), device, 2)
    batches = iter(loader)
    pids = {{int(next(batches).inputs) for _ in range(2)}}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        for pid in pids:
            os.kill(pid, number)
    assert {{int(next(batches).inputs) for _ in range(6)}} == pids
    print(pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_loader_processes_end_with_a_killed_trainer(digits: Path, kind: str) -> None:
    """And not before, whatever signal a scheduler sends to every process.

    Under forkserver, which GPUs need, torch's own watch looks at the wrong process.
    """
    program = digits / "loaders_only.py"
    program.write_text(LOADERS.format(package=package_of(digits)))
    done = run(digits, sys.executable, str(program), kind)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = {int(word.strip("{},")) for word in done.stdout.split()}
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"


def test_odd_paths_and_another_working_directory(tmp_path: Path) -> None:
    """Spaces, quotes and umlauts in every path; started from elsewhere and through a link."""
    project = make_project(tmp_path / "some dir" / "a b" / "ü 'q'" / "my project")
    link = tmp_path / "link to it"
    link.symlink_to(project)
    output = tmp_path / "out put"
    done = run(
        tmp_path, "bash", str(link / "launch/local.sh"), "--epochs", "1",
        "--output_dir", str(output), CONFIG="configs/debug.yaml", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert status(output / "debug-001")["state"] == "finished"
