"""A `perdure run` seen from outside: its process, the files that it writes, its workers' progress pages.

A page is found under /proc, so that whoever may see a worker sees what it does to the millisecond; it stays
readable after the worker's death, and then tells what the worker was doing when it died.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from perdure.cli.ps import ask
from perdure.schema import progress
from perdure.schema.errors import UsageError
from perdure.schema.messages import PsRow

STOP_S = 15.0
"""A run that is told to end has this long."""


class Tail:
    """The whole lines that a growing JSON-lines file has got since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[dict[str, Any]]:
        """New lines; none while the file is not there. A line that is not whole comes another time."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return [msgspec.json.decode(line) for line in whole.splitlines()]


class Page:
    """One worker's progress page."""

    def __init__(self, pid: int) -> None:
        """Raises OSError when there is no such process, or no page in it."""
        fd = _find(pid)
        try:
            self._map = mmap.mmap(fd, progress.PAGE_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(fd)  # the map has a descriptor of its own

    def read(self) -> progress.Snapshot | None:
        """What the worker does, or did last."""
        with memoryview(self._map) as view:
            return progress.read(view)

    def close(self) -> None:
        """Let go of the memory."""
        self._map.close()


def _find(pid: int) -> int:
    folder = Path(f"/proc/{pid}/fd")
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if "memfd:perdure-progress" in os.readlink(folder / name):
                return os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
    raise FileNotFoundError(f"process {pid} has no progress page")


class Spectator:
    """Starts a run and watches it; leaving the `with` ends it."""

    def __init__(self, run_dir: Path, options: Sequence[str], script: Sequence[str]) -> None:
        self.run_dir = run_dir
        self.events = Tail(run_dir / "events.jsonl")
        self.metrics = Tail(run_dir / "metrics.jsonl")
        self._command = [sys.executable, "-m", "perdure.cli.main", "run", "--run-dir", str(run_dir)]
        self._command += [*options, *script]
        self._process: subprocess.Popen[bytes] | None = None
        self._pages: dict[int, Page] = {}

    @property
    def output(self) -> Path:
        """What the run and its workers print."""
        return self.run_dir / "output.txt"

    def __enter__(self) -> Self:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with open(self.output, "wb") as file:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for page in self._pages.values():
            page.close()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its workers die with it (G6)
                self._process.wait()

    def ended(self) -> int | None:
        """The run's exit code, once it has one."""
        assert self._process is not None, "entered first"
        return self._process.poll()

    def rows(self) -> tuple[PsRow, ...]:
        """What `perdure ps` shows; nothing before the run answers and after its end."""
        try:
            return ask(self.run_dir)
        except UsageError:
            return ()

    def doing(self, pid: int) -> progress.Snapshot | None:
        """What a worker does now, or did when it died; None if its page was never seen."""
        page = self._pages.get(pid)
        if page is None:
            try:
                page = self._pages[pid] = Page(pid)
            except OSError:
                return None
        return page.read()


def last_lines(path: Path, count: int) -> str:
    """The end of a text file."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def digests(run_dir: Path) -> Mapping[int, str]:
    """step → digest of the state after it, from metrics.jsonl."""
    return {line["step"]: line["digest"] for line in Tail(run_dir / "metrics.jsonl").read()}
