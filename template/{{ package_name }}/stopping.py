"""Stop on request: a signal sets a flag, all ranks agree on it, the loop saves and leaves."""

import signal
from types import FrameType

from .distributed import Process, agree_on

# A request is noticed after about this time, and within 100 steps in any case.
LATENCY_S = 1.0

# Slurm, Kubernetes, a terminal and a closed connection, in this order.
STOP_SIGNALS = ("SIGUSR1", "SIGTERM", "SIGINT", "SIGHUP")


class StopRequest:
    """Whether somebody asked this run to stop.

    Nothing is saved inside the handler: it may run in the middle of an optimizer step.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.agreed = False
        self.every_steps = 1

    def listen(self) -> None:
        """Let the stop signals set the flag. A second Ctrl-C ends the process at once."""
        for name in STOP_SIGNALS:
            signal.signal(getattr(signal, name), self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def agree(self, process: Process) -> bool:
        """Return whether any rank was asked to stop. Collective.

        Signals reach the ranks at different moments. Without agreement one rank would leave after
        step k and the others would wait for it in step k + 1.
        """
        self.agreed = agree_on(bool(self.reason), process)
        return self.agreed

    def is_due(self, step: int) -> bool:
        """Return whether the ranks should ask each other after this step."""
        return step % self.every_steps == 0

    def pace(self, step_s: float) -> None:
        """Ask less often when steps are short: a question per step would slow them down.

        Args:
            step_s: Seconds per step, the same number on every rank.
        """
        self.every_steps = max(1, min(100, int(LATENCY_S / step_s)))
