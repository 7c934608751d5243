"""What workers print: kept in files of bounded size, and cut into lines for a terminal.

`worker-3.out` is the newest part of a worker's output. When it reaches a third of the bound it is renamed,
the first time to `worker-3.out.head`, later to `worker-3.out.old` in place of the one before. So the
beginning and the end are kept, on disk as soon as they are written, and only the middle is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOG_BYTES: Final = 24 * 2**20
"""Default bound of one stream of one worker, all three parts together."""

LINE_BYTES: Final = 4096
"""A longer line is cut for the terminal; the file has it whole."""

TAIL_LINES: Final = 20

_CHUNK = 65536


class BoundedLog:
    """Appends to `path` and keeps what it wrote within `limit` bytes.

    A disk that is full loses output, never the run: `lost` counts the bytes.
    """

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        self._path = path
        self._part = max(1, limit // 3)
        self._fd: int | None = None
        self._size = 0
        self.lost = 0
        with contextlib.suppress(OSError):
            self._open()

    def write(self, data: bytes) -> None:
        """Append `data`."""
        view = memoryview(data)
        try:
            while view:
                fd = self._open()
                written = os.write(fd, view[: self._part - self._size])
                self._size += written
                view = view[written:]
        except OSError:
            self.lost += len(view)

    def close(self) -> None:
        """Close the file; what was written is in it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        """The file with room for at least one byte."""
        if self._fd is not None and self._size >= self._part:
            self.close()
            head = self._path.with_name(f"{self._path.name}.head")
            self._path.replace(self._path.with_name(f"{self._path.name}.old") if head.exists() else head)
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._fd).st_size
        return self._fd


class Lines:
    """Cuts a stream of bytes into lines of text, however it is split.

    Of a line that overwrites itself with carriage returns, as progress bars do, only the last state counts.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes, without their ends."""
        *whole, rest = (self._rest + data).split(b"\n")
        last_state = rest.rfind(b"\r", 0, -1) + 1  # the last byte may be the start of \r\n
        self._rest = rest[last_state:]
        while len(self._rest) > LINE_BYTES:
            whole.append(self._rest[:LINE_BYTES])
            self._rest = self._rest[LINE_BYTES:]
        return self._texts(whole)

    def last(self) -> str:
        """The last lines, and the unfinished one."""
        rest = _last_state(self._rest).decode("utf-8", "replace")
        return "\n".join([*self.tail, rest] if rest else self.tail)

    def end(self) -> list[str]:
        """The last line, if the stream ended without an end of line."""
        rest, self._rest = self._rest, b""
        return self._texts([rest]) if rest else []

    def _texts(self, lines: list[bytes]) -> list[str]:
        texts = [_last_state(line)[:LINE_BYTES].decode("utf-8", "replace") for line in lines]
        self.tail.extend(texts)
        return texts


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Stream:
    """A pipe that a worker prints to, read into a log and shown line by line."""

    def __init__(self, fd: int, log: BoundedLog, show: Callable[[str], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._log = log
        self._show = show
        self._lines = Lines()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._on_readable)
        self.ended = asyncio.Event()

    @property
    def tail(self) -> str:
        """The last lines."""
        return self._lines.last()

    def note(self, line: str) -> None:
        """Add a line of the agent's own."""
        self._lines.tail.append(line)
        self._show(line)

    def drain(self) -> None:
        """Take what is in the pipe now; what another process may still write is read as it comes."""
        left = 0 if self.ended.is_set() else fcntl.fcntl(self._fd, fcntl.F_GETPIPE_SZ)
        while left > 0 and (taken := self._take()):
            left -= taken

    def close(self) -> None:
        """Stop reading, whoever still writes."""
        if self.ended.is_set():
            return
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._log.close()
        self.ended.set()
        for line in self._lines.end():
            self._show(line)

    def _on_readable(self) -> None:
        self._take()

    def _take(self) -> int:
        """Bytes read: 0 when there are none now, and none ever if the pipe ended."""
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        self._log.write(data)
        for line in self._lines.feed(data):
            self._show(line)
        return len(data)
