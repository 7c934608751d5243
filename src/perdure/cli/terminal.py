"""What a person at the terminal sees: workers' lines with a prefix, and one live line of progress."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections import deque
from pathlib import Path
from typing import TextIO

from perdure.core.job import Job
from perdure.schema.plan import Record

REDRAW_S = 0.2
"""The line of progress is not drawn more often; agents count samples as often."""


def shown(path: Path) -> str:
    """A path as a person would type it: relative below the working directory, else absolute."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


class Terminal:
    """Prints lines whole; on a terminal keeps a line of progress below them.

    Nobody has to read them: when a pipe is closed or a terminal is gone the run goes on without.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._line = ""
        self._drawn_at = 0.0
        self._failures = 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=20)

    def show(self, line: str, is_error: bool = False) -> None:
        """One line of a worker (or of perdure itself)."""
        self._clear()
        self._write(sys.stderr if is_error else sys.stdout, f"{line}\n")
        self._draw()

    def say(self, text: str) -> None:
        """One line of perdure itself."""
        self.show(f"perdure: {text}", True)

    def record(self, record: Record, job: Job) -> None:
        """A step was committed: redraw the line of progress."""
        if not self._live:
            return
        now = time.monotonic()
        samples = sum(w.progress.samples for w in job.staff.workers.values() if w.progress is not None)
        if not self._recent or now - self._recent[-1][0] >= REDRAW_S:  # quick steps come between two counts
            self._recent.append((now, samples))
        until = job.membership.shape.until if job.membership.shape is not None else 0
        rate = self._rate()
        failures = job.failures.count
        self._line = (
            f"step {record.step + 1}/{until}  loss {record.loss:.4f}  workers {record.workers}"
            f"{f'  {rate:.0f} samples/s' if rate > 0 else ''}  failures {failures}"
        )
        if now - self._drawn_at >= REDRAW_S:
            self._clear()
            self._draw()

    def close(self) -> None:
        """Leave a clean line behind, and nothing at which python's own end would fail."""
        self._clear()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                _silence(stream)

    def _rate(self) -> float:
        (start, before), (end, after) = self._recent[0], self._recent[-1]
        return (after - before) / (end - start) if end > start else 0.0

    def _clear(self) -> None:
        if self._live and self._line:
            self._write(sys.stderr, "\r\x1b[K")

    def _draw(self) -> None:
        if self._live and self._line:
            self._drawn_at = time.monotonic()
            width = shutil.get_terminal_size().columns
            self._write(sys.stderr, self._line[: width - 1])

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # for good; a full disk may have room again
                _silence(stream)


def _silence(stream: TextIO) -> None:
    """Send what is written from now on, and what is left from before, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
