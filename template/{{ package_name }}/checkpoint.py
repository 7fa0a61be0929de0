"""Everything that changes during training, saved and loaded so that all ranks agree."""

import io
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .checkpoint_files import choose_checkpoint, remove_old, write_files
from .distributed import Process, agree_on, broadcast_from_main, gather_objects
from .errors import UserError
from .log import logger
from .metrics import TrainMeter
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
            "trained": self.trained(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "best_loss": self.best_loss,
        }

    def trained(self) -> list[str]:
        """Return the names of the trained parameters; AdamW's order follows from theirs."""
        return [name for name, p in self.model.named_parameters() if p.requires_grad]

    def load_shared(self, saved: dict[str, Any]) -> None:
        """Take over what `shared` returned.

        Learning rate, weight decay and the like are settings: they stay as this run has them, also
        when the checkpoint was written under others.

        Raises:
            ValueError: Other parameters are trained. The optimizer's state is kept by number, and
                would go to others.
        """
        self.model.load_state_dict(saved["model"])
        before, now = saved["trained"], self.trained()
        if before != now:
            apart = sorted(set(before) ^ set(now)) or "the same ones in another order"
            raise ValueError(f"other parameters were trained: {apart}")
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


class CheckpointWriter:
    """Writes the checkpoints of a run from rank 0, at once or in the background.

    In the background the training waits only while the state is copied into memory that is kept for
    this. The next save, and the end of the run, wait for the one before and report its failure.
    """

    def __init__(self, folder: Path, keep: int, in_background: bool) -> None:
        """Prepare to write.

        Args:
            folder: The run's folder of checkpoints.
            keep: Newest checkpoints to leave on disk; the best one comes on top.
            in_background: Write in a thread. Costs memory for a copy of the state on rank 0.
        """
        self.folder = folder
        self.keep = keep
        self.thread = ThreadPoolExecutor(max_workers=1) if in_background else None
        self.pending: Future[None] | None = None
        self.kept: Any = None

    def save(self, state: TrainState, process: Process, is_best: bool = False) -> None:
        """Write a checkpoint. Collective.

        Every rank adds its own random state: restoring rank 0's everywhere would give all ranks the
        same dropout. A failure to write is raised on every rank, or they would wait for rank 0.

        Args:
            state: What to save.
            process: This process.
            is_best: Point `best.json` at this one.

        Raises:
            UserError: The disk is full or the folder cannot be written.
        """
        own = {"rng": capture_rng(process.device), "meter": state.meter.state_dict()}
        ranks = gather_objects(own, process)

        def start() -> None:
            self.wait_for_the_thread()
            content = {"format": FORMAT, **state.shared(), "ranks": ranks}
            if self.thread is None:
                self.write(content, is_best)
            else:
                self.kept = copied(content, self.kept)
                self.pending = self.thread.submit(self.write, self.kept, is_best)

        broadcast_from_main(start, process)

    def finish(self, process: Process) -> None:
        """Wait until everything is on disk. Collective.

        Raises:
            UserError: The last checkpoint could not be written.
        """
        broadcast_from_main(self.wait_for_the_thread, process)

    def wait_for_the_thread(self) -> None:
        """Wait for the write before; raise its error."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    def write(self, content: dict[str, Any], is_best: bool) -> None:
        """Write one checkpoint, then remove old ones; on rank 0, perhaps in the thread."""
        started = time.perf_counter()
        try:
            file = write_files(self.folder, content, is_best)
        except OSError as error:
            raise UserError(
                f"The checkpoint of step {content['step']} could not be written to {self.folder}: "
                f"{error.strerror}.",
                "Training on without checkpoints would lose the work at the next failure.",
                "free some space or fix the permissions, then start the same command again",
            ) from error
        mib, seconds = file.stat().st_size / 2**20, time.perf_counter() - started
        logger.debug(f"saved {file.name}: {mib:.1f} MiB in {seconds:.2f} s")
        remove_old(self.folder, self.keep)


def copied(value: Any, kept: Any = None) -> Any:
    """Return a copy in the processor's memory, which later training does not change.

    Args:
        value: Tensors in dicts, lists and tuples.
        kept: The copy of an earlier state; its memory is used again where the shapes are the same.
    """
    if isinstance(value, torch.Tensor):
        fits = isinstance(kept, torch.Tensor) and kept.shape == value.shape
        target = kept if fits else torch.empty_like(value, device="cpu")
        return target.copy_(value)
    if isinstance(value, dict):
        old = kept or {}
        return {key: copied(item, old.get(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        olds = kept if kept and len(kept) == len(value) else [None] * len(value)
        return type(value)(copied(item, old) for item, old in zip(value, olds, strict=True))
    return value


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
