"""The agent's end of the zygote: starts it, starts another when it ends, asks it for workers (P19)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from perdure.agent.procfs import MARK, SCRATCH, scratch
from perdure.schema.errors import PerdureError, ZygoteGoneError
from perdure.schema.messages import Fork, Forked, ForkFailed, ZygoteMessage
from perdure.schema.wire import FrameReader, encode

START_S_MAX: Final = 300.0
"""Importing torch may take this long, from a cold network disk."""

FORK_S_MAX: Final = 60.0
REQUEST_BYTES_MAX: Final = 128 * 1024
"""What an idle zygote's socket takes at once, whatever the system's settings."""

STARTS_MAX: Final = 3
"""So many zygotes in a row that end before they are ready mean that none ever will be."""

_PROGRAM = (
    # -c puts the working directory in front of sys.path: a user's types.py there is not the library's.
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "from perdure.worker.zygote import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)


class _Live:
    """One zygote process and the one question that it may be answering."""

    def __init__(self, mark: str, log: Path) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs, log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, MARK: mark, SCRATCH: str(scratch(mark))},
            )
        self._pidfd = os.pidfd_open(self.process.pid)
        self._reader: FrameReader[ZygoteMessage] = FrameReader(ZygoteMessage)
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[ZygoteMessage] = self._loop.create_future()
        self._loop.add_reader(self._socket, self._on_readable)

    async def ready(self) -> None:
        await self._answered(START_S_MAX)

    async def fork(self, request: Fork, descriptors: Sequence[int]) -> int:
        data = encode(request)
        if len(data) > REQUEST_BYTES_MAX:
            raise OSError(f"arguments and environment of {len(data)} bytes; {REQUEST_BYTES_MAX} are the most")
        self._answer = self._loop.create_future()
        try:
            socket.send_fds(self._socket, [data], list(descriptors))
        except OSError as error:
            raise ZygoteGoneError(f"the zygote ended: {error.strerror}") from error
        answer = await self._answered(FORK_S_MAX)
        if isinstance(answer, ForkFailed):
            raise OSError(answer.reason)
        if not isinstance(answer, Forked) or answer.worker != request.worker:
            raise ZygoteGoneError(f"the zygote answered another question: {answer}")
        return answer.pid

    async def ended(self) -> None:
        await readable(self._pidfd)

    def close(self) -> None:
        """End it and reap it; safe to call at any moment."""
        self._gone()
        self._socket.close()
        self.process.kill()
        self.process.wait()
        os.close(self._pidfd)

    async def _answered(self, timeout_s: float) -> ZygoteMessage:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer
        except TimeoutError:
            raise ZygoteGoneError(f"the zygote said nothing for {timeout_s:.0f} s") from None

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._gone()
        for message in self._reader.feed(data):
            if not self._answer.done():
                self._answer.set_result(message)

    def _gone(self) -> None:
        self._loop.remove_reader(self._socket)
        if not self._answer.done():
            self._answer.set_exception(ZygoteGoneError("the zygote ended"))
            self._answer.exception()  # whoever waits is told; if nobody does, that is no error


class Zygote:
    """A zygote at any time: `run` keeps one alive, `fork` waits for one that is ready.

    `mark` goes into its environment, `log` takes what it prints, `show` gets a line when one had to be
    replaced.
    """

    def __init__(self, mark: str, log: Path, show: Callable[[str], None]) -> None:
        self._mark = mark
        self._log = log
        self._show = show
        self._live: _Live | None = None
        self._ready = asyncio.Event()
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process that forks now; None between two."""
        return self._live.process.pid if self._live else None

    async def run(self) -> None:
        """Keep one zygote alive until cancelled. Raises PerdureError when none gets ready."""
        failures = 0
        while True:
            live = self._live = _Live(self._mark, self._log)
            try:
                await live.ready()
                failures = 0
                self._ready.set()
                await live.ended()
                self._show("the process that forks workers ended; workers live on, another one is started")
            except ZygoteGoneError as error:
                failures += 1
                if failures == STARTS_MAX:
                    raise PerdureError(
                        f"workers cannot be started: {error}, {failures} times; see {self._log}"
                    ) from error
            finally:
                self._ready.clear()
                self._live = None
                live.close()

    async def fork(self, request: Fork, descriptors: Sequence[int]) -> int:
        """The pid of a new worker, a child of this process.

        Raises ZygoteGoneError when the zygote ended meanwhile, OSError when the system refuses a process.
        """
        async with self._turn:
            await self._ready.wait()
            live = self._live
            if live is None:
                raise ZygoteGoneError("the zygote ended")
            try:
                return await live.fork(request, descriptors)
            except ZygoteGoneError:
                self._ready.clear()
                with contextlib.suppress(ProcessLookupError):
                    live.process.kill()  # it may have stopped answering without having ended
                raise


async def readable(fd: int) -> None:
    """Wait until `fd` can be read; a pidfd can when its process has ended."""
    loop = asyncio.get_running_loop()
    seen = asyncio.Event()
    loop.add_reader(fd, seen.set)
    try:
        await seen.wait()
    finally:
        loop.remove_reader(fd)
