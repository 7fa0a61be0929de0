"""Stop on request: a signal, a file or the time; all ranks agree, the loop saves and leaves."""

import math
import os
import signal
import time
from pathlib import Path
from types import FrameType

from .distributed import Process, agree_on, gather_objects

# A request is noticed after about this time, and within 100 steps in any case.
LATENCY_S = 1.0

# A second Ctrl-C ends the process at once, if it does not come within this time of the first.
ECHO_S = 1.0

# Slurm (the first two), Kubernetes, a terminal and a closed connection, in this order.
STOP_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP")

# Those that end torchrun too. The other two are for the training alone.
LAUNCHER_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")

# When torchrun stops one machine of an elastic job, it stops the others within this time.
ELASTIC_S = 10.0

# What is left of a long Slurm allocation when the run stops by itself, for the last checkpoint.
SLURM_MARGIN_S = 120.0


class StopRequest:
    """Whether somebody asked this run to stop.

    Nothing is saved inside the handler: it may run in the middle of an optimizer step.

    Attributes:
        file: A file whose presence is a request too, looked for on rank 0.
        reason: What this rank was asked by; empty if it was not.
        agreed: Whether all ranks stop now.
        every_steps: Optimizer steps between two questions.
    """

    def __init__(self, max_minutes: float = 0.0) -> None:
        """Start the clock.

        Args:
            max_minutes: Time after which the run stops by itself; 0: at the end of the Slurm
                allocation, if there is one.
        """
        left_s = 60 * max_minutes if max_minutes else slurm_time_left_s()
        self.deadline = time.monotonic() + left_s
        self.deadline_reason = "max_minutes" if max_minutes else "the end of the Slurm allocation"
        self.file: Path | None = None
        self.reason = ""
        self.since = 0.0
        self.agreed = False
        self.every_steps = 1

    def listen(self) -> None:
        """Let the stop signals set the flag. A second Ctrl-C ends the process at once."""
        for name in STOP_SIGNALS:
            signal.signal(getattr(signal, name), self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A terminal sends Ctrl-C to all processes, and torchrun passes its own on: one key press
        # arrives here twice.
        is_echo = time.monotonic() - self.since < ECHO_S
        if number == signal.SIGINT and self.reason == "SIGINT" and not is_echo:
            raise KeyboardInterrupt
        self.reason, self.since = signal.Signals(number).name, time.monotonic()

    def agree(self, process: Process) -> bool:
        """Return whether any rank was asked to stop, or the time is up. Collective.

        Signals reach the ranks at different moments. Without agreement one rank would leave after
        step k and the others would wait for it in step k + 1.
        """
        if time.monotonic() > self.deadline:
            self.reason = self.reason or self.deadline_reason
        if process.is_main and self.file is not None and self.file.exists():
            self.reason = self.reason or f"the file {self.file.name}"
        self.agreed = agree_on(bool(self.reason), process)
        return self.agreed

    def pass_on(self, process: Process) -> None:
        """Pass on to this machine's torchrun what has ended that of another one. Collective.

        Otherwise it waits five minutes for the other, and ends with 0, as if the training had
        finished: Kubernetes would not start this machine's part again.
        """
        machine = os.environ.get("GROUP_RANK")  # torchrun's number of it
        asked = gather_objects((machine, self.reason), process)
        here = any(reason for where, reason in asked if where == machine)
        elsewhere = any(reason in LAUNCHER_SIGNALS for _, reason in asked)
        if not elsewhere or here or process.local_rank != 0:
            return
        # When a machine comes or goes, torchrun stops the processes everywhere to start them again.
        # It is about to do so here: a process that ends before would look like one that is done.
        if is_elastic():
            deadline = time.monotonic() + ELASTIC_S
            while not self.reason and time.monotonic() < deadline:
                time.sleep(0.05)
        if not self.reason:
            os.kill(os.getppid(), signal.SIGTERM)

    def is_due(self, step: int) -> bool:
        """Return whether the ranks should ask each other after this step."""
        return step % self.every_steps == 0

    def pace(self, step_s: float) -> None:
        """Ask less often when steps are short: a question per step would slow them down.

        Args:
            step_s: Seconds per step, the same number on every rank.
        """
        self.every_steps = max(1, min(100, int(LATENCY_S / step_s)))


def is_elastic() -> bool:
    """Return whether machines may come and go. launch/node.sh sets this for torch in such jobs."""
    return "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in os.environ


def slurm_time_left_s() -> float:
    """Return the seconds until this run should stop for Slurm's time limit; infinity without one.

    Leaves a tenth of the time for the last checkpoint, two minutes at most.

    Source: Slurm sets SLURM_JOB_END_TIME (seconds since 1970) in the environment of a batch job.
    """
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if not end.isdecimal():
        return math.inf
    left_s = float(end) - time.time()
    return left_s - min(SLURM_MARGIN_S, left_s / 10)
