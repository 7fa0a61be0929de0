"""What every rank runs on, and whether the ranks can talk to each other.

    torchrun --nproc-per-node=2 -m PACKAGE.probe

Prints the environment of the ranks, what differs between them, and how fast an all-reduce is.
"""

import argparse
import os
import platform
import shutil
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from .config import available_cores
from .distributed import Process, gather_objects, process_group
from .failures import run_and_exit

# Facts that are expected to be different on every rank.
INDIVIDUAL = ("host", "rank", "local_rank", "device", "device_name", "free_shm_gib")


def describe_process(process: Process) -> dict[str, Any]:
    """Return the facts about this rank that explain most failures."""
    on_gpu = process.device.type == "cuda"
    properties = torch.cuda.get_device_properties(process.device) if on_gpu else None
    cpu_name = platform.processor() or platform.machine()
    return {
        "rank": process.rank,
        "local_rank": process.local_rank,
        "host": socket.gethostname(),
        "device": str(process.device),
        "device_name": properties.name if properties else cpu_name,
        "device_memory_gib": round(properties.total_memory / 2**30, 1) if properties else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "backend": dist.get_backend(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "free_shm_gib": free_gib("/dev/shm"),
        "network": {
            name: os.environ.get(name)
            for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")
        },
    }


def free_gib(path: str) -> float | None:
    """Return the free space at `path` in GiB, or None where there is no such folder."""
    return round(shutil.disk_usage(path).free / 2**30, 1) if os.path.isdir(path) else None


def gather_environment(process: Process) -> list[dict[str, Any]]:
    """Return `describe_process` of every rank, on every rank. Collective."""
    return gather_objects(describe_process(process), process)


def differences(environment: list[dict[str, Any]]) -> list[str]:
    """Return a line for each fact that should be the same on all ranks and is not."""
    lines = []
    for name in environment[0]:
        ranks_with: dict[str, list[int]] = {}
        for facts in environment:
            ranks_with.setdefault(str(facts[name]), []).append(facts["rank"])
        if name not in INDIVIDUAL and len(ranks_with) > 1:
            values = [f"{value} on rank {short(ranks)}" for value, ranks in ranks_with.items()]
            lines.append(f"{name} is not the same everywhere: {'; '.join(values)}")
    return lines


def short(ranks: list[int]) -> str:
    """Return a list of ranks, cut after four."""
    return ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")


def check_communication(process: Process) -> None:
    """Add up the ranks' numbers and compare with what must come out. Collective.

    Raises:
        RuntimeError: The sum is wrong.
    """
    number = torch.tensor(float(process.rank + 1), device=process.device)
    dist.all_reduce(number)
    expected = process.world_size * (process.world_size + 1) / 2
    if number.item() != expected:
        raise RuntimeError(f"rank {process.rank}: all-reduce gave {number.item()}, not {expected}")


def measure_all_reduce(process: Process, mib: float, repeats: int = 5) -> float:
    """Return the bus bandwidth of an all-reduce in GiB/s, best of `repeats`. Collective.

    Bus bandwidth is bytes x 2 (n - 1) / n / time: what each rank must send, whatever the algorithm.
    """
    data = torch.zeros(int(mib * 2**20 / 4), device=process.device)
    best = float("inf")
    for _ in range(repeats + 1):
        dist.barrier(group=process.control)
        started = time.perf_counter()
        dist.all_reduce(data)
        if process.device.type == "cuda":
            torch.cuda.synchronize(process.device)
        best = min(best, time.perf_counter() - started)
    n = process.world_size
    return mib / 1024 * 2 * (n - 1) / n / best


def report(process: Process, environment: list[dict[str, Any]]) -> None:
    """Print what was found; rank 0 only prints, all measure. Collective."""
    say = print if process.is_main else lambda *_: None
    for facts in environment:
        say(
            f"rank {facts['rank']:>4}  {facts['host']}  {facts['device']} ({facts['device_name']})",
            f" torch {facts['torch']}  {facts['backend']}  {facts['cores']} cores,",
            f"{facts['threads']} threads, /dev/shm {facts['free_shm_gib']} GiB free",
        )
    for line in differences(environment):
        say(line)
    if not differences(environment):
        say("the same everywhere: versions, backend, cores, network")
    check_communication(process)
    say(f"all-reduce over {process.world_size} processes: the sum is right")
    for mib in (0.25, 4, 64) if process.world_size > 1 else ():
        speed = measure_all_reduce(process, mib)
        say(f"all-reduce of {mib:>5} MiB: {speed:.2f} GiB/s bus bandwidth")


def main() -> None:
    """Probe the job that this process belongs to."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.probe",
        description="Show what every rank runs on and whether the ranks can talk to each other.",
    )
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--timeout_s", type=float, default=60.0, help="seconds to wait")
    arguments = parser.parse_args(sys.argv[1:])
    with process_group(arguments.device, arguments.timeout_s) as process:
        report(process, gather_environment(process))


if __name__ == "__main__":
    run_and_exit(main)
