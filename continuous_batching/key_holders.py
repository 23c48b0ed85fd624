"""Which replicas have the keys of which pages, or of which parts of texts?"""

from __future__ import annotations

from collections.abc import Iterable


class KeyHolders:
    """Which replicas have which keys: of each key, one bit a replica."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._masks)

    def __contains__(self, key: int) -> bool:
        return key in self._masks

    def mask(self, key: int) -> int:
        """The replicas that have it, as bits."""
        return self._masks.get(key, 0)

    def add(self, replica: int, keys: Iterable[int]) -> None:
        """A replica has these keys."""
        bit, masks = 1 << replica, self._masks
        for key in keys:
            masks[key] = masks.get(key, 0) | bit

    def discard(self, replica: int, keys: Iterable[int]) -> None:
        """A replica has none of these keys."""
        bit, masks = 1 << replica, self._masks
        for key in keys:
            left = masks.get(key, 0) & ~bit
            if left:
                masks[key] = left
            else:
                masks.pop(key, None)

    def clear(self, replica: int) -> None:
        """A replica has no key at all."""
        bit = 1 << replica
        self.discard(replica, [key for key, mask in self._masks.items() if mask & bit])
