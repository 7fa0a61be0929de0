"""A random order of any length, computed where it is needed instead of kept as a list.

A list of 100 million indices costs seconds and gigabytes on every rank, at every epoch. A keyed
permutation costs nothing to make and gives any position of the order in constant time, so that a
run can go on in mid-epoch, or with another number of processes, by arithmetic alone.

The method: a Feistel network permutes the numbers of an even number of bits, whatever its round
function is; results beyond the length are permuted again until they fall inside (cycle walking).
Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002. Short orders are sorted by
random keys instead: a network of few bits prefers some orders to others.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .seeding import mix

Numbers = npt.NDArray[np.uint64]

ROUNDS = 8
SHORT = 4096


class Permutation:
    """A permutation of 0 to length - 1: a pure function of length and key, on every platform."""

    def __init__(self, length: int, *key: int | str) -> None:
        """Make the permutation; takes next to no memory and time, however long it is.

        Args:
            length: Numbers to permute.
            *key: What the order is a function of, for example seed and epoch.
        """
        self.length = length
        self.keys = [np.uint64(mix(*key, "round", number)) for number in range(ROUNDS)]
        # Half of the bits that the largest number needs, rounded up.
        self.half = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
        self.table = self.sort_by_random_keys() if length <= SHORT else None

    def __call__(self, positions: Sequence[int] | Numbers) -> Numbers:
        """Return what stands at these positions of the order: uint64 [positions].

        Args:
            positions: Numbers from 0 to length - 1.
        """
        values = np.array(positions, dtype=np.uint64)
        if self.table is not None:
            return self.table[values]
        values = self.encrypt(values)
        while (outside := values >= self.length).any():
            values[outside] = self.encrypt(values[outside])
        return values

    def sort_by_random_keys(self) -> Numbers:
        """Return a whole order: uint64 [length]."""
        keys = scramble(np.arange(self.length).astype(np.uint64) ^ self.keys[0])
        return np.argsort(scramble(keys + self.keys[1]), kind="stable").astype(np.uint64)

    def encrypt(self, values: Numbers) -> Numbers:
        """Permute all numbers of 2 x half bits."""
        mask = (np.uint64(1) << self.half) - np.uint64(1)
        left, right = values >> self.half, values & mask
        for key in self.keys:
            left, right = right, left ^ (scramble(right + key) & mask)
        permuted: Numbers = left << self.half | right
        return permuted


def scramble(values: Numbers) -> Numbers:
    """Return numbers whose every bit depends on every bit of the input. Overflow wraps."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    scrambled: Numbers = values ^ values >> np.uint64(31)
    return scrambled
