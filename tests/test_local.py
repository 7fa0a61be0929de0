"""launch/local.sh: what torchrun is given, and what happens to signals and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.projects import environment, is_running, make_project, run, status

# Shows what it was called with, one word a line.
TORCHRUN = """#!/bin/sh
printf '%s\\n' "OMP=$OMP_NUM_THREADS" "$@"
"""
NVIDIA_SMI = """#!/bin/sh
for i in 0 1 2; do echo "GPU $i: NVIDIA H100 (UUID: GPU-$i)"; done
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project, with a torchrun beside it that only shows its arguments."""
    folder = make_project(tmp_path / "p", gpus_per_node=5)
    program(tmp_path / "bin/torchrun", TORCHRUN)
    return folder


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def launched(project: Path, *arguments: str, **env: str) -> list[str]:
    """Return the words that torchrun got, and the threads before them."""
    done = subprocess.run(
        ["bash", "launch/local.sh", *arguments], cwd=project, capture_output=True, text=True,
        env={"PATH": f"{project.parent}/bin:/usr/bin:/bin", **env}, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split("\n")[:-1]


def processes(words: list[str]) -> int:
    (word,) = [word for word in words if word.startswith("--nproc-per-node=")]
    return int(word.partition("=")[2])


def test_what_torchrun_is_given(project: Path) -> None:
    assert launched(project, "--run_name", "a b", "", OMP_NUM_THREADS="3") == [
        "OMP=3", "--standalone", "--nproc-per-node=5", "--max-restarts=0", "-m", "--", "p.train",
        "--config", "configs/train.yaml", "--run_name", "a b", "",
    ]  # fmt: skip
    words = launched(project, CONFIG="my config.yaml", MAX_RESTARTS="2", PROCESSES="1")
    assert words[2:4] == ["--nproc-per-node=1", "--max-restarts=2"]
    assert words[-1] == "my config.yaml"


def test_the_cores_are_shared_among_the_processes(project: Path) -> None:
    """torchrun would set one thread, and only for more than one process."""
    cores = len(os.sched_getaffinity(0))
    for count in (1, 2, 1000):
        words = launched(project, PROCESSES=str(count))
        assert words[0] == f"OMP={max(1, cores // count)}"


def test_one_process_per_gpu_that_may_be_used(project: Path) -> None:
    program(project.parent / "bin/nvidia-smi", NVIDIA_SMI)
    assert processes(launched(project)) == 3
    counts = {"0,2": 2, "": 5, "-1": 5, "1,-1,2": 1, "GPU-1,MIG-2": 2}
    found = {
        visible: processes(launched(project, CUDA_VISIBLE_DEVICES=visible)) for visible in counts
    }
    assert found == counts
    program(project.parent / "bin/nvidia-smi", "#!/bin/sh\necho broken; exit 9\n")
    assert processes(launched(project)) == 5
    program(project.parent / "bin/nvidia-smi", "#!/bin/sh\nexec sleep 60\n")
    assert processes(launched(project)) == 5


def test_a_missing_torchrun_is_one_line(project: Path) -> None:
    (project.parent / "bin/torchrun").unlink()
    done = subprocess.run(
        ["bash", "launch/local.sh"], cwd=project, capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin"}, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: torchrun is not found on {os.uname().nodename}: "
        "activate the environment that torch is installed in\n"
    )


@pytest.mark.slow
def test_a_failing_process_is_a_failing_script(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    train = project / "p/train.py"
    train.write_text(
        train.read_text().replace(
            "    config = load_config()\n",
            "    config = load_config()\n    import os\n"
            '    if os.environ["RANK"] == "1":\n        os._exit(3)\n',
        )
    )
    done = run(project, "bash", "launch/local.sh", CONFIG="configs/debug.yaml", PROCESSES="2")
    assert done.returncode == 1
    assert "exitcode  : 3 " in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_script_saves_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    project = make_project(tmp_path / "p", checkpoint="steps")
    with subprocess.Popen(
        ["bash", "launch/local.sh", "--epochs", "100000"], cwd=project, text=True,
        env=environment(TMPDIR=str(tmp_path), PROCESSES="2", CONFIG="configs/debug.yaml"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as script:  # fmt: skip
        assert script.stdout is not None
        for line in script.stdout:
            if line.startswith("step     10"):
                break
        script.send_signal(getattr(signal, name))
        script.communicate(timeout=90)
    assert script.returncode != 0
    deadline = time.monotonic() + 30
    while alive := in_session(script.pid):
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)
    ended = status(project / "runs/debug-001")
    assert (ended["state"], ended["reason"]) == ("stopped", name)
    assert len(list((project / "runs/debug-001/checkpoints").glob("step-*.pt"))) >= 1


def in_session(session: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and is_running(int(folder.name)):
            found.append(int(folder.name))
    return found
