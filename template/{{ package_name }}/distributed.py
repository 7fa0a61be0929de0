"""Processes: start and end of the group, who am I, and the few things ranks say to each other.

Every function marked "Collective" must be called by every rank, in the same order. A rank that
skips one leaves the others waiting until the timeout.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .errors import AnotherRankFailed, UserError
from .failures import watch_over_the_job

T = TypeVar("T")

LAUNCH_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
LAUNCH_VARIABLES = (*LAUNCH_NUMBERS, "MASTER_ADDR")


@dataclass(frozen=True)
class Process:
    """What this process is within the job.

    Attributes:
        rank: Number of this process, 0 to world_size - 1. Decides which samples it trains on.
        local_rank: Number of this process on its machine. Decides which GPU it uses, nothing else.
        node: Number of its machine.
        world_size: Number of processes in the job.
        local_world_size: Number of processes on this machine.
        device: This process's GPU, or the CPU.
        control: Group for small messages. Always gloo, so that they never wait for the GPU.
    """

    rank: int
    local_rank: int
    node: int
    world_size: int
    local_world_size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: the one that writes files and talks to the terminal."""
        return self.rank == 0


@contextmanager
def process_group(device: str = "auto", timeout_s: float = 600.0) -> Iterator[Process]:
    """Join the job's process group; leave it when the block ends well. Collective.

    Without torchrun the group has one member, so that no code below needs an `if distributed`.
    After an exception the group is not destroyed: tearing it down makes the other ranks fail too,
    often before this one is heard, and the launcher would blame the wrong rank.

    Args:
        device: auto, cuda or cpu.
        timeout_s: Seconds that any message waits for the other ranks.

    Raises:
        UserError: The launcher's variables are incomplete, or there are fewer GPUs than processes.
    """
    env = launch_environment()
    local_rank, local_world_size = env.get("LOCAL_RANK", 0), env.get("LOCAL_WORLD_SIZE", 1)
    my_device = choose_device(device, local_rank, local_world_size)
    timeout = timedelta(seconds=timeout_s)
    on_gpu = my_device.type == "cuda"
    if on_gpu:
        # Before the group is made: otherwise every rank opens a context on GPU 0.
        torch.cuda.set_device(my_device)
    backend = "nccl" if on_gpu else "gloo"
    if env:
        die_with_launcher()
        watch_over_the_job(timeout_s)
    # device_id lets NCCL connect at once; gloo does not know it.
    dist.init_process_group(
        backend,
        timeout=timeout,
        device_id=my_device if on_gpu else None,
        **meeting_place(env, timeout),
    )
    world = dist.group.WORLD
    assert world is not None
    control = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else world
    yield Process(
        rank=dist.get_rank(),
        local_rank=local_rank,
        node=int(os.environ.get("GROUP_RANK", 0)),
        world_size=dist.get_world_size(),
        local_world_size=local_world_size,
        device=my_device,
        control=control,
    )
    # Nobody leaves while another rank still needs it.
    dist.barrier(group=control)
    dist.destroy_process_group()


def meeting_place(env: dict[str, int], timeout: timedelta) -> dict[str, Any]:
    """Return where the processes find each other, if it is not simply where the launcher says."""
    if not env:  # a group of one needs no port
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    # After a restart torchrun's store still has the addresses of the processes that are gone.
    address, port = os.environ["MASTER_ADDR"], env["MASTER_PORT"]
    store = dist.PrefixStore(
        f"attempt {attempt}", dist.TCPStore(address, port, is_master=False, timeout=timeout)
    )
    return {"store": store, "rank": env["RANK"], "world_size": env["WORLD_SIZE"]}


def launch_environment() -> dict[str, int]:
    """Read what torchrun tells each process about itself. Empty if there is no launcher.

    Raises:
        UserError: Only some of the variables are set (left over from another job, perhaps).
    """
    present = [name for name in LAUNCH_VARIABLES if name in os.environ]
    missing = [name for name in LAUNCH_VARIABLES if name not in os.environ]
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(present):
        return {}
    if missing:
        raise UserError(
            f"{', '.join(present)} set, but not {', '.join(missing)}.",
            "A launcher sets all of them; with some missing, the processes cannot find each other.",
            f"start with torchrun, or for one process: env -u {' -u '.join(present)} python -m ...",
        )
    values = {name: os.environ[name] for name in LAUNCH_NUMBERS}
    wrong = [f"{name}={value}" for name, value in values.items() if not value.isdecimal()]
    if wrong:
        raise UserError(f"{', '.join(wrong)}.", "These must be numbers.", "start with torchrun")
    return {name: int(value) for name, value in values.items()}


def choose_device(wanted: str, local_rank: int, local_world_size: int) -> torch.device:
    """Return the device of the process with this local rank.

    Raises:
        UserError: There are fewer GPUs than processes on this machine, or none at all.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank < count:
        return torch.device("cuda", local_rank)
    raise UserError(
        f"{local_world_size} processes on {socket.gethostname()}, but {count} GPUs are visible "
        f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}).",
        f"Every process needs a GPU of its own; local rank {local_rank} has none.",
        f"torchrun --nproc-per-node={count} ..." if count else "--device cpu",
    )


def die_with_launcher() -> None:
    """Ask Linux to send SIGTERM to this process when torchrun dies, however it dies.

    Otherwise the workers of a killed torchrun train on, unseen, and keep their GPUs.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def reduce_sums(sums: torch.Tensor) -> torch.Tensor:
    """Return the sums over all ranks. Collective.

    Always add up sums and counts and divide once: the mean of per-rank means is wrong as soon as
    the ranks have different numbers of samples.

    Args:
        sums: Any shape, float64 or int64 (a float32 counter stops at 2**24), on the rank's device.

    Returns:
        A new tensor of the same shape and type.
    """
    total = sums.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def agree_on(flag: bool, process: Process) -> bool:
    """Return True on every rank if `flag` is True on any. Collective.

    Whatever changes the course of the program must be agreed: a rank that stops alone leaves the
    others waiting for it.
    """
    vote = torch.tensor(int(flag))
    dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=process.control)
    return bool(vote)


def gather_objects(value: T, process: Process) -> list[T]:
    """Return every rank's `value`, in the order of ranks, on every rank. Collective."""
    values: list[Any] = [None] * process.world_size
    dist.all_gather_object(values, value, group=process.control)
    return values


def broadcast_from_main(produce: Callable[[], T], process: Process) -> T:
    """Run `produce` on rank 0 and return its result on every rank. Collective.

    An error on rank 0 is raised on every rank. Without that the others would wait for a message
    that never comes.

    Raises:
        UserError: The one that rank 0 raised.
        AnotherRankFailed: Any other error of rank 0, on the other ranks.
    """
    result: list[Any] = [None, None]
    failure: Exception | None = None
    if process.is_main:
        try:
            result[0] = produce()
        except Exception as error:  # raised again below, after the others have been told
            failure = error
            user = isinstance(error, UserError)
            result[1] = error.args if user else f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(result, src=0, group=process.control)
    value, problem = result
    if failure is not None:
        raise failure
    if isinstance(problem, tuple):
        raise UserError(*problem)
    if problem is not None:
        raise AnotherRankFailed(f"rank 0 failed: {problem}")
    return value  # type: ignore[no-any-return]


@contextmanager
def main_process_first(process: Process) -> Iterator[None]:
    """Let rank 0 run the block first, then one process per machine, then the rest. Collective.

    For downloads and caches: the first one prepares them, the others find them ready, whether the
    machines share their disks or not. If one fails, all do.

    Raises:
        AnotherRankFailed: Another process failed in its turn; that one shows the cause.
    """
    turn = 0 if process.is_main else 1 if process.local_rank == 0 else 2
    for earlier in range(turn):
        raise_if_another_failed(agree_on(False, process), earlier)
    failed = True
    try:
        yield
        failed = False
    finally:
        another_failed = agree_on(failed, process) and not failed
    for later in range(turn, 3):
        raise_if_another_failed(another_failed, later)
        if later < 2:
            another_failed = agree_on(False, process)


def raise_if_another_failed(failed: bool, turn: int) -> None:
    """Stop waiting in `main_process_first` when there is nothing to wait for."""
    if failed:
        who = ("rank 0", "the first process of a machine", "a process")[turn]
        raise AnotherRankFailed(f"{who} failed while the others waited for it; see its own error")
