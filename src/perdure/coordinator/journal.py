"""A file of lines that outlasts a full disk: what cannot be written now is kept and written in its turn."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec


class Journal:
    """Appends objects to `path`, one a line, handed to the kernel as soon as it takes them.

    A line may be cut where the disk was full; its rest is the next that is written. `lacks` counts the bytes
    that are still to be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._pending = bytearray()

    @property
    def lacks(self) -> int:
        """Bytes that could not be written yet."""
        return len(self._pending)

    def add(self, *lines: Mapping[str, Any]) -> None:
        """Put lines behind those that wait; `write` brings them to the file."""
        for line in lines:
            self._pending += msgspec.json.encode(line) + b"\n"

    def write(self) -> None:
        """Write what waits. Raises OSError if some of it has to wait on."""
        if self._fd is None:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        while self._pending:
            del self._pending[: os.write(self._fd, self._pending)]

    def close(self) -> None:
        """Close the file; what could not be written is lost. Idempotent."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self.write()
            os.close(self._fd)
            self._fd = None
