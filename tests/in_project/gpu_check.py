"""What only GPUs can show, in a table, in at most two minutes. Runs inside a generated project.

Without GPUs the same checks run on the CPU, where they can, so that this program is known to work.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .ranks import RankFailed, run_ranks
from .test_resume import same_weights
from .test_training import difference
from .tiny import settings, train_tiny

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = "cuda" if GPUS else "cpu"
WORLD = min(2, GPUS) if GPUS else 2


class NotHere(Exception):
    """A check that this machine cannot do."""


def train_on(folder: Path, world_size: int, name: str, **options: Any) -> dict[str, Any]:
    tiny = {k: options.pop(k) for k in ("norm", "dropout", "kill") if k in options}
    config = settings(folder / name, device=DEVICE, deterministic=True, **options)
    return dict(run_ranks(folder, world_size, train_tiny, config, **tiny)[0])


def needs(gpus: int) -> None:
    if gpus > GPUS:
        raise NotHere(f"needs {gpus} GPU(s), here are {GPUS}")


def one_process_like_two(folder: Path) -> str:
    if GPUS:
        needs(2)
    plain = {"norm": False, "dropout": 0.0}
    one = train_on(folder, 1, "one", micro_batch_size=8, **plain)
    two = train_on(folder, 2, "two", micro_batch_size=2, accumulation_steps=2, **plain)
    apart = difference(one["weights"], two["weights"])
    assert apart < 1e-4, apart
    return f"largest difference of a weight {apart:.1e}"


def gradients_once_per_step(folder: Path) -> str:
    result = train_on(folder, WORLD, "count", accumulation_steps=3)
    assert result["all_reduces"] == result["steps"], result
    return f"{result['all_reduces']} all-reduces in {result['steps']} steps"


def resume(folder: Path, **options: Any) -> str:
    straight = train_on(folder, WORLD, "straight", **options)
    try:
        train_on(folder, WORLD, "killed", kill=(WORLD - 1, 7), **options)
    except RankFailed:
        resumed = train_on(folder, WORLD, "killed", **options)
        assert same_weights(straight["weights"], resumed["weights"])
        return "the same bits, dropout included"
    raise AssertionError("the process was not killed")


def bf16(folder: Path) -> str:
    if GPUS and not torch.cuda.is_bf16_supported():
        raise NotHere("this GPU has no bf16")
    return resume(folder, precision="bf16")


def sync_batchnorm(folder: Path) -> str:
    needs(2)
    options = {"sync_batchnorm": True, "dropout": 0.0}
    one = train_on(folder, 1, "one", micro_batch_size=8, **options)
    two = train_on(folder, 2, "two", micro_batch_size=4, **options)
    apart = difference(one["weights"], two["weights"])
    assert apart < 1e-3, apart
    return f"statistics over both GPUs; largest difference {apart:.1e}"


def bf16_messages(folder: Path) -> str:
    needs(2)
    train_on(folder, 2, "hook", comm_hook="bf16")
    return "trains"


def a_failing_rank(folder: Path) -> str:
    started = time.monotonic()
    try:
        train_on(folder, WORLD, "failing", kill=(WORLD - 1, 3), timeout_s=20.0)
    except RankFailed:
        return f"ended after {time.monotonic() - started:.0f} s, start included"
    raise AssertionError("a job with a killed rank ended well")


CHECKS: dict[str, Callable[[Path], str]] = {
    "two processes train like one": one_process_like_two,
    "gradients are sent once per step": gradients_once_per_step,
    "killed and resumed, fp32": resume,
    "killed and resumed, bf16": bf16,
    "killed and resumed, fp16": lambda folder: resume(folder, precision="fp16"),
    "killed and resumed, loader processes": lambda folder: resume(folder, num_workers=2),
    "killed and resumed, background saves": lambda folder: resume(folder, async_save=True),
    "SyncBatchNorm": sync_batchnorm,
    "messages in bf16": bf16_messages,
    "a killed rank ends the job": a_failing_rank,
}


def main() -> int:
    name = torch.cuda.get_device_name(0) if GPUS else "no GPU: the CPU is used where it can be"
    print(f"{name}; {WORLD} process(es), torch {torch.__version__}\n")
    failed = False
    for title, check in CHECKS.items():
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                verdict, detail = "ok", check(Path(folder))
            except NotHere as reason:
                verdict, detail = "skipped", str(reason)
            except (AssertionError, RuntimeError) as error:
                verdict, detail, failed = "FAILED", str(error)[-2000:], True
        seconds = time.monotonic() - started
        print(f"TABLE {title:<38} {verdict:<8} {seconds:5.1f} s  {detail}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
