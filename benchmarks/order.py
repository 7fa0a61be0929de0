"""What the order of an epoch costs a rank: torch's DistributedSampler, a list, a keyed permutation.

    python benchmarks/order.py [--largest]

Each is measured in a process of its own: seconds until the first index is known, and the memory
that this adds. --largest adds 100 million samples, which takes about 5 GB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = [(10**6, 8), (10**7, 64)]
LARGEST = (10**8, 1024)
BATCH = 32


def distributed_sampler(n_samples: int, world_size: int) -> int:
    """The first index of torch's own sampler."""
    from torch.utils.data import DistributedSampler

    sampler: Any = DistributedSampler(range(n_samples), world_size, rank=1, shuffle=True)
    return int(next(iter(sampler)))


def random_list(n_samples: int, world_size: int) -> int:
    """The first index of a shuffled list of int32, of which a rank keeps its own part."""
    import torch

    own = torch.randperm(n_samples, dtype=torch.int32)[1::world_size].clone()
    return int(own[0])


def keyed_permutation(n_samples: int, world_size: int) -> int:
    """The first batch of the order that generated projects use."""
    from project.permutation import Permutation

    order = Permutation(n_samples, 0, "order", 0)
    return int(order(range(1, 1 + BATCH * world_size, world_size))[0])


WAYS: dict[str, Callable[[int, int], int]] = {
    "torch DistributedSampler": distributed_sampler,
    "shuffled list of int32, own part": random_list,
    "keyed permutation, per batch": keyed_permutation,
}


def measure(way: str, n_samples: int, world_size: int, project: str, results: Any) -> None:
    """Send seconds and added MiB of one way; the imports are not counted."""
    sys.path.insert(0, project)
    WAYS[way](10_000, 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    WAYS[way](n_samples, world_size)
    seconds = time.perf_counter() - started
    results.put((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="What the order of an epoch costs a rank.")
    parser.add_argument("--largest", action="store_true", help="100 million samples too (5 GB)")
    sizes = SIZES + ([LARGEST] if parser.parse_args().largest else [])
    sys.path.insert(0, str(ROOT))
    from ddpgen.generate import render

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        render(Path(folder) / "project", {})
        for n_samples, world_size in sizes:
            print(f"\n{n_samples:,} samples, {world_size:,} ranks")
            for way in WAYS:
                results = context.Queue()
                arguments = (way, n_samples, world_size, str(Path(folder) / "project"), results)
                process = context.Process(target=measure, args=arguments)
                process.start()
                seconds, mib = results.get()
                process.join()
                print(f"  {way:<34} {seconds:9.4f} s {mib:9.0f} MiB")


if __name__ == "__main__":
    main()
