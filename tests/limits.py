"""Bounds that the kernel puts on a process for a test."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_longer_than(size: int, pid: int = 0) -> Iterator[None]:
    """A write beyond `size` bytes fails, as on a full disk (Python ignores the signal); `pid` 0: in here."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
