"""Checkpoints: everything that changes during training, written so that a kill cannot hurt.

A checkpoint is two files: step-00000120.pt, and step-00000120.json, written last, which holds the
SHA-256 of the first. One without the other, or with another sum, does not count. At the end of an
epoch the name goes on: step-00000120-epoch-0004.pt. `last.json` and `best.json` are copies of such
a .json file and tell which checkpoint is meant.
"""

import hashlib
import io
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import IO, Any, BinaryIO, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .distributed import Process, agree_on, broadcast_from_main, gather_objects
from .errors import UserError
from .metrics import TrainMeter
from .run_folder import write_atomically
from .seeding import capture_rng, restore_rng

FORMAT = 1


@dataclass
class TrainState:
    """Everything that changes while training. What is not in here does not survive a restart.

    Attributes:
        model: The bare model, without the DDP wrapper: its keys fit everywhere.
        optimizer: The optimizer.
        scheduler: The learning rate schedule.
        scaler: The loss scaler of fp16; it does nothing in other precisions.
        meter: Sums since the last log line.
        step: Optimizer steps taken.
        epoch: Epochs finished.
        position: Samples of the present epoch that were trained on, over all ranks.
        best_loss: Lowest validation loss so far.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    scaler: torch.amp.GradScaler
    meter: TrainMeter
    step: int = 0
    epoch: int = 0
    position: int = 0
    best_loss: float = math.inf

    def shared(self) -> dict[str, Any]:
        """Return what is the same on every rank."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "best_loss": self.best_loss,
        }

    def load_shared(self, saved: dict[str, Any]) -> None:
        """Take over what `shared` returned.

        Learning rate, weight decay and the like are settings: they stay as this run has them, also
        when the checkpoint was written under others.
        """
        self.model.load_state_dict(saved["model"])
        settings = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({**saved["optimizer"], "param_groups": settings})
        base = self.scheduler.base_lrs
        self.scheduler.load_state_dict({**saved["scheduler"], "base_lrs": base})
        factors = [factor(self.scheduler.last_epoch) for factor in self.scheduler.lr_lambdas]
        for group, rate, factor in zip(self.optimizer.param_groups, base, factors, strict=True):
            group["lr"] = rate * factor
        if saved["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(saved["scaler"])
        self.step, self.epoch = saved["step"], saved["epoch"]
        self.position, self.best_loss = saved["position"], saved["best_loss"]


def save_checkpoint(
    folder: Path, state: TrainState, process: Process, keep: int, is_best: bool = False
) -> None:
    """Write a checkpoint from rank 0. Collective.

    Every rank adds its own random state: restoring rank 0's everywhere would give all ranks the
    same dropout. A failure to write is raised on every rank, or they would wait for rank 0.

    Args:
        folder: The run's folder of checkpoints.
        state: What to save.
        process: This process.
        keep: Newest checkpoints to leave on disk; the best one comes on top.
        is_best: Point `best.json` at this one.

    Raises:
        UserError: The disk is full or the folder cannot be written.
    """
    own = {"rng": capture_rng(process.device), "meter": state.meter.state_dict()}
    ranks = gather_objects(own, process)

    def write() -> None:
        try:
            write_files(folder, {"format": FORMAT, **state.shared(), "ranks": ranks}, is_best)
        except OSError as error:
            raise UserError(
                f"The checkpoint of step {state.step} could not be written to {folder}: "
                f"{error.strerror}.",
                "Training on without checkpoints would lose the work at the next failure.",
                "free some space or fix the permissions, then start the same command again",
            ) from error
        remove_old(folder, keep)

    broadcast_from_main(write, process)


def write_files(folder: Path, saved: dict[str, Any], is_best: bool) -> None:
    """Write data, then its description, then the pointers. A kill in between leaves the old."""
    at_epoch_end = saved["position"] == 0
    end = f"-epoch-{saved['epoch']:04d}" if at_epoch_end else ""
    file = folder / f"step-{saved['step']:08d}{end}.pt"
    temporary = folder / f".{file.name}.tmp"
    with temporary.open("wb") as stream:
        digest = HashingWriter(stream)
        torch.save(saved, cast(IO[bytes], digest))
        stream.flush()
        os.fsync(stream.fileno())
    description = {
        "file": file.name,
        "sha256": digest.sha256.hexdigest(),
        "bytes": temporary.stat().st_size,
        "step": saved["step"],
        "epoch": saved["epoch"],
        "best_loss": saved["best_loss"] if math.isfinite(saved["best_loss"]) else None,
        "world_size": len(saved["ranks"]),
    }
    text = json.dumps(description) + "\n"
    # A file of this name was skipped at the start, if there was one: its description is void.
    file.with_suffix(".json").unlink(missing_ok=True)
    os.replace(temporary, file)
    sync_folder(folder)
    write_atomically(file.with_suffix(".json"), text)
    write_atomically(folder / "last.json", text)
    if is_best:
        write_atomically(folder / "best.json", text)
    sync_folder(folder)


class HashingWriter:
    """A file that computes the SHA-256 of what is written to it."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write `data` and add it to the sum."""
        self.sha256.update(data)
        return self.stream.write(data)

    def flush(self) -> None:
        """Pass on what is buffered."""
        self.stream.flush()


def sync_folder(folder: Path) -> None:
    """Make renames survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_old(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best; and what killed saves left."""
    pointer = folder / "best.json"
    best = json.loads(pointer.read_text())["file"] if pointer.exists() else ""
    for file in step_files(folder)[:-keep]:
        if file.name != best:
            file.with_suffix(".json").unlink(missing_ok=True)
            file.unlink()
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def step_files(folder: Path) -> list[Path]:
    """Return the checkpoint files, oldest first. By number: as text, step 200 follows 1000."""
    pattern = re.compile(r"step-(\d+)(-epoch-\d+)?\.pt")
    matches = [(pattern.fullmatch(file.name), file) for file in folder.glob("step-*")]
    return [file for *_, file in sorted((int(m[1]), m[2] or "", file) for m, file in matches if m)]


def problem_with(file: Path) -> str:
    """Return why a checkpoint cannot be trusted, or "" if it can."""
    try:
        description = json.loads(file.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return "it was never finished"
    size = file.stat().st_size
    if size != description["bytes"]:
        return f"it has {size} bytes instead of {description['bytes']}"
    sha256 = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            sha256.update(block)
    return "" if sha256.hexdigest() == description["sha256"] else "its checksum is wrong"


def choose_checkpoint(source: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to load and what is wrong with the newer ones. Call on rank 0.

    Args:
        source: A checkpoint file, or a folder of them: then the newest sound one.

    Raises:
        UserError: The one that was named is damaged.
    """
    if source.is_file():
        if problem := problem_with(source):
            raise UserError(
                f"The checkpoint {source} cannot be used: {problem}.",
                "Weights from it may be wrong.",
                f"choose another one: ls {source.parent}",
            )
        return source, []
    warnings: list[str] = []
    for file in reversed(step_files(source)):
        if not (problem := problem_with(file)):
            if warnings:
                repair_pointers(source, file)
            return file, warnings
        # Out of the way of the retention, which must not count it, but not lost.
        aside = file.with_suffix(".pt.skipped")
        os.replace(file, aside)
        file.with_suffix(".json").unlink(missing_ok=True)
        warnings.append(f"skipped the checkpoint {file}: {problem} (kept as {aside.name})")
    return None, warnings


def repair_pointers(folder: Path, newest: Path) -> None:
    """Let `last.json` name the newest sound checkpoint; drop a `best.json` that names none."""
    write_atomically(folder / "last.json", newest.with_suffix(".json").read_text())
    best = folder / "best.json"
    if best.exists() and not (folder / json.loads(best.read_text())["file"]).exists():
        best.unlink()  # written again when the epoch that it was of is trained again


def load_checkpoint(source: Path, state: TrainState, process: Process) -> "Loaded":
    """Fill `state` from the newest sound checkpoint in `source`. Collective.

    The random state is not restored here but by `Loaded.restore_own`, as the last thing before
    training: building models and loaders draws random numbers.
    """
    file, warnings = broadcast_from_main(lambda: choose_checkpoint(source), process)
    if file is None:
        return Loaded(None, warnings, [])
    saved = read_everywhere(file, process)
    if saved["format"] != FORMAT:
        raise UserError(
            f"The checkpoint {file} has format {saved['format']}; this code reads {FORMAT}.",
            "It was written by another version of this project.",
            "use that version, or --resume none",
        )
    try:
        state.load_shared(saved)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            f"The checkpoint {file} does not fit this model: {shorten(str(error), 300)}",
            "Going on with part of the weights would look like training and be something else.",
            "--resume none, to start a new run; or restore the model that was saved",
        ) from None
    if len(saved["ranks"]) != process.world_size:
        warnings.append(
            f"{file.name} was written by {len(saved['ranks'])} processes, now there are "
            f"{process.world_size}: they share the rest of the epoch, each sample once; global "
            "batch and learning rate are those above; random numbers are new"
        )
    return Loaded(file, warnings, saved["ranks"])


@dataclass
class Loaded:
    """What was loaded.

    Attributes:
        file: The checkpoint, or None if there was none.
        warnings: What is not as it was: newer checkpoints that could not be used, for example.
        ranks: What every rank had for itself when the checkpoint was written.
    """

    file: Path | None
    warnings: list[str]
    ranks: list[dict[str, Any]]

    def restore_own(self, state: TrainState, process: Process) -> None:
        """Restore this rank's random state and meter, as the last thing before training.

        With another number of processes there is no such thing as this rank's old state: the
        streams stay as seeded, and rank 0 takes over what all had summed up.
        """
        if len(self.ranks) == process.world_size:
            own = self.ranks[process.rank]
            restore_rng(own["rng"], process.device)
            state.meter.load_state_dict(own["meter"])
        elif self.ranks:
            meters = [own["meter"] for own in self.ranks]
            loss_sum = sum(meter["loss_sum"] for meter in meters) if process.is_main else 0.0
            state.meter.load_state_dict({"loss_sum": loss_sum, "weight": meters[0]["weight"]})


def read_everywhere(file: Path, process: Process) -> dict[str, Any]:
    """Return the content of a checkpoint on every rank. Collective.

    Each rank reads the file if all can see it; otherwise rank 0 sends its bytes (machines without a
    common disk).
    """
    size = broadcast_from_main(lambda: file.stat().st_size, process)
    unseen = agree_on(not file.is_file() or file.stat().st_size != size, process)
    source: Path | io.BytesIO = file
    if unseen:
        source = io.BytesIO(broadcast_from_main(file.read_bytes, process))
    return dict(torch.load(source, map_location="cpu", weights_only=True))


def load_weights(folder: Path | str, which: str = "best") -> dict[str, torch.Tensor]:
    """Return the model's weights from a run's folder of checkpoints, for use outside training.

    Args:
        folder: For example runs/train-001/checkpoints.
        which: best or last.
    """
    file = Path(folder) / json.loads((Path(folder) / f"{which}.json").read_text())["file"]
    return dict(torch.load(file, map_location="cpu", weights_only=True)["model"])
