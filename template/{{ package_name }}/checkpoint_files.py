"""The files of checkpoints, written so that a kill cannot hurt. Nothing in here communicates.

A checkpoint is two files: step-00000120.pt, and step-00000120.json, written last, which holds the
SHA-256 of the first. One without the other, or with another sum, does not count. At the end of an
epoch the name goes on: step-00000120-epoch-0004.pt. `last.json` and `best.json` are copies of such
a .json file and tell which checkpoint is meant.
"""

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from .errors import UserError
from .run_folder import write_atomically


def write_files(folder: Path, saved: dict[str, Any], is_best: bool) -> Path:
    """Write data, then its description, then the pointers. A kill in between leaves the old.

    Returns:
        The checkpoint.
    """
    at_epoch_end = saved["position"] == 0
    end = f"-epoch-{saved['epoch']:04d}" if at_epoch_end else ""
    file = folder / f"step-{saved['step']:08d}{end}.pt"
    if file.exists() and not problem_with(file):
        return file  # the one that the run went on from, when it is stopped at once again
    temporary = folder / f".{file.name}.tmp"
    with temporary.open("wb") as stream:
        digest = HashingWriter(stream)
        try:
            torch.save(saved, cast(IO[bytes], digest))
        except RuntimeError:
            if digest.failure is not None:
                raise digest.failure from None
            raise
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
    return file


class HashingWriter:
    """A file that computes the SHA-256 of what is written to it.

    Attributes:
        sha256: The sum so far.
        failure: Why the system refused to write; torch.save hides it behind an error of its own.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.sha256 = hashlib.sha256()
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write `data` and add it to the sum."""
        self.sha256.update(data)
        try:
            return self.stream.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        """Hand on what is buffered."""
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


def load_weights(folder: Path | str, which: str = "best") -> dict[str, torch.Tensor]:
    """Return the model's weights from a run's folder of checkpoints, for use outside training.

    Args:
        folder: For example runs/train-001/checkpoints.
        which: best or last.
    """
    file = Path(folder) / json.loads((Path(folder) / f"{which}.json").read_text())["file"]
    return dict(torch.load(file, map_location="cpu", weights_only=True)["model"])
