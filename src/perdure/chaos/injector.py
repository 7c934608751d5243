"""Carries faults out on running processes, by real signals."""

from __future__ import annotations

import contextlib
import os
import signal
from types import TracebackType
from typing import Final, Self

from perdure.chaos.faults import Manner

SIGNAL_OF: Final = {
    Manner.KILL: signal.SIGKILL,
    Manner.TERM: signal.SIGTERM,
    Manner.STOP: signal.SIGSTOP,
    Manner.SEGV: signal.SIGSEGV,
}


class Injector:
    """Strikes processes. What it stopped goes on at its next strike, and at the end of the `with`."""

    def __init__(self) -> None:
        self._stopped: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def strike(self, pid: int, manner: Manner) -> bool:
        """Hit a process; False if it was gone already. Raises PermissionError for somebody else's."""
        self.release()
        try:
            # A pidfd, so that what is let go later is what was stopped, whoever has the number then.
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            signal.pidfd_send_signal(pidfd, SIGNAL_OF[manner])
        except ProcessLookupError:
            os.close(pidfd)
            return False
        if manner is Manner.STOP:
            self._stopped.append(pidfd)
        else:
            os.close(pidfd)
        return True

    def release(self) -> None:
        """Let what is stopped go on."""
        while self._stopped:
            pidfd = self._stopped.pop()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)
