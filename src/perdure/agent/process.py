"""One worker as its agent sees it: what it says and prints, and how it ends.

That it is ending is told as soon as its lifeline shows it (`lifeline`), what it said before that first.
The order at its death (P19), all in the callback of its pidfd:

1. its process group is killed: DataLoader workers go with it
2. its control socket is read to the end, then stdout and stderr as far as they hold anything; all that
   the worker itself wrote is there, as it is dead
3. the exit is told
4. in the background the rest of its session is killed, and only then the worker is reaped, so that its
   number cannot become anybody else's before
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from perdure.agent import procfs
from perdure.agent.control import Control
from perdure.agent.lifeline import Lifeline
from perdure.agent.logs import BoundedLog, Stream
from perdure.schema import progress
from perdure.schema.ids import WorkerId
from perdure.schema.messages import Joined, Ready, WorkerMessage
from perdure.schema.wire import Decoder, frame

LINGER_S: Final = 1.0
"""How long something that outlived the worker's session may hold its stdout open."""

Show = Callable[[str, bool], None]
"""Takes one line of a worker's output; True: of its stderr."""


class Exited(NamedTuple):
    """How a worker ended; `noticed_s` is CLOCK_MONOTONIC at the kernel's notice."""

    exit_code: int | None
    signum: int | None
    noticed_s: float


class Watcher(Protocol):
    """Who is told what a worker does."""

    def worker_said(self, process: WorkerProcess, body: bytes) -> None:
        """One whole message of the worker, valid and undecoded."""

    def worker_ending(self, process: WorkerProcess) -> None:
        """The worker is about to be dead: the kernel has begun to take it apart."""

    def worker_exited(self, process: WorkerProcess, exited: Exited) -> None:
        """The worker is dead and everything that it said has been told."""


class Ends:
    """Both ends of a worker's four descriptors, before it exists."""

    def __init__(self) -> None:
        self.control, self._their_control = socket.socketpair()
        self.page = os.memfd_create("perdure-progress", os.MFD_CLOEXEC)
        os.ftruncate(self.page, progress.PAGE_BYTES + progress.LIFELINE_BYTES)
        self.out, self._their_out = os.pipe()
        self.err, self._their_err = os.pipe()

    def theirs(self) -> tuple[int, int, int, int]:
        """What `Fork` carries, in its order."""
        return self._their_control.fileno(), self.page, self._their_out, self._their_err

    def close_theirs(self) -> None:
        """The worker has them now."""
        self._their_control.close()
        os.close(self._their_out)
        os.close(self._their_err)

    def close(self) -> None:
        """Nobody was forked: close all."""
        self.close_theirs()
        self.control.close()
        for fd in (self.page, self.out, self.err):
            os.close(fd)


class WorkerProcess:
    """A worker from its first byte to its last; `watcher` is told, `gone` is done when nothing is left.

    `pid` is a child of this process that waits for a byte on its control socket, until `go`.
    """

    def __init__(
        self, worker: WorkerId, pid: int, ends: Ends, logs: Path, watcher: Watcher, show: Show
    ) -> None:
        self.worker = worker
        self.pid = pid
        self.joined = False
        self.ready: Ready | None = None
        self.alive = True
        self._watcher = watcher
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._page = mmap.mmap(ends.page, progress.PAGE_BYTES, prot=mmap.PROT_READ)
        self._lifeline = Lifeline(ends.page, self._on_thread(self._on_ending))
        os.close(ends.page)
        self._out = Stream(
            ends.out, BoundedLog(logs / f"worker-{worker}.out"), lambda line: show(line, False)
        )
        self._err = Stream(ends.err, BoundedLog(logs / f"worker-{worker}.err"), lambda line: show(line, True))
        self._control = Control(ends.control, self._on_body, self._on_broken)
        self._loop.add_reader(self._pidfd, self._on_death)
        self._burial: asyncio.Task[None] | None = None
        self.gone: asyncio.Future[None] = self._loop.create_future()

    @property
    def tail(self) -> str:
        """The last lines of its stderr."""
        return self._err.tail

    def go(self) -> None:
        """Let it run its script."""
        self._control.write(b"\0")

    def progress(self) -> progress.Snapshot | None:
        """What its main thread does; None if that could not be read now."""
        with memoryview(self._page) as page:
            return progress.read(page)

    def send(self, body: bytes | memoryview) -> None:
        """Pass on one message. A worker that has stopped reading is killed when too much waits."""
        if self.alive:
            self._control.write(frame(bytes(body)))

    def signal(self, signum: int) -> None:
        """Send a signal; nothing happens if it is dead."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def _on_body(self, body: bytes) -> None:
        message = _DECODER.decode(body)
        if isinstance(message, Joined):
            self.joined = True
            if message.lifeline:
                self._lifeline.watch()
        elif isinstance(message, Ready):
            self.ready = message
        self._watcher.worker_said(self, body)

    def _on_broken(self, reason: str) -> None:
        self._err.note(f"perdure: worker {self.worker} is killed: {reason}")
        self.signal(signal.SIGKILL)

    def _on_thread(self, call: Callable[[], None]) -> Callable[[], None]:
        """`call` from another thread; nothing happens once the loop is closed."""

        def later() -> None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call)

        return later

    def _on_ending(self) -> None:
        if self.alive:
            self._control.drain()
            self._watcher.worker_ending(self)

    def _on_death(self) -> None:
        noticed_s = time.monotonic()
        self._loop.remove_reader(self._pidfd)
        self.alive = False
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        # WNOWAIT: until it is buried it stays a zombie, which keeps its number from being used again.
        info = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self._control.drain()
        self._out.drain()
        self._err.drain()
        code = signum = None
        if info is not None and info.si_code == os.CLD_EXITED:
            code = info.si_status
        elif info is not None:
            signum = info.si_status
        self._watcher.worker_exited(self, Exited(code, signum, noticed_s))
        self._burial = asyncio.create_task(self._bury(), name=f"bury worker {self.worker}")

    async def _bury(self) -> None:
        try:
            await asyncio.to_thread(procfs.end_session, self.pid)
            await asyncio.to_thread(self._lifeline.close, LINGER_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._out.ended.wait()
                    await self._err.ended.wait()
        finally:
            self._control.close()
            self._out.close()
            self._err.close()
            self._page.close()
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            os.close(self._pidfd)
            self.gone.set_result(None)


_DECODER: Decoder[WorkerMessage] = Decoder(WorkerMessage)
