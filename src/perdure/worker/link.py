"""The worker's end of the control connection: one thread that reads, and a way to be woken for signals."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from perdure.schema.errors import WireError
from perdure.schema.messages import CoordinatorMessage, Leaving, Seal, WorkerMessage
from perdure.schema.wire import FrameReader
from perdure.worker import defect
from perdure.worker.boot import Context
from perdure.worker.forked import Descriptor, close_in_children

_ORPHANED = 86


class Link:
    """Reads the coordinator's messages on a thread of its own and hands each to `on_message`.

    When the agent is gone the worker ends at once: nobody could tell it that it is excluded (P10).
    """

    def __init__(self, context: Context, on_message: Callable[[CoordinatorMessage], None]) -> None:
        self._context = context
        self._on_message = on_message
        self._leaving = False
        self._begun = threading.Event()
        self._held = False
        wake, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wake_fd = close_in_children(Descriptor(wake))
        self._waking = close_in_children(Descriptor(self._wake))
        self._thread = threading.Thread(target=defect.fatal(self._run), name="perdure-link", daemon=True)

    def start(self) -> bool:
        """Start reading, and hold the worker's lifeline; whether that could be had."""
        self._thread.start()
        self._begun.wait()
        return self._held

    def send(self, message: WorkerMessage) -> None:
        """Send a message to the coordinator; without an agent the process ends."""
        try:
            self._context.send(message)
        except OSError:
            os._exit(_ORPHANED)

    def leave_on_sigterm(self) -> None:
        """From now on SIGTERM asks to hand over at a boundary instead of ending the process.

        What the script forks ends by it, as it would without perdure.
        """
        signal.signal(signal.SIGTERM, self._on_sigterm)
        os.register_at_fork(after_in_child=self._leave_no_more)

    def _leave_no_more(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        # The main thread may hold any lock just now: only wake the link's own thread.
        os.write(self._wake, b"T")

    def _run(self) -> None:
        self._held = self._context.lifeline.hold()
        self._begun.set()
        control = self._context.control
        reader: FrameReader[CoordinatorMessage] = FrameReader(CoordinatorMessage)
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(self._wake_fd.fileno(), select.POLLIN)
        while True:
            ready = {number for number, _ in poll.poll()}
            if self._wake_fd.fileno() in ready:
                os.read(self._wake_fd.fileno(), 64)
                self._leaving = True
                self.send(Leaving())
            if control.fileno() in ready:
                self._read(control, reader)

    def _read(self, control: socket.socket, reader: FrameReader[CoordinatorMessage]) -> None:
        try:
            data = control.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            os._exit(_ORPHANED)
        try:
            messages = reader.feed(data)
        except WireError:
            os._exit(_ORPHANED)
        for message in messages:
            self._on_message(message)
            if self._leaving and isinstance(message, Seal):
                self.send(Leaving())  # what was said to an earlier coordinator died with it
