"""Twenty times kill -9 in the middle of a save: always loadable, always the same bits in the end.

Runs inside a generated project, as one more of its tests.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PACKAGE import checkpoint_files
from PACKAGE.checkpoint import CheckpointWriter
from PACKAGE.config import Config

from .ranks import RankFailed, run_ranks
from .test_resume import same_weights
from .tiny import metrics, settings, train_tiny

KILLS = 20
SECOND_SAVE = 2


class Deadly:
    """Counts what a save asks of the system, and dies in the middle of one call."""

    def __init__(self, die_at: int) -> None:
        self.die_at = die_at
        self.saves = 0
        self.calls = 0

    def around(self, ordinary: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls += self.saves == SECOND_SAVE
            if self.calls == self.die_at:
                if ordinary.__name__ == "write":  # half of it has reached the disk
                    writer, data = arguments
                    writer.stream.write(bytes(data)[: len(bytes(data)) // 2])
                    writer.stream.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return ordinary(*arguments, **named)

        return counted


def train_and_count(config: Config, die_at: int) -> int:
    """Train; return how many calls the second save was, if this process has lived."""
    deadly = Deadly(die_at)
    ordinary = CheckpointWriter.write

    def write(writer: CheckpointWriter, content: dict[str, Any], is_best: bool) -> None:
        deadly.saves += 1
        ordinary(writer, content, is_best)
        if deadly.saves == SECOND_SAVE:
            deadly.saves = 100

    CheckpointWriter.write = write
    for name in ("replace", "fsync", "open", "unlink"):
        setattr(os, name, deadly.around(getattr(os, name)))
    writer = checkpoint_files.HashingWriter
    writer.write = deadly.around(writer.write)
    train_tiny(config)
    return deadly.calls


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody killed, its weights, and the number of calls of its second save."""
    folder = tmp_path_factory.mktemp("straight")
    config = settings(folder / "run", keep_checkpoints=1)
    result, _ = run_ranks(folder, 2, train_tiny, config)
    torch.save(result["weights"], folder / "weights.pt")
    calls, _ = run_ranks(folder, 2, train_and_count, settings(folder / "count"), -1)
    assert calls > 2 * KILLS
    (folder / "calls").write_text(str(calls))
    return folder


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_in_a_save(tmp_path: Path, straight: Path, number: int) -> None:
    calls = int((straight / "calls").read_text())
    # The many small writes of the data come first: every other kill is among the last few calls.
    die_at = calls - number // 2 if number % 2 else 1 + (calls - 12) * number // KILLS
    config = settings(tmp_path / "run", keep_checkpoints=1, async_save=number % 4 >= 2)
    with pytest.raises(RankFailed, match="-9"):
        run_ranks(tmp_path, 2, train_and_count, config, die_at)
    sound = [
        file
        for file in checkpoint_files.step_files(tmp_path / "run/train-001/checkpoints")
        if not checkpoint_files.problem_with(file)
    ]
    assert sound, "the checkpoint before has to be there"
    result, _ = run_ranks(tmp_path, 2, train_tiny, config)
    expected = torch.load(straight / "weights.pt")
    assert same_weights(result["weights"], expected)
    assert metrics(tmp_path / "run") == metrics(straight / "run")
    assert not list((tmp_path / "run/train-001/checkpoints").glob(".*"))


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("step", [2, 5])
def test_more_than_two_processes(tmp_path: Path, world_size: int, step: int) -> None:
    """With exact_resume; without it the order of sums changes after a restart."""
    common = {"exact_resume": True, "accumulation_steps": 2}
    expected, *_ = run_ranks(
        tmp_path, world_size, train_tiny, settings(tmp_path / "straight", **common)
    )
    config = settings(tmp_path / "killed", **common)
    with pytest.raises(RankFailed):
        run_ranks(tmp_path, world_size, train_tiny, config, kill=(world_size - 1, step))
    resumed, *_ = run_ranks(tmp_path, world_size, train_tiny, config)
    assert same_weights(resumed["weights"], expected["weights"])


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_loader_processes_of_any_kind_read_the_same(tmp_path: Path, start: str) -> None:
    results = [
        run_ranks(
            tmp_path, 2, train_tiny,
            settings(tmp_path / kind, epochs=1, num_workers=2, loader_start=kind),
        )[0]
        for kind in ("fork", start)
    ]  # fmt: skip
    assert same_weights(results[0]["weights"], results[1]["weights"])
