"""Record which replicas hold which keys, as bit masks.

A key names a page of the KV cache, or a part of a text where only texts are known. The router looks up how
long a prefix of a request each replica holds; this module does not decide where the request goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
_FEW = 8


class KeyHolders:
    """The replicas that hold each key, as one bit for each replica."""

    def __init__(self) -> None:
        # Replicas that hold the key, as bits; a key that no replica holds has no entry
        self.masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.masks)

    def __contains__(self, key: int) -> bool:
        return key in self.masks

    def add(self, replica: int, keys: Iterable[int]) -> int:
        """Add keys to a replica; return how many of them are new to it."""
        bit, masks, num_new = 1 << replica, self.masks, 0
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & bit:
                masks[key] = mask | bit
                num_new += 1
        return num_new

    def discard(self, replica: int, keys: Iterable[int]) -> int:
        """Remove keys from a replica; return how many of them it had."""
        bit, masks, num_gone = 1 << replica, self.masks, 0
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bit:
                num_gone += 1
                if mask == bit:
                    del masks[key]
                else:
                    masks[key] = mask ^ bit
        return num_gone

    def clear(self, replica: int) -> None:
        """Remove all keys of a replica."""
        bit = 1 << replica
        self.discard(replica, [key for key, mask in self.masks.items() if mask & bit])


def num_first(
    keys: Sequence[int], count: int, held: KeyHolders, supposed: KeyHolders
) -> tuple[Counts | None, int]:
    """Return how many leading keys each of `count` replicas holds, and the runner-up's number.

    A key counts if it is in `held` or in `supposed`; there must be no gap. The counts are None if no replica
    holds the first key. The second value is the largest number of leading keys that at least two replicas
    hold.
    """
    one, other = held.masks.get, supposed.masks.get
    there = one(keys[0], 0) | other(keys[0], 0) if len(keys) else 0
    if not there:
        return None, 0
    found, second = np.zeros(count, dtype=np.int64), 0
    for number, key in enumerate(keys):
        still = there & (one(key, 0) | other(key, 0))
        if still != there:
            _put(found, there ^ still, number)
            second = number if there & (there - 1) else second
            there = still
            if not there:
                return found, second
    _put(found, there, len(keys))
    return found, len(keys) if there & (there - 1) else second


def _put(counts: Counts, mask: int, value: int) -> None:
    """Set the count of each replica whose bit is set in `mask`."""
    if mask.bit_count() <= _FEW:  # a loop is faster for few replicas
        while mask:
            number = mask.bit_length() - 1
            counts[number] = value
            mask ^= 1 << number
        return
    bits = np.frombuffer(mask.to_bytes(-(-len(counts) // 8), "little"), dtype=np.uint8)
    counts[np.unpackbits(bits, count=len(counts), bitorder="little").astype(np.bool_)] = value
