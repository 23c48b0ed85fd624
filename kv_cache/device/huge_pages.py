"""Allocate a CPU's memory in huge pages, where the system has them.

The processor keeps the addresses of only a few pages, and looks up that of each further one. With pages of
4 KiB this slows whatever a step reads in small or scattered pieces, such as a cache's pages and the panels of
weights. The system gives huge pages to a process that asks for them (`madvise`), which torch's allocator does
not do.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 64 * 2**20  # bytes that an arena maps at a time; the system gives them as they are written
LINE = 64  # bytes at which each tensor of an arena begins


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return one or more zeros, whose memory the system gives as they are written, in huge pages if it can.

    torch.zeros writes them all, which takes 0.4 s for each GiB. Raises RuntimeError where there is no memory,
    as torch does.
    """
    return torch.frombuffer(_mapped(math.prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)


class HugeArena:
    """Tensors that lie behind one another in huge pages, though each is smaller than one.

    The memory of a chunk is given back once none of its tensors is left.
    """

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._mapped: mmap.mmap | None = None
        self._used = 0
        self._lock = threading.Lock()

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor [count]. Raises RuntimeError where there is no memory."""
        num_bytes = count * dtype.itemsize
        if not num_bytes:
            return torch.empty(0, dtype=dtype)
        if num_bytes >= self._chunk // 4:  # so that at most a quarter of a chunk is left unused
            return huge_zeros((count,), dtype)
        with self._lock:
            if self._mapped is None or self._used + num_bytes > self._chunk:
                self._mapped, self._used = _mapped(self._chunk), 0
            mapped, begin = self._mapped, self._used
            self._used += -(-num_bytes // LINE) * LINE
        # The storage holds the mapping
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=begin)


def _mapped(num_bytes: int) -> mmap.mmap:
    try:
        mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"{num_bytes:,} bytes of memory cannot be mapped: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a constant of Linux
        with contextlib.suppress(OSError):  # the kernel may have been built without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped
