"""Generated projects for tests: made through ddpgen, run as a person would run them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ddpgen import generate

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


def make_project(folder: Path, **answers: Any) -> Path:
    """Render a project and return its folder."""
    lists = {name: list(value) for name, value in answers.items() if isinstance(value, tuple)}
    generate.render(folder, answers | lists)
    return folder


def run(
    project: Path, *command: str, timeout_s: float = 240, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a project; torchrun and python are those of the tests."""
    # torchrun leaves temporary files. The path must be short: sockets are made in it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        return subprocess.run(
            command,
            cwd=project,
            env=environment(TMPDIR=scratch, **env),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a training: torchrun and python are those of the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", **more}


def train(project: Path, processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Train with torchrun, or with python alone if there is one process."""
    package = package_of(project)
    launcher = (sys.executable,) if processes == 1 else (*TORCHRUN, f"--nproc-per-node={processes}")
    return run(project, *launcher, "-m", f"{package}.train", *arguments)


def package_of(project: Path) -> str:
    """Return the name of a project's package."""
    return str(generate.read_project_answers(project)["package_name"])


def metrics(run_folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of one kind of a run's metrics.jsonl, without the clock's numbers."""
    clock = {"time", "samples_per_s", "step_ms", "data_wait_ms"}
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in clock}
        for line in lines
        if line["kind"] == kind
    ]


def status(run_folder: Path) -> dict[str, Any]:
    """Return how a run ended."""
    return dict(json.loads((run_folder / "status.json").read_text()))


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def files_of(project: Path) -> dict[str, bytes]:
    """Return all files of a project by their path in it."""
    return {
        path.relative_to(project).as_posix(): path.read_bytes()
        for path in sorted(project.rglob("*"))
        if path.is_file()
    }


def digest(content: bytes) -> str:
    """Return a name for a content."""
    return hashlib.sha256(content).hexdigest()


Choices = dict[str, list[Any]]
Answers = dict[str, Any]


def possible(answers: Answers) -> bool:
    """Return whether no answer belongs to a question that is not asked, other than a default."""
    if answers["starter"] == "text" and answers["sync_batchnorm"]:
        return False
    return bool(answers["checkpoint"] != "none" or answers["save_best"])


def asked(answers: Answers) -> Answers:
    """Leave out answers to questions that are not asked."""
    left_out = {"sync_batchnorm"} if answers["starter"] == "text" else set()
    if answers["checkpoint"] == "none":
        left_out.add("save_best")
    return {name: value for name, value in answers.items() if name not in left_out}


def combinations(choices: Choices) -> list[Answers]:
    """Return all possible sets of answers."""
    everything = itertools.product(*choices.values())
    sets = [dict(zip(choices, values, strict=True)) for values in everything]
    return [answers for answers in sets if possible(answers)]


def every_pair(choices: Choices) -> list[Answers]:
    """Return few sets of answers in which every possible pair of answers occurs."""
    candidates = combinations(choices)
    missing = set().union(*map(pairs, candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda answers: len(pairs(answers) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


def pairs(answers: Answers) -> set[tuple[tuple[str, Any], ...]]:
    """Return all pairs of answers."""
    return set(itertools.combinations(answers.items(), 2))
