"""Ctrl-C and SIGTERM that cannot leave half of a project behind.

The first signal raises KeyboardInterrupt, all later ones are ignored: what follows the first one is
the clean-up, and that must not be interrupted. Inside `held()` even the first one waits.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

# SIGHUP (the terminal was closed) does not exist on every system.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


@dataclass
class _State:
    holds: int = 0
    arrived: bool = False
    raised: bool = False


_state = _State()


def _on_signal(signum: int, frame: FrameType | None) -> None:
    _state.arrived = True
    check()


@contextmanager
def caught() -> Iterator[None]:
    """Turn the signals that end a program into one KeyboardInterrupt while the block runs."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers; elsewhere the caller's own handling stays.
        yield
        return
    _state.holds, _state.arrived, _state.raised = 0, False, False
    before = {}
    for name in _NAMES:
        number = getattr(signal, name, None)
        # nohup and background jobs ignore some signals on purpose: leave that so.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, _on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held() -> Iterator[None]:
    """Let signals wait until the block has ended; raise KeyboardInterrupt then."""
    _state.holds += 1
    try:
        yield
    finally:
        _state.holds -= 1
        check()


@contextmanager
def let_through() -> Iterator[None]:
    """Allow signals again for a block inside `held()`."""
    try:
        _state.holds -= 1
        check()
        yield
    finally:
        _state.holds += 1


def check() -> None:
    """Raise KeyboardInterrupt if a signal arrived and nothing holds it."""
    if _state.arrived and not _state.holds and not _state.raised:
        _state.raised = True
        raise KeyboardInterrupt


def arrived() -> bool:
    """Tell whether a signal came in, also one that is still waiting."""
    return _state.arrived
