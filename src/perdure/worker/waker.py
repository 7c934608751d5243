"""Wake a thread that waits in epoll."""

from __future__ import annotations

import os
import threading

from perdure.worker.forked import Descriptor, close_in_children


class Waker:
    """An eventfd that can be rung from any thread, also when its owner has already closed it.

    Rings after `close` do nothing: without the lock one could hit a descriptor that was used again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = close_in_children(Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)))
        self._rung = False

    def fileno(self) -> int:
        """What to register with epoll, for input."""
        return self._event.fileno()

    def wake(self) -> None:
        """Ring; one system call for any number of rings until `clear`."""
        with self._lock:
            if not self._rung and self._event.number >= 0:
                self._rung = True
                os.eventfd_write(self._event.number, 1)

    def clear(self) -> None:
        """Take the rings so far; whatever is rung from here on wakes again."""
        with self._lock:
            if self._rung:
                self._rung = False
                os.eventfd_read(self._event.number)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            self._event.close()
