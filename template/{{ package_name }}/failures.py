"""How a job ends when something goes wrong: soon, on every rank, and naming the rank that failed.

The rank that fails says so, with its error. The others lose their connection to it, or wait for it
in vain: they must not be taken for the cause, and say only who is missing. What the ranks tell each
other here goes through torchrun's own key-value store, because the process group is broken by then.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from .errors import AnotherRankFailed, UserError

# A rank that is alive notices within this time that another one is gone.
ROLL_CALL_S = 2.0

# torchrun notices within this time that a process has ended, and ends the others.
TORCHRUN_S = 5.0

# What gloo's errors have in them; they are plain RuntimeErrors.
GLOO_SAYS = ("gloo", "pair closure", "Connection closed by peer", "Connection reset by peer")
GLOO_WAITED = ("Timed out", "Application timeout")

# How long the ranks wait for each other.
patience_s = 0.0

# Set when torchrun, or anybody else, has asked this process to end.
told_to_end = threading.Event()


def run_and_exit(main: Callable[[], None]) -> NoReturn:
    """Run `main` and end this process, with an exit code that tells the truth.

    `record` hands a failure to torchrun, which then names the rank that failed first. The process
    ends by `os._exit`, because the ordinary end of Python can crash or hang: threads of the process
    group may still run while the interpreter is taken down.
    Source: https://github.com/pytorch/pytorch/issues/190489
    """

    def guarded() -> None:
        try:
            main()
        except UserError as error:
            # Not left to `record`: torchrun would repeat it with two tracebacks.
            say_once(f"error: {error}")
            raise SystemExit(2) from None
        except Exception as error:
            if isinstance(error, AnotherRankFailed) or is_lost_connection(error):
                leave_the_blame(error)
            raise

    code = 0
    try:
        record(guarded)()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        print(f"{whoami()} failed: {summary(error)}", file=sys.stderr)
        print(traceback.format_exc(), file=sys.stderr, end="")
        code = 1
    if code:
        mark_failed()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def summary(error: BaseException) -> str:
    """Return one line about an error, with a way out of the most frequent one."""
    line = traceback.format_exception_only(type(error), error)[0].strip()
    text = str(error).strip()
    if "\nOriginal Traceback" in text:  # it happened in a loader process; the last line says what
        return f"{text.splitlines()[-1]} (in a loader process)"
    if "exited unexpectedly" in text and isinstance(error.__cause__, RuntimeError):
        return summary(error.__cause__)  # torch's other error, which names the signal
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return f"{line}\n  fix: halve --micro_batch_size and double --accumulation_steps: less " + (
            "memory, the same global batch"
        )
    return line


def is_lost_connection(error: Exception) -> bool:
    """Return whether the error only says that another rank is gone or does not answer."""
    if isinstance(error, dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in GLOO_SAYS)


def leave_the_blame(error: Exception) -> None:
    """End this process without an error of its own, if another rank was the cause.

    When one rank fails, the others lose their connection to it within the same second, and torchrun
    might name one of them as the cause. So they wait for torchrun to end them. If the cause has not
    spoken for itself, because it was killed or hangs, it is named here. Returns if no rank is found
    to be the cause.
    """
    store = launcher_store()
    if store is None:
        return
    store.set(f"lost/{my_rank()}", "")
    if any(words in str(error) for words in GLOO_WAITED):
        store.set("timed out", "")
    is_first = store.add("callers", 1) == 1
    store.set("roll call", "")
    deadline = time.monotonic() + ROLL_CALL_S + (0 if is_first else TORCHRUN_S)
    while not store.check(["failed"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    # By any rank: one that has waited in vain closes its connections, which the others notice.
    timed_out = store.check(["timed out"])
    if not store.check(["failed"]):
        expected = "lost" if timed_out else "alive"
        silent = [r for r in range(world_size()) if not store.check([f"{expected}/{r}"])]
        if not silent:
            return
        print(f"error: {accusation(silent, timed_out)}", file=sys.stderr)
        print(*(stack_of(rank, store) for rank in silent[:3]), sep="", file=sys.stderr, flush=True)
        mark_failed()
    if not timed_out:
        told_to_end.wait(TORCHRUN_S)
    print(f"{whoami()} ended: another rank failed", file=sys.stderr, flush=True)
    os._exit(1)


def accusation(silent: list[int], timed_out: bool) -> UserError:
    """Return what to say of ranks that cannot speak for themselves."""
    who = f"Rank {', '.join(map(str, silent[:8]))}{' and more' if len(silent) > 8 else ''}"
    if timed_out:
        return UserError(
            f"{who} did not answer within {patience_s:g} s (timeout_s).",
            "The others wait for it in a collective, and would wait for ever.",
            "look below where it stands; if it is only slow: a higher --timeout_s",
        )
    return UserError(
        f"{who} is gone without a word.",
        "It was killed from outside (often by the system, when memory ran out), crashed in native "
        "code, or left early.",
        "see its exitcode below (-9: killed, -11: crashed), and dmesg on its machine",
    )


def stack_of(rank: int, store: dist.Store) -> str:
    """Return where a rank said that it stands; empty if it said nothing."""
    if not store.check([f"alive/{rank}"]):
        return ""
    return f"rank {rank} stands here:\n{store.get(f'alive/{rank}').decode()}"


def watch_over_the_job(timeout_s: float) -> None:
    """Start the two threads that answer for this process when another rank has failed.

    Args:
        timeout_s: Seconds that the ranks wait for each other; for the message.
    """
    global patience_s
    patience_s = timeout_s
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=end_with_the_job, args=(reader, writer), daemon=True).start()
    threading.Thread(target=answer_the_roll_call, daemon=True).start()


def end_with_the_job(reader: socket.socket, writer: socket.socket) -> None:
    """End this process when torchrun says so after a failure, whatever the program is doing.

    torchrun sends SIGTERM then, as it does when the job is to stop. The program answers at its next
    step: never, if it hangs, and then torchrun waits for half a minute.

    Args:
        reader: Where the numbers of the signals arrive.
        writer: The other end; held here so that it stays open.
    """
    while number := reader.recv(1):
        if number[0] != signal.SIGTERM:
            continue
        told_to_end.set()
        store = launcher_store()
        if store is not None and store.check(["failed"]):
            print(f"{whoami()} ended: another rank failed", file=sys.stderr, flush=True)
            os._exit(1)


def answer_the_roll_call() -> None:
    """Wait until a rank that has lost the others asks who is there; then say where this one is."""
    store = launcher_store()
    try:
        if store is not None:
            store.wait(["roll call"], timedelta(days=365))
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            store.set(f"alive/{my_rank()}", "".join(traceback.format_stack(frame)[-5:]))
    except RuntimeError:  # torchrun has gone, and its store with it: nobody can ask any more
        return


def mark_failed() -> None:
    """Tell the other ranks that the job has failed, and that somebody has said why."""
    store = launcher_store()
    if store is not None:
        store.set("failed", "")


def my_rank() -> int:
    """Return this process's rank, also when there is no process group."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes, also when there is no process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def whoami() -> str:
    """Return the name of this process in error messages."""
    return f"[rank {os.environ.get('RANK', '0')} on {socket.gethostname()}]"


def say_once(message: str) -> None:
    """Print an error that every rank may have, once per job instead of once per rank.

    The launcher's store is asked who came first, because the process group may not exist yet.
    """
    store, said = launcher_store(), f"said/{message}"
    if store is not None and store.add(f"count/{message}", 1) > 1:
        store.wait([said], timedelta(seconds=10))  # or torchrun may end the one that is printing
        return
    print(message, file=sys.stderr, flush=True)
    if store is not None:
        store.set(said, "1")


def launcher_store() -> dist.Store | None:
    """Return torchrun's own key-value store, or None if there is no torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=10))
    except RuntimeError:  # torchrun is gone or out of reach: every rank speaks for itself
        return None
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"errors/{restart}", store)
