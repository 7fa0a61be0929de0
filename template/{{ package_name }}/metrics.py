"""Numbers about a run: sums on the device, reduced once per log line."""

import math
import time
from dataclasses import dataclass, field

import torch

from .distributed import Process, gather_objects, reduce_sums


class TrainMeter:
    """Loss and speed since the last log line.

    The sums stay on the device and are reduced only when a line is due: asking for a number at
    every step would make the processor wait for the GPU, and a reduction would make every rank
    wait for the slowest.
    """

    def __init__(self, device: torch.device) -> None:
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.weight = 0.0
        self.clock = Stopwatch()

    def add(
        self, loss_sum: torch.Tensor, weight: float, n_samples: int, skipped: bool = False
    ) -> None:
        """Count one optimizer step.

        Args:
            loss_sum: Sum of this rank's losses, not yet divided; a scalar on the device.
            weight: Total weight of the step over all ranks.
            n_samples: Samples of the step over all ranks.
            skipped: Leave the loss out, which is no number; the time has passed all the same.
        """
        if not skipped:
            self.loss_sum += loss_sum
            self.weight += weight
        self.clock.samples += n_samples
        self.clock.steps += 1

    def reduce(self) -> dict[str, float]:
        """Return the means over all ranks since the last call, and start again. Collective."""
        samples, steps, elapsed, waited = self.clock.lap()
        own = [self.loss_sum, self.loss_sum.new_tensor([elapsed, waited])]
        loss_sum, elapsed, waited = reduce_sums(torch.hstack(own)).tolist()
        ranks = torch.distributed.get_world_size()
        loss = loss_sum / self.weight if self.weight else math.nan
        self.loss_sum.zero_()
        self.weight = 0.0
        return {
            "loss": loss,
            "samples_per_s": samples * ranks / elapsed,
            "step_ms": 1000 * elapsed / ranks / steps,
            "data_wait_ms": 1000 * waited / ranks / steps,
        }

    def state_dict(self) -> dict[str, float]:
        """Return this rank's sums, for a checkpoint in the middle of a log interval."""
        return {"loss_sum": self.loss_sum.item(), "weight": self.weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` returned."""
        self.loss_sum.fill_(state["loss_sum"])
        self.weight = state["weight"]


@dataclass
class Stopwatch:
    """Where the time of this rank went since the last log line.

    On a GPU the processor runs ahead; a long wait for data is real in any case.
    """

    samples: int = 0
    steps: int = 0
    data_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def lap(self) -> tuple[int, int, float, float]:
        """Return samples, steps, seconds and seconds of waiting for data; start again."""
        lap = self.samples, self.steps, time.perf_counter() - self.started, self.data_s
        self.samples, self.steps, self.data_s, self.started = 0, 0, 0.0, time.perf_counter()
        return lap


class LateNumber:
    """A number of the GPU that is read a step later.

    To read a tensor waits for everything that the GPU has been given until then, also what was
    given after the number was computed. This one is sent to the processor at once, and waits for
    nothing else.
    """

    def __init__(self, value: torch.Tensor) -> None:
        """Start sending.

        Args:
            value: A scalar.
        """
        self.value = value
        self.sent: torch.cuda.Event | None = None
        if value.is_cuda:
            self.value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self.value.copy_(value, non_blocking=True)
            self.sent = torch.cuda.Event()
            self.sent.record()

    def item(self) -> float:
        """Return the number."""
        if self.sent is not None:
            self.sent.synchronize()
        return self.value.item()


class EvaluationSums:
    """Sums over the validation set, in float64. Nothing is communicated until `reduce`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.totals: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor | float) -> None:
        """Add values of any shape to the sum `name`."""
        total = torch.as_tensor(values, dtype=torch.float64, device=self.device).sum()
        self.totals[name] = self.totals.get(name, 0.0) + total

    def reduce(self, process: Process) -> dict[str, float]:
        """Return the sums over all ranks. Collective.

        A rank without any validation sample has no sums, and does not even know their names.
        """
        names = sorted(set().union(*gather_objects(list(self.totals), process)))
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        stacked = torch.stack([self.totals.get(name, zero) for name in names])
        return dict(zip(names, reduce_sums(stacked).tolist(), strict=True))
