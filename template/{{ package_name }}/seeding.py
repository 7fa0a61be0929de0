"""One seed for everything: the same weights everywhere, other random numbers on every rank.

Nothing here is derived from local_rank: two machines have the same local ranks.
"""

import hashlib
import os
import random
from typing import Any

import numpy as np
import torch


def mix(*parts: int | str) -> int:
    """Hash numbers and words into one seed.

    Adding them (`seed + rank`) makes rank 1 of seed 0 the same as rank 0 of seed 1; a hash does
    not.

    Returns:
        A number from 0 to 2**63 - 1, the same on every machine.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator(*parts: int | str) -> torch.Generator:
    """Return a random stream of its own, a pure function of `parts`."""
    return torch.Generator().manual_seed(mix(*parts))


def set_deterministic() -> None:
    """Ask torch for bit-identical results.

    Raises:
        RuntimeError: Later, by torch, where an operator has no deterministic form.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its start
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def capture_rng(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's random number generators, as tensors and plain values."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": [kind, torch.tensor(np.asarray(keys, np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back to what `capture_rng` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
