"""When a process committed which step: one file a process, one write a line."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Diary:
    """Appends `time step` lines; `time` is Unix seconds."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / f"{os.getpid()}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def committed(self, step: int) -> None:
        """This process has just committed `step`."""
        os.write(self._file, f"{time.time():.6f} {step}\n".encode())


def read(folder: Path) -> list[tuple[float, int]]:
    """All processes' lines, in order of time."""
    lines = (line.split() for path in folder.glob("*.steps") for line in path.read_text().splitlines())
    return sorted((float(when), int(step)) for when, step in lines)
