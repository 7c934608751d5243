"""The worker's end of its lifeline: a lock in shared memory that a thread holds until the process ends.

When a process ends, the kernel gives such a lock back before it takes the memory apart, which for a large
process takes from tens of milliseconds to seconds; only then would a pidfd tell (`perdure.agent.lifeline`).
"""

from __future__ import annotations

import ctypes
import mmap
import os

from perdure.schema.progress import LIFELINE_BYTES, PAGE_BYTES


class Lifeline:
    """The lock in the second page of the memory that `fd` names; the agent has made it."""

    def __init__(self, fd: int) -> None:
        # Without a Python object that could let go of it before the process ends.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        at = libc.mmap(None, LIFELINE_BYTES, protection, kind, fd, PAGE_BYTES)
        if at in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}")
        self._at = ctypes.c_void_p(at)
        self._try_lock = libc.pthread_mutex_trylock

    def hold(self) -> bool:
        """Take the lock for the calling thread, which must be one that lives as long as the process."""
        return bool(self._try_lock(self._at) == 0)
