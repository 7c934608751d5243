"""Keep a worker's connections out of the processes that the user's code forks (DataLoader workers).

A child that inherits a socket keeps the connection open after the worker's death, and its peers would
wait for a worker that is gone. `exec` closes them (they are close-on-exec); a plain fork needs this.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol, TypeVar


class _Closable(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Closable)

_guarded: weakref.WeakSet[_Closable] = weakref.WeakSet()


class Descriptor:
    """A bare file descriptor that knows how to close itself, once."""

    def __init__(self, number: int) -> None:
        self.number = number

    def fileno(self) -> int:
        """The descriptor; −1 once closed."""
        return self.number

    def close(self) -> None:
        """Close it; a second call does nothing."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)


def close_in_children(resource: _T) -> _T:
    """Close `resource` in every process forked from now on, as long as somebody keeps it; returns it."""
    _guarded.add(resource)
    return resource


def _after_fork() -> None:
    for resource in list(_guarded):
        with contextlib.suppress(OSError):
            resource.close()
    _guarded.clear()


os.register_at_fork(after_in_child=_after_fork)
