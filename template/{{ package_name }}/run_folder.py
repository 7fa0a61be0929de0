"""Which folder a run writes to: a new one, or that of an unfinished run to go on with.

runs/train-001/
    config.yaml         all settings of the run, as they were resolved
    environment.json    machine, versions and devices of every rank
    metrics.jsonl       one line per log interval and per epoch
    status.json         running, stopped, failed or finished, and why
    logs/               one file per rank, with machine and rank in its name
    checkpoints/        step-00000120.pt and its .json, last.json, best.json
"""

import fcntl
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from .config import Config, changed_settings
from .distributed import Process, broadcast_from_main
from .errors import UserError

# Kept open for the life of the process: closing the file would give the lock away.
_locks: list[TextIO] = []


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        path: The folder.
        load_from: Checkpoint file or folder of checkpoints to start from, or None.
        notes: What the user should know about the choice, one line each.
    """

    path: Path
    load_from: Path | None
    notes: tuple[str, ...] = ()

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def write_status(self, state: str, **details: Any) -> None:
        """Say how the run stands. Call on rank 0.

        A launcher's exit code does not tell a preempted run from a failed one; this file does.
        """
        status = {"state": state, "job": job_id(), **details}
        write_atomically(self.path / "status.json", json.dumps(status) + "\n")


def open_run_folder(config: Config, process: Process) -> RunFolder:
    """Choose the run's folder on rank 0 and tell everybody. Collective.

    Decided once: clocks and file systems differ, and N ranks would make up N folders.

    Raises:
        UserError: `resume` names nothing that can be resumed, or nothing can be written there.
    """
    return broadcast_from_main(lambda: choose_run_folder(config), process)


def choose_run_folder(config: Config) -> RunFolder:
    """Find or make the run's folder, and lock it against a second job. Call on rank 0."""
    own = run_of_this_job(config)
    if own is not None:
        return go_on_with(config, own)
    if config.resume not in ("auto", "none"):
        return resume_from_path(config, Path(config.resume))
    newest = newest_run(Path(config.output_dir), config.run_name)
    if config.resume == "none" or newest is None or read_status(newest) in ("finished", None):
        return new_run_folder(config)
    return go_on_with(config, newest)


def go_on_with(config: Config, path: Path) -> RunFolder:
    """Take the run folder `path`; if it is in use or has other settings, a new one."""
    if not lock(path):
        return new_run_folder(config, f"{path} is in use by another job; this is a new run")
    changes = changed_settings(read_config(path), config.to_dict())
    if changes:
        release_last_lock()
        listed = ", ".join(f"{k}: {old} -> {new}" for k, (old, new) in changes.items())
        return new_run_folder(
            config,
            f"{path} is unfinished but has other settings ({listed}); this is a new run",
            f"to go on with the old one under the new settings: --resume {path}",
        )
    load_from = path / "checkpoints"
    if not any(load_from.iterdir()) and Path(config.resume).is_file():
        load_from = Path(config.resume)  # it ended before its first checkpoint
    return RunFolder(path, load_from, (f"going on with {path}",))


def run_of_this_job(config: Config) -> Path | None:
    """Return the run of an earlier start of this job, if the launcher starts it again.

    Whatever `resume` says: it was said once, for the first start.
    """
    job = job_id()
    if job is None or is_first_start_under_slurm():
        return None
    parent = Path(config.output_dir)
    for number in range(highest_number(parent, config.run_name), 0, -1):
        path = parent / f"{config.run_name}-{number:03d}"
        if read_job(path) == job:
            return path
    return None


def job_id() -> str | None:
    """Return what the launcher calls this job, in all its starts; None if it has no name for it."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def is_first_start_under_slurm() -> bool:
    """Return whether Slurm starts this job for the first time: its numbers come round again."""
    counts = (os.environ.get(f"{who}_RESTART_COUNT", "0") for who in ("SLURM", "TORCHELASTIC"))
    return "SLURM_JOB_ID" in os.environ and set(counts) == {"0"}


def resume_from_path(config: Config, path: Path) -> RunFolder:
    """Go on with the run folder `path`, or start a new run from the checkpoint file `path`."""
    if path.is_file():
        return new_run_folder(config, f"starting from {path}", load_from=path)
    if not path.exists():
        raise UserError(
            f"--resume {path}: there is no such file or folder.",
            "A run goes on from what an earlier one has left.",
            f"ls {path.parent}",
        )
    if read_status(path) is None:
        raise UserError(
            f"--resume {path}: there is no run in it.",
            "It must be a run folder (with status.json) or a checkpoint file.",
            f"ls {config.output_dir}",
        )
    if not lock(path):
        raise UserError(
            f"--resume {path}: another job is writing to it.",
            "Two jobs in one folder would overwrite each other's checkpoints.",
            "wait for it or stop it, or --resume none",
        )
    changes = changed_settings(read_config(path), config.to_dict())
    listed = [f"changed setting {k}: {old} -> {new}" for k, (old, new) in changes.items()]
    return RunFolder(path, path / "checkpoints", (f"going on with {path}", *listed))


def new_run_folder(config: Config, *notes: str, load_from: Path | None = None) -> RunFolder:
    """Make the next free folder. Never one that exists, whoever made it."""
    parent = Path(config.output_dir)
    while True:
        path = parent / f"{config.run_name}-{highest_number(parent, config.run_name) + 1:03d}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another job was faster: take the next number
            if not path.exists():
                raise
            continue
        except OSError as error:
            raise UserError(
                f"The run folder {path} cannot be made: {error.strerror}.",
                "Logs and checkpoints need a place.",
                "--output_dir FOLDER",
            ) from None
        break
    lock(path)
    for name in ("logs", "checkpoints"):
        (path / name).mkdir()
    run = RunFolder(path, load_from, notes)
    run.write_status("running")
    return run


def write_config(path: Path, config: Config) -> None:
    """Write all settings of the run, ready to be used again with --config."""
    write_atomically(path / "config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings of an earlier run; empty if it ended before they were written."""
    file = path / "config.yaml"
    return dict(yaml.safe_load(file.read_text())) if file.exists() else {}


def read_status(path: Path) -> str | None:
    """Return the state of a run, or None if `path` is not a run folder of this project."""
    file = path / "status.json"
    return str(json.loads(file.read_text())["state"]) if file.is_file() else None


def read_job(path: Path) -> str | None:
    """Return the job that a run was last part of."""
    file = path / "status.json"
    return json.loads(file.read_text()).get("job") if file.is_file() else None


def newest_run(parent: Path, name: str) -> Path | None:
    """Return the run folder with the highest number, or None."""
    number = highest_number(parent, name)
    return parent / f"{name}-{number:03d}" if number else None


def highest_number(parent: Path, name: str) -> int:
    """Return the highest number among the runs of this name, 0 if there are none."""
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    found = [pattern.fullmatch(entry.name) for entry in parent.glob("*")]
    return max((int(match[1]) for match in found if match), default=0)


def lock(path: Path) -> bool:
    """Take the folder for this job until the process ends. False if another job has it."""
    file = (path / ".lock").open("w")
    try:
        # Not flock: loader processes would inherit it, and outlive a killed run for a moment.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        return False
    except OSError as error:  # some network disks cannot lock
        print(f"warning: {path} cannot be locked ({error.strerror}): run one job in it at a time")
    _locks.append(file)
    return True


def release_last_lock() -> None:
    """Give back the folder that was taken last."""
    _locks.pop().close()


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new text, never half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
