"""What a run says: lines on rank 0's terminal, a log file per rank, metrics.jsonl, a tracker."""

import importlib.util
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from .distributed import Process
from .errors import UserError
from .run_folder import write_atomically

logger = logging.getLogger(__package__)


class TerminalHandler(logging.Handler):
    """Print above the progress bar, on stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        tqdm.write(self.format(record), file=sys.stdout)


def set_up_logging(folder: Path, process: Process) -> None:
    """Send records to a file of this rank; rank 0, and all warnings, to the terminal too."""
    folder.mkdir(parents=True, exist_ok=True)  # machines may have no common disk
    logger.setLevel(logging.DEBUG)  # the files have more than the terminal
    logger.propagate = False
    logger.handlers.clear()
    terminal = TerminalHandler(logging.INFO if process.is_main else logging.WARNING)
    prefix = "" if process.is_main else f"[rank {process.rank}] "
    terminal.setFormatter(logging.Formatter(prefix + "%(message)s"))
    to_file = logging.FileHandler(folder / f"node-{process.node}-rank-{process.rank}.log")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(terminal)
    logger.addHandler(to_file)


class RunLog:
    """The record of a run. Rank 0 writes; on the other ranks every method does nothing."""

    def __init__(
        self, folder: Path, process: Process, tracker: str, settings: dict[str, Any]
    ) -> None:
        refuse_missing(tracker)  # on every rank: if rank 0 failed alone, the others would wait
        self.is_main = process.is_main
        self.metrics_file = folder / "metrics.jsonl"
        self.tracker = build_tracker(tracker, folder, settings) if process.is_main else None
        self.bar: tqdm[Any] | None = None
        self.shows_bar = process.is_main and sys.stdout.isatty()

    def rewind(self, step: int, epoch: int) -> None:
        """Forget the lines of work that was lost and is done again.

        Args:
            step: The last step that is not done again.
            epoch: The first epoch whose validation is done again.
        """
        if not self.is_main or not self.metrics_file.exists():
            return
        kept = []
        for line in self.metrics_file.read_text().splitlines():
            if is_complete(line):
                entry = json.loads(line)
                again = entry["kind"] == "validation" and entry["epoch"] >= epoch
                kept += [line + "\n"] if entry["step"] <= step and not again else []
        write_atomically(self.metrics_file, "".join(kept))

    def start_epoch(self, epoch: int, epochs: int, done: int, steps: int) -> None:
        """Show a new progress bar. Steps are those of the epoch."""
        if self.shows_bar:
            self.bar = tqdm(
                total=steps, initial=done, desc=f"epoch {epoch + 1}/{epochs}", unit="step",
                file=sys.stdout, leave=False, dynamic_ncols=True,
            )  # fmt: skip

    def advance(self) -> None:
        """Move the progress bar by one optimizer step."""
        if self.bar is not None:
            self.bar.update()

    def train(self, step: int, epoch: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a log interval."""
        self.write("train", step, epoch, metrics)
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{metrics['loss']:.4f}", refresh=False)
        elif self.is_main:
            logger.info(
                f"step {step:>6}  loss {metrics['loss']:.4f}  lr {metrics['learning_rate']:.2e}  "
                f"{metrics['samples_per_s']:.0f} samples/s"
            )

    def end_epoch(self, step: int, epoch: int, epochs: int, metrics: dict[str, float]) -> None:
        """Record the metrics of a validation; close the progress bar."""
        self.write("validation", step, epoch, metrics)
        self.close_bar()
        shown = {name: value for name, value in metrics.items() if name != "samples"}
        text = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        logger.info(
            f"epoch {epoch + 1}/{epochs}  step {step}  validation: {text}  "
            f"({metrics['samples']:.0f} samples)"
        )

    def write(self, kind: str, step: int, epoch: int, metrics: dict[str, float]) -> None:
        """Append a line to metrics.jsonl and tell the tracker."""
        if not self.is_main:
            return
        line = {"kind": kind, "step": step, "epoch": epoch, **metrics, "time": time.time()}
        with self.metrics_file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        if self.tracker is not None:
            self.tracker.log({f"{kind}/{name}": value for name, value in metrics.items()}, step)

    def close_bar(self) -> None:
        """Take the progress bar off the terminal."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def close(self) -> None:
        """Finish: flush what the tracker still holds."""
        self.close_bar()
        if self.tracker is not None:
            self.tracker.close()


def is_complete(line: str) -> bool:
    """Return whether a line of metrics.jsonl was written to its end before a kill."""
    try:
        return "step" in json.loads(line)
    except ValueError:
        return False


class Tracker(Protocol):
    """Where metrics go besides metrics.jsonl. Made on rank 0 only: N ranks would make N runs."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send metrics of an optimizer step."""

    def close(self) -> None:
        """Send what is left."""


def refuse_missing(tracker: str) -> None:
    """Name a tracker whose package is not installed.

    Raises:
        UserError: It is not.
    """
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise UserError(
            f"tracker is {tracker}, but the package {tracker} is not installed.",
            "The metrics would go nowhere.",
            f"python -m pip install {tracker}, or --tracker none",
        )


def build_tracker(name: str, folder: Path, settings: dict[str, Any]) -> Tracker | None:
    """Make the tracker called `name`, or None for "none". Call on rank 0."""
    trackers: dict[str, Callable[[Path, dict[str, Any]], Tracker]]
    trackers = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
    return trackers[name](folder, settings) if name in trackers else None


class TensorBoard:
    """Event files in the run folder: tensorboard --logdir runs."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send metrics of an optimizer step."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Send what is left."""
        self.writer.close()


class WandB:
    """A run of Weights & Biases with the name of the run folder."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        import wandb

        # The same id when the run goes on, so that there is one curve.
        self.run = wandb.init(
            id=f"{settings['run_name']}-{folder.name}", resume="allow", name=folder.name,
            dir=str(folder), config=settings,
        )  # fmt: skip

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send metrics of an optimizer step."""
        self.run.log(metrics, step=step)

    def close(self) -> None:
        """Send what is left."""
        self.run.finish()


class MLflow:
    """A run of MLflow with the name of the run folder."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        import mlflow

        self.mlflow = mlflow
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params(settings)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send metrics of an optimizer step."""
        self.mlflow.log_metrics(metrics, step=step)

    def close(self) -> None:
        """Send what is left."""
        self.mlflow.end_run()
