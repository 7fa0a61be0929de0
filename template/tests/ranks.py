"""Run a function on several real processes, as torchrun would, but started in milliseconds."""

import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# The children are forked from a server that has imported the slow parts already: torch, and what
# torch imports when the first optimizer is made.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "tests.tiny"])


class RankFailed(AssertionError):
    """A process did not end well. Shows the exit codes and the tracebacks of the ranks."""

    def __init__(self, exit_codes: list[int | None], errors: list[str]) -> None:
        super().__init__(f"exit codes of the ranks: {exit_codes}\n" + "\n".join(errors))


def run_ranks(
    folder: Path,
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 90,
    **named: Any,
) -> list[Any]:
    """Call `function(*arguments, **named)` on every rank and return what it returned on each.

    Args:
        folder: A folder for the results.
        world_size: Number of processes; with 1 the process has no launcher.
        function: A function of a module.
        timeout_s: Seconds until the processes are killed.

    Raises:
        RankFailed: A process failed, died or did not end in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix="ranks-")  # a killed process leaves its temporary files
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(world_size):
        env = launcher_variables(rank, world_size, store.port) if world_size > 1 else {}
        result = folder / f"result-{rank}.pt"
        result.unlink(missing_ok=True)
        result.with_suffix(".txt").unlink(missing_ok=True)
        process = CONTEXT.Process(
            target=child, args=(env, scratch, result, function, arguments, named)
        )
        process.start()
        processes.append(process)
    wait_for(processes, timeout_s)
    shutil.rmtree(scratch, ignore_errors=True)
    exit_codes = [process.exitcode for process in processes]
    results = [folder / f"result-{rank}.pt" for rank in range(world_size)]
    if any(exit_codes):
        errors = [file.with_suffix(".txt") for file in results]
        raise RankFailed(exit_codes, [file.read_text() for file in errors if file.exists()])
    return [torch.load(result, weights_only=False) for result in results]


def launcher_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def wait_for(processes: Sequence[BaseProcess], timeout_s: float) -> None:
    """Wait until all have ended. When one fails the others get ten more seconds."""
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.is_alive() for process in processes):
            alive = [process.sentinel for process in processes if process.is_alive()]
            if not multiprocessing.connection.wait(alive, max(0.0, deadline - time.monotonic())):
                break
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + 10)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def child(
    env: dict[str, str],
    scratch: str,
    result: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> None:
    """Be one rank."""
    os.environ.update(env)
    tempfile.tempdir = scratch
    torch.set_num_threads(1)
    code = 1
    try:
        torch.save(function(*arguments, **named), result)
        code = 0
    except BaseException:
        result.with_suffix(".txt").write_text(traceback.format_exc())
    os._exit(code)
