"""What one training step makes the interpreter do: the generated loop beside a minimal one.

Run in a generated project under torchrun. Each is counted over an epoch of N and one of 2 N steps,
and the difference taken, so that whatever happens once per epoch cancels. The numbers do not depend
on the load of the machine.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from PACKAGE import distributed, failures, train
from PACKAGE.config import load_config
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset, DistributedSampler

N = 25  # a multiple of the log interval
LOG_EVERY = 25
BATCH = 16


class InMemory(Dataset[Any]):
    """Data in memory, read in whole batches by both loops."""

    def __init__(self, n_samples: int) -> None:
        self.x = torch.randn(n_samples, 64)
        self.y = torch.randint(0, 2, (n_samples,))

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]

    def read_batch(self, indices: list[int]) -> Any:
        return self.x[indices], self.y[indices]

    __getitems__ = read_batch


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2))


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def as_it_is(batch: Any) -> Any:
    return batch


def minimal(data: InMemory, accumulation_steps: int) -> Callable[[], None]:
    """Return an epoch of a loop as somebody careful writes it by hand, without any safety.

    AdamW, clipping and a learning rate schedule as in the generated loop, and the loss on rank 0.
    """
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(
        data, batch_size=BATCH, sampler=sampler, drop_last=True, collate_fn=as_it_is
    )
    ddp_model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    running = torch.zeros(())

    def epoch() -> None:
        sampler.set_epoch(0)
        for index, (x, y) in enumerate(loader, start=1):
            is_last = index % accumulation_steps == 0
            with nullcontext() if is_last else ddp_model.no_sync():
                loss = functional.cross_entropy(ddp_model(x), y) / accumulation_steps
                loss.backward()
            running.add_(loss.detach())
            if is_last:
                nn.utils.clip_grad_norm_(ddp_model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=True)
            if index % (LOG_EVERY * accumulation_steps) == 0:
                dist.all_reduce(running)
                running.div_(dist.get_world_size() * LOG_EVERY).item()
                running.zero_()

    return epoch


def generated(training: train.Training) -> Callable[[], None]:
    """Return an epoch of the generated loop."""

    def epoch() -> None:
        training.state.position = 0
        training.stop.every_steps = 10 * N  # a question per second, not per step
        train.train_epoch(training)

    return epoch


def calls(epoch: Callable[[], None]) -> list[int]:
    """Return the calls of Python functions, of this thread."""
    count = [0]

    def note(frame: Any, event: str, argument: Any) -> None:
        count[0] += event == "call"

    sys.setprofile(note)
    try:
        epoch()
    finally:
        sys.setprofile(None)
    return count


def operators(epoch: Callable[[], None]) -> list[int]:
    """Return the operators and the collectives."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        epoch()
    totals = recorded.key_averages()
    return [
        sum(entry.count for entry in totals if entry.key.startswith(prefix))
        for prefix in ("aten::", "gloo:")
    ]


def per_step(epochs: list[Callable[[], None]]) -> list[float]:
    """Return calls, operators and collectives of one step."""
    counted = []
    for epoch in epochs:
        epoch()  # whatever is made at the first time
        counted.append(calls(epoch) + operators(epoch))
    one, two = counted
    return [(b - a) / N for a, b in zip(one, two, strict=True)]


def main() -> None:
    config = load_config()
    with distributed.process_group(config.device, config.timeout_s) as process:
        ours, theirs = [], []
        for steps in (N, 2 * N):
            n_samples = steps * BATCH * config.accumulation_steps * process.world_size
            data = InMemory(n_samples)
            vars(train).update(
                build_datasets=lambda seed, data=data: (data, InMemory(10)),
                build_model=build_model, compute_losses=losses,
            )  # fmt: skip
            ours.append(generated(train.set_up(config, process)))
            theirs.append(minimal(data, config.accumulation_steps))
        results = per_step(ours), per_step(theirs)
        if process.is_main:
            print("COUNTS", *results[0], *results[1])


if __name__ == "__main__":
    failures.run_and_exit(main)
