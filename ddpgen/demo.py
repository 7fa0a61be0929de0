"""`ddpgen demo`: write a project with the defaults and train it with two processes here."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from ddpgen import generate, interrupts, new
from ddpgen.errors import UserError, show

PROCESSES = 2
# How long the processes may take to save and leave after Ctrl-C; torchrun itself waits for 30 s.
GRACE_S = 60
# What a generated project imports, and what pip calls it.
NEEDS = {
    "torch": "torch",
    "jsonargparse": "jsonargparse[signatures]",
    "numpy": "numpy",
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "tqdm": "tqdm",
}


def demo(path: str) -> None:
    """Write a project unless it is there already, train it and say where the run is.

    Raises:
        UserError: If something to train with is missing, PATH is taken, or the training failed.
        KeyboardInterrupt: If a signal arrived; the project stays, a project half written does not.
    """
    _refuse_missing_needs()
    project = Path(path)
    if not generate.made_by_ddpgen(project):
        plan = new.create(new.Request(path, defaults=True, yes=True))
        assert plan is not None, "with yes and without a dry run a plan is always carried out"
    _train(path)
    print("\n".join(_ending(path)))


def _refuse_missing_needs() -> None:
    missing = [pip for name, pip in NEEDS.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"The demo cannot train without {', '.join(missing)}.",
            f"Not installed for {sys.executable}.",
            f"Type: python -m pip install {' '.join(map(shlex.quote, missing))}",
        )


def _command(path: str) -> list[str]:
    package = generate.read_project_answers(Path(path)).get("package_name")
    if not (Path(path) / str(package) / "train.py").is_file():
        raise UserError(
            f"{show(path)} cannot be trained: it has no {show(package)}/train.py.",
            "The demo starts the package that its answers name.",
            "Type: ddpgen demo ANOTHER_PATH",
        )
    # Every process needs a GPU of its own.
    device = ["--device", "cpu"] if new.visible_gpus() == 1 else []
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", f"--nproc-per-node={PROCESSES}"),
        *("-m", f"{package}.train", "--config", "configs/train.yaml", *device),
    ]


def _train(path: str) -> None:
    command = _command(path)
    print(f"Training in {show(path)}: {shlex.join(command)}", file=sys.stderr, flush=True)
    # Unset, torchrun would say that it sets 1. More threads than cores slow each other down.
    threads = max(1, _cores() // PROCESSES)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    with interrupts.held():
        # In a session of its own Ctrl-C does not reach it twice, from the terminal and from here.
        process = subprocess.Popen(command, cwd=path, env=environment, start_new_session=True)
        try:
            with interrupts.let_through():
                code = process.wait()
        except KeyboardInterrupt:
            _stop(process)
            print(f"The project stays in {show(path)}.", file=sys.stderr)
            raise
    if code != 0:
        raise UserError(
            f"The training ended with exit code {code}.",
            "Its own message is above.",
            f"Type: ddpgen demo {shlex.quote(path)}, to train again",
        )


def _cores() -> int:
    """Count the cores that this process may use; a container or a scheduler may allow only some."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ending(path: str) -> list[str]:
    folder = Path(path) / "runs"
    runs = [run for run in folder.iterdir() if run.is_dir()] if folder.is_dir() else []
    if not runs:
        raise UserError(
            f"The training has left no run in {show(folder)}.",
            "The settings in configs/train.yaml may name another folder.",
            "Type: ddpgen demo ANOTHER_PATH",
        )
    # The training was started with this Python; a shell may find another one, or none.
    activate = Path(sys.prefix) / "bin" / "activate"
    found = shutil.which("torchrun") is not None
    activation = (
        [f"  source {shlex.quote(str(activate))}"] if not found and activate.exists() else []
    )
    newest = max(runs, key=lambda run: run.stat().st_mtime)
    return [
        f"The run is in {show(newest)}. Next:",
        *activation,
        f"  cd {shlex.quote(path)}",
        "  bash launch/local.sh",
    ]
