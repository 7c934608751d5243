"""The live state on huge pages, in place: the same addresses, the same bytes, fewer pages to look up.

The state is read from end to end after every step (the optimizer, the digest), and by joiners. In pages of
4 KB, of which a virtual machine looks each up in two tables, that takes up to three times as long. The
state's tensors are the script's own and stay where they are; the kernel moves what lies there (Linux 6.1,
MADV_COLLAPSE). Where it will not, nothing changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

import torch

BLOCK: Final = 2 << 20
SHARE: Final = 0.03
"""At most this share of the time goes into it, so that a large state is moved over many steps."""

SWITCH: Final = "PERDURE_HUGE_PAGES"

_MADV_COLLAPSE: Final = 25


def collapse(block: int) -> bool:
    """Ask the kernel to put the block at this address on a huge page; false if it will not."""
    return _madvise(block, BLOCK, _MADV_COLLAPSE) == 0


def blocks(memory: Iterable[tuple[int, int]]) -> list[int]:
    """The addresses of blocks at least half of which is in these ranges (address, bytes)."""
    filled: defaultdict[int, int] = defaultdict(int)
    for start, nbytes in memory:
        stop = start + nbytes
        for block in range(start // BLOCK * BLOCK, stop, BLOCK):
            filled[block] += min(stop, block + BLOCK) - max(start, block)
    return sorted(block for block, nbytes in filled.items() if nbytes >= BLOCK // 2)


def room(nbytes: int) -> torch.Tensor:
    """New host memory, flat uint8, on huge pages where there are such; they come with the first touch."""
    memory = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if wanted():
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def wanted() -> bool:
    """Whether the user has not said PERDURE_HUGE_PAGES=0."""
    return os.environ.get(SWITCH) != "0"


class HugePages:
    """What was moved, and what is still to be.

    With PERDURE_HUGE_PAGES=0 in the environment all stays as it is.
    """

    def __init__(
        self,
        move: Callable[[int], bool] = collapse,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._move = move
        self._clock = clock
        self._wanted = wanted()
        self._seen: frozenset[tuple[int, int]] = frozenset()
        self._tried: set[int] = set()
        self._todo: list[int] = []
        self._last = clock()

    def advance(self, memory: Iterable[tuple[int, int]]) -> None:
        """Move a few blocks of this memory, given as (address, bytes), in proportion to the time gone by."""
        if not self._wanted:
            return
        now = self._clock()
        stop, self._last = now + SHARE * (now - self._last), now
        seen = frozenset(memory)
        if seen != self._seen:
            self._seen = seen
            every = blocks(seen)
            self._tried &= set(every)
            self._todo = [block for block in reversed(every) if block not in self._tried]
        while self._todo:
            block = self._todo.pop()
            self._tried.add(block)
            self._move(block)
            if self._clock() >= stop:
                return


def _libc() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    call: Callable[[int, int, int], int] = function
    return call


_madvise = _libc()
