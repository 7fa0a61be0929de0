"""Ctrl-C and SIGTERM that cannot leave half of a project behind.

A signal raises KeyboardInterrupt once, wherever the program is. Inside `held()` it waits: there
stands what must not be cut in two, the clean-up above all.
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
    waiting: bool = False


_state = _State()


def _on_signal(signum: int, frame: FrameType | None) -> None:
    _state.waiting = True
    check()


@contextmanager
def caught() -> Iterator[None]:
    """Turn the signals that end a program into one KeyboardInterrupt while the block runs."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers; elsewhere the caller's own handling stays.
        yield
        return
    _state.holds, _state.waiting = 0, False
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
    """Raise KeyboardInterrupt if a signal waits and nothing holds it."""
    if _state.waiting and not _state.holds:
        _state.waiting = False
        raise KeyboardInterrupt


def waiting() -> bool:
    """Tell whether a signal has come in and is held."""
    return _state.waiting
