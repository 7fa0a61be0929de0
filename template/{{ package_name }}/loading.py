"""Which sample goes where: the order of an epoch, cut into global batches and dealt to the ranks.

Optimizer step k of an epoch trains on positions k * G to (k + 1) * G of the epoch's order, where G
is the global batch size, whatever the number of processes, micro-batch size and accumulation.
That is why N processes train like one, and why a run can go on in the middle of an epoch.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, tee
from multiprocessing.context import BaseContext
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from .config import Config
from .distributed import Process, gather_objects
from .errors import UserError
from .permutation import Permutation
from .seeding import generator
from .stopping import STOP_SIGNALS

# Samples of a rank whose place in the order is computed at once.
BLOCK = 4096


@dataclass
class MicroBatch:
    """The samples of one forward pass on one rank.

    Attributes:
        inputs: What the model takes; the first dimension is the sample.
        targets: What the loss compares with; the first dimension is the sample.
        weights: float32 [samples], or None if every sample weighs 1. A repeated sample that only
            fills up the batch weighs 0.
    """

    inputs: Any
    targets: Any
    weights: torch.Tensor | None

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on `device`; the copy overlaps with computation if memory is pinned."""
        if device.type == "cpu":
            return self  # where it was read to
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """Return a copy in page-locked memory. Called by the DataLoader."""
        return self.map(torch.Tensor.pin_memory)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """Return a copy with `function` applied to every tensor."""
        return MicroBatch(
            map_tensors(function, self.inputs),
            map_tensors(function, self.targets),
            None if self.weights is None else function(self.weights),
        )


@dataclass
class Window:
    """What this rank contributes to one optimizer step.

    Attributes:
        micro_batches: One per forward pass, as many on every rank.
        n_samples: Real samples of the step, over all ranks.
        weighted: Whether the data set gives weights of its own. Then the step's total weight must
            be summed over the ranks; otherwise it is `n_samples`.
    """

    micro_batches: list[MicroBatch]
    n_samples: int
    weighted: bool


@dataclass(frozen=True)
class TrainOrder:
    """The order of the training samples, the same on every rank.

    Attributes:
        n_samples: Size of the training set.
        rank: This process. An argument, so that the deal can be tested without processes.
        world_size: Processes in the job.
        micro_batch_size: Samples per forward pass and rank.
        accumulation_steps: Forward passes per optimizer step.
        drop_last: Leave out the last, incomplete global batch.
        seed: The run's seed. Never the rank's: shards of different orders would overlap.
    """

    n_samples: int
    rank: int
    world_size: int
    micro_batch_size: int
    accumulation_steps: int
    drop_last: bool
    seed: int

    @cached_property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.micro_batch_size * self.accumulation_steps * self.world_size

    @cached_property
    def samples_per_epoch(self) -> int:
        """Samples that an epoch trains on."""
        left_over = self.n_samples % self.global_batch_size if self.drop_last else 0
        return self.n_samples - left_over

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return -(-self.samples_per_epoch // self.global_batch_size)

    def check(self) -> None:
        """Refuse a data set that is too small to take one step.

        Raises:
            UserError: It is smaller than a global batch, or empty.
        """
        if self.steps_per_epoch > 0:
            return
        raise UserError(
            f"The training set has {self.n_samples} samples; one optimizer step takes "
            f"{self.global_batch_size} ({self.micro_batch_size} per forward pass x "
            f"{self.accumulation_steps} forward passes x {self.world_size} processes).",
            "With drop_last an incomplete step is left out, so there would be no step at all.",
            "--drop_last false, or lower --micro_batch_size or --accumulation_steps",
        )

    def deal(self, epoch: int, start: int) -> Iterator[tuple[list[list[int]], list[int], int]]:
        """Yield this rank's part of every optimizer step.

        Args:
            epoch: Counted from 0.
            start: Samples of this epoch that were trained on already, over all ranks.

        Yields:
            Indices of each micro-batch, filled up to full size by repeats; how many of them are
            real; and the number of real samples of the whole step, over all ranks.
        """
        order = Permutation(self.n_samples, self.seed, "order", epoch)
        steps = range(start, self.samples_per_epoch, self.global_batch_size)
        # Many steps at once: one by one, computing the order costs as much as a small model.
        per_block = max(1, BLOCK * self.world_size // self.global_batch_size)
        for block in (steps[i : i + per_block] for i in range(0, len(steps), per_block)):
            mine = [self.own_positions(first) for first in block]
            # Before this rank's own samples the first one of the step, which fills up batches.
            pairs = zip(block, mine, strict=True)
            positions = [at for first, parts in pairs for at in chain([first], *parts)]
            samples = iter(order(positions).tolist())
            for first, parts in zip(block, mine, strict=True):
                fill, real = next(samples), [len(part) for part in parts]
                filled_up = [
                    [*islice(samples, size), *[fill] * (self.micro_batch_size - size)]
                    for size in real
                ]
                yield filled_up, real, min(self.global_batch_size, self.samples_per_epoch - first)

    def own_positions(self, start: int) -> list[range]:
        """Return this rank's positions of the step that begins at `start`, for each forward pass.

        Every rank takes each world_size-th one, so that a last, short pass is shared evenly.
        """
        end = min(start + self.global_batch_size, self.samples_per_epoch)
        per_pass = self.micro_batch_size * self.world_size
        return [
            range(first + self.rank, min(first + per_pass, end), self.world_size)
            for first in range(start, end, per_pass)
        ]


def train_windows(
    dataset: Dataset[Any],
    order: TrainOrder,
    epoch: int,
    start: int,
    device: torch.device,
    num_workers: int = 0,
    loader_start: str = "auto",
) -> Iterator[Window]:
    """Yield what this rank trains on in the rest of an epoch, one optimizer step at a time.

    Args:
        dataset: See data.py. If it has `set_epoch`, that is called first: augmentation is a
            function of seed, epoch and index.
        order: The deal.
        epoch: Counted from 0.
        start: Samples of the epoch that are done, over all ranks.
        device: Where the batches will be used.
        num_workers: Loader processes.
        loader_start: How they are started.
    """
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    # Dealt as they are needed: the loader is a few batches ahead of the loop.
    for_loader, for_loop = tee(order.deal(epoch, start))
    batches = iter(
        build_loader(
            dataset,
            (part for parts, _, _ in for_loader for part in parts),
            # A stream of the loader's own: otherwise starting an epoch would draw from the global
            # one, and a resumed run would see other random numbers than a straight one.
            generator(order.seed, "workers", epoch, order.rank),
            device,
            num_workers,
            loader_start,
        )
    )
    for parts, real, n_samples in for_loop:
        micro_batches = [next(batches) for _ in parts]
        weighted = micro_batches[0].weights is not None
        for micro_batch, count in zip(micro_batches, real, strict=True):
            void_repeats(micro_batch, count, len(parts[0]))
        yield Window(micro_batches, n_samples, weighted)


def void_repeats(micro_batch: MicroBatch, real: int, size: int) -> None:
    """Give weight 0 to the repeats that fill up a micro-batch."""
    if real == size:
        return
    if micro_batch.weights is None:
        micro_batch.weights = torch.ones(size)
    micro_batch.weights[real:] = 0


def validation_batches(dataset: Dataset[Any], config: Config, process: Process) -> DataLoader[Any]:
    """Return this rank's share of the validation set: every sample on exactly one rank.

    Not padded to equal sizes as a DistributedSampler would: padding counts samples twice. Ranks may
    have different numbers of batches, or none, so evaluation may not communicate between batches.
    """
    mine = range(process.rank, len_of(dataset), process.world_size)
    size = config.micro_batch_size
    batches = [list(mine[i : i + size]) for i in range(0, len(mine), size)]
    return build_loader(
        dataset, batches, generator("validation"), process.device,
        config.num_workers, config.loader_start,
    )  # fmt: skip


def build_loader(
    dataset: Dataset[Any],
    batches: Iterable[list[int]],
    stream: torch.Generator,
    device: torch.device,
    num_workers: int,
    start: str = "auto",
) -> DataLoader[Any]:
    """Return a loader that yields one `MicroBatch` per list of indices, in order."""
    on_gpu = device.type == "cuda"
    return DataLoader(
        Reader(dataset),
        batch_size=None,  # the reader makes the batches
        sampler=cast("Sampler[Any]", batches),
        collate_fn=as_it_is,
        num_workers=num_workers,
        generator=stream,
        pin_memory=on_gpu,
        multiprocessing_context=worker_context(on_gpu, start) if num_workers > 0 else None,
        worker_init_fn=depend_on_the_trainer,
    )


class Reader(Dataset[MicroBatch]):
    """Reads whole micro-batches, in the training process or in a loader process."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self.read_batch = getattr(dataset, "read_batch", self.read_and_stack)

    def __getitem__(self, indices: list[int]) -> MicroBatch:
        inputs, targets, *weights = self.read_batch(indices)
        return MicroBatch(inputs, targets, weights[0].float() if weights else None)

    def read_and_stack(self, indices: list[int]) -> Any:
        """Read sample by sample and stack what is read."""
        return torch.utils.data.default_collate([self.read(index) for index in indices])

    def read(self, index: int) -> Any:
        """Return one sample; an error says which one it was."""
        try:
            return self.dataset[index]
        except Exception as error:
            problem = f"sample {index} cannot be read: {type(error).__name__}: {error}"
            raise RuntimeError(problem) from error


def as_it_is(batch: Any) -> Any:
    """Return the batch. A function of the module, so that loader processes can be sent it."""
    return batch


def depend_on_the_trainer(worker: int) -> None:
    """Let a loader process end when the training process says so, or is gone."""
    # A scheduler's signal reaches every process. The training process still needs this one, to go
    # on to the step at which all ranks save.
    for name in STOP_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    # torch watches the parent process, but under forkserver the parent is the server.
    threading.Thread(target=end_with_the_trainer, daemon=True).start()


def end_with_the_trainer() -> None:
    """Wait until the training process has ended, however it did, and end too."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    os._exit(1)


def worker_context(on_gpu: bool, start: str = "auto") -> BaseContext:
    """Return how loader processes are started.

    With a GPU they come from a server without CUDA: a fork of the training process would inherit
    the threads of CUDA and NCCL in an unknown state. The server imports torch once, not per worker.
    """
    if start == "auto":
        start = "forkserver" if on_gpu else "fork"
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload([f"{__package__}.data"])
    return context


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `function` to a tensor, or to the tensors in a dict, list or tuple."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_tensors(function, item) for item in value]
    return value


def refuse_sizes(sizes: list[int], process: Process) -> None:
    """Compare the sizes of training and validation set over all ranks. Collective.

    Every rank deals the samples out by itself. From other sizes it would come to other shards,
    which overlap, and to another number of steps.

    Raises:
        UserError: They differ, or there is nothing to validate on.
    """
    first, *others = gather_objects(sizes, process)
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise UserError(
                f"Training and validation set have {first} samples on rank 0, {other} on rank "
                f"{rank}.",
                "All ranks must have the same data: each computes its own share of it.",
                "look for what depends on the rank or the machine in build_datasets in data.py",
            )
    if sizes[1] == 0:
        raise UserError(
            "The validation set is empty.",
            "Every epoch ends with a validation.",
            "hold some samples back in build_datasets in data.py",
        )


def len_of(dataset: Dataset[Any]) -> int:
    """Return the size of a data set.

    Raises:
        UserError: It has none, or no index, as an IterableDataset.
    """
    if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset):
        return len(dataset)
    raise UserError(
        f"The data set {type(dataset).__name__} has no length or no index.",
        "Samples are dealt to the processes by index; a stream has no index.",
        "give it __len__ and __getitem__ (a map-style Dataset)",
    )
