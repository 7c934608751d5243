"""The agent's end of a worker's lifeline: learns that the worker is ending before the kernel is done with it.

The worker holds a lock in shared memory as long as it lives. At its end the kernel gives the lock back first
(pthread_mutexattr_setrobust(3)), then takes its memory apart, and only then says so by the pidfd: with
hundreds of MB, on a busy machine, 0.1 s later, with hundreds of GB many seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import threading
from collections.abc import Callable
from typing import Final

from perdure.schema.progress import LIFELINE_BYTES, PAGE_BYTES

_SHARED: Final = 1  # PTHREAD_PROCESS_SHARED
_ROBUST: Final = 1  # PTHREAD_MUTEX_ROBUST

_libc = ctypes.CDLL(None)


class Lifeline:
    """Makes the lock in the second page of the memory that `fd` names; there must be one per worker.

    `watch` once the worker is known to hold it. `on_ending` is called on a thread of this object.
    """

    def __init__(self, fd: int, on_ending: Callable[[], None]) -> None:
        self._page = mmap.mmap(fd, LIFELINE_BYTES, offset=PAGE_BYTES)
        self._lock = (ctypes.c_char * LIFELINE_BYTES).from_buffer(self._page)
        attributes = ctypes.create_string_buffer(64)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _SHARED)
        _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
        _libc.pthread_mutex_init(self._lock, attributes)
        _libc.pthread_mutexattr_destroy(attributes)
        self._on_ending = on_ending
        self._thread = threading.Thread(target=self._wait, name="perdure-lifeline", daemon=True)

    def watch(self) -> None:
        """Wait for the worker's end from now on."""
        self._thread.start()

    def _wait(self) -> None:
        if _libc.pthread_mutex_lock(self._lock) == errno.EOWNERDEAD:
            self._on_ending()

    def close(self, wait_s: float) -> None:
        """Let go of the memory, once the worker is dead. Blocks for at most `wait_s`."""
        if self._thread.ident is not None:
            self._thread.join(wait_s)
            if self._thread.is_alive():
                return  # it still looks at that memory
        del self._lock
        with contextlib.suppress(BufferError):
            self._page.close()
