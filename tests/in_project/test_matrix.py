"""Every pair of settings that change how a run computes: right, and resumed bit for bit.

Runs inside a generated project, as one more of its tests.
"""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PACKAGE import checkpoint, checkpoint_files, train
from PACKAGE.config import Config
from PACKAGE.seeding import seed_all

from .ranks import RankFailed, run_ranks
from .test_resume import same_weights
from .test_training import difference
from .tiny import TinyModel, metrics, settings, train_tiny

CHOICES: dict[str, list[Any]] = {
    "kill": [
        "start", "middle", "last batch", "epoch boundary", "evaluation", "data written",
        "data renamed", "description written", "old removed", "twice", "other workers",
    ],
    "world_size": [1, 2, 3],
    "precision": ["fp32", "bf16", "fp16"],
    "checkpoint": ["steps", "epoch", "none"],
    "accumulation_steps": [1, 3],
    "drop_last": [True, False],
    "num_workers": [0, 2],
    "async_save": [False, True],
    "sync_buffers": [True, False],
    "comm_hook": ["none", "fp16"],
    "find_unused_parameters": [False, True],
}  # fmt: skip

SAVES = ("data written", "data renamed", "description written", "old removed")

# 263 samples are 7 steps of 36 per epoch, and a short one of 11 with drop_last false.
GLOBAL_BATCH = 36
N_TRAIN = 263

# Distance of the weights to those of one process with the same global batch, as a part of the way
# that these have gone. Rounding differs with the cut of a batch; AdamW makes it larger.
TOLERANCE = {"fp32": 2e-6, "fp16": 0.002, "bf16": 0.05}


def possible(row: dict[str, Any]) -> bool:
    saves = row["checkpoint"] != "none"
    return bool(saves or not (row["async_save"] or row["kill"] in SAVES))


def every_pair() -> list[dict[str, Any]]:
    """Return few rows in which every possible pair of values occurs."""
    names = list(CHOICES)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in CHOICES[a]
        for y in CHOICES[b]
        if any(possible({**row, a: x, b: y}) for row in seeds())
    }
    rows = []
    while missing:
        row = max(candidates(missing), key=lambda row: len(pairs(row) & missing))
        missing -= pairs(row)
        rows.append(row)
    return rows


def seeds() -> list[dict[str, Any]]:
    """Return rows with which any possible pair is possible."""
    return [
        {**{name: values[0] for name, values in CHOICES.items()}, "num_workers": workers,
         "checkpoint": mode, "kill": "start"}
        for workers in (0, 2)
        for mode in ("steps", "none")
    ]  # fmt: skip


def candidates(missing: set[Any]) -> list[dict[str, Any]]:
    """Return rows around one missing pair, each other value chosen greedily."""
    found = []
    for (a, x), (b, y) in sorted(missing, key=str)[:20]:
        for seed in seeds():
            row = {**seed, a: x, b: y}
            for name in CHOICES:
                if name not in (a, b):
                    options = [r for v in CHOICES[name] if possible(r := {**row, name: v})]
                    row = max(options, key=lambda r: len(pairs(r) & missing), default=row)
            if possible(row):
                found.append(row)
    return found


def pairs(row: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(row.items(), 2))


def config_of(folder: Path, row: dict[str, Any], **changes: Any) -> Config:
    passes = row["accumulation_steps"] * row["world_size"]
    knobs = {k: v for k, v in row.items() if k not in ("kill", "world_size")}
    return settings(
        folder, micro_batch_size=GLOBAL_BATCH // passes, save_every_steps=2, keep_checkpoints=1,
        exact_resume=row["world_size"] > 2, **{**knobs, **changes},
    )  # fmt: skip


def initial(unused: bool) -> dict[str, torch.Tensor]:
    """Return the weights that every run starts from."""
    seed_all(0)
    return TinyModel(norm=False, dropout=0.0, sometimes_unused=unused).state_dict()


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return sum(float((one[name] - other[name]).square().sum()) for name in one) ** 0.5


def suicide(when: Callable[..., bool], ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """Return `ordinary`, before which this process dies as if pulled from the socket."""

    def deadly(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return ordinary(*arguments, **named)

    return deadly


def train_and_die(config: Config, kill: str, step: int, **tiny: Any) -> dict[str, Any]:
    """Train until the point `kill`; saves are rank 0's."""
    last = int(os.environ.get("WORLD_SIZE", "1")) - 1
    rank = int(os.environ.get("RANK", "0"))
    at_step = suicide(lambda t, _: t.process.rank == last and t.state.step + 1 == step,
                      train.train_step)  # fmt: skip
    second = itertools.count(1)
    counted = suicide(lambda *_: rank in (0, last) and next(second) == 2, lambda *_: None)
    if kill in ("start", "middle", "last batch", "twice", "other workers"):
        train.train_step = at_step
    if kill == "epoch boundary":
        train.evaluate = suicide(lambda t: t.process.rank == last, train.evaluate)
    if kill == "evaluation":
        train.add_to = suicide(lambda *_: rank == 0, train.add_to)
    if kill == "data written":
        checkpoint_files.os.fsync = lambda *_: counted()
    if kill == "data renamed":
        checkpoint_files.sync_folder = lambda *_: counted()
    if kill == "description written":
        ordinary = checkpoint_files.write_atomically
        checkpoint_files.write_atomically = lambda p, t: (
            counted() if p.name == "last.json" else None, ordinary(p, t))  # fmt: skip
    if kill == "old removed":
        checkpoint.remove_old = lambda *_: counted()
    return train_tiny(config, **tiny)


def kill_step(row: dict[str, Any], steps_per_epoch: int) -> int:
    """Return the step before which the process dies; the second epoch goes on to the middle."""
    places = {"start": 1, "last batch": steps_per_epoch}
    return places.get(row["kill"], steps_per_epoch + 2)


@pytest.mark.parametrize("row", every_pair(), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_settings(tmp_path: Path, row: dict[str, Any]) -> None:
    world_size = row["world_size"]
    unused = row["find_unused_parameters"]
    tiny = {"n_train": N_TRAIN, "n_validation": 40, "sometimes_unused": unused}

    # Right: the weights of one process with the same global batch, without what depends on its cut.
    plain = {**tiny, "norm": False, "dropout": 0.0}
    ours, *others = run_ranks(
        tmp_path, world_size, train_tiny, config_of(tmp_path / "ours", row), **plain
    )
    alone = settings(
        tmp_path / "alone", micro_batch_size=GLOBAL_BATCH, drop_last=row["drop_last"],
        precision=row["precision"], find_unused_parameters=unused,
    )  # fmt: skip
    (one,) = run_ranks(tmp_path, 1, train_tiny, alone, **plain)
    assert ours["steps"] == one["steps"] == 2 * (N_TRAIN // GLOBAL_BATCH + (not row["drop_last"]))
    apart = distance(ours["weights"], one["weights"]) / distance(initial(unused), one["weights"])
    print("APART", apart, row["precision"], row["comm_hook"])
    rounding = [row["precision"], "fp16" if row["comm_hook"] == "fp16" else "fp32"]
    assert apart < max(TOLERANCE[name] for name in rounding)
    assert all(difference(ours["weights"], other["weights"]) == 0.0 for other in others)

    # Resumed: the same bits.
    straight, *_ = run_ranks(
        tmp_path, world_size, train_tiny, config_of(tmp_path / "straight", row), **tiny
    )
    step = kill_step(row, straight["steps_per_epoch"])
    config = config_of(tmp_path / "killed", row)
    with pytest.raises(RankFailed, match="-9"):
        run_ranks(tmp_path, world_size, train_and_die, config, row["kill"], step, **tiny)
    if row["kill"] == "twice":
        with pytest.raises(RankFailed, match="-9"):
            run_ranks(tmp_path, world_size, train_and_die, config, "middle", step + 1, **tiny)
    if row["kill"] == "other workers":
        config = config_of(tmp_path / "killed", row, num_workers=2 - row["num_workers"])
    resumed, *_ = run_ranks(tmp_path, world_size, train_tiny, config, **tiny)
    assert same_weights(resumed["weights"], straight["weights"])
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "straight")
    assert not list((tmp_path / "killed/train-001/checkpoints").glob(".*"))
