"""A helper process ends with the process that started it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

SCRATCH: Final = "PERDURE_SCRATCH"
"""Environment variable: a directory for workers' sockets that is removed with the agent, however it ends."""

_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `signum` when its parent dies; exit if it has died already.

    Call it in the child, with the pid that the parent read of itself before the fork: if it died
    between the fork and this call, no signal comes, but this process has another parent by now.
    The kernel watches the *thread* that forked: start helpers from a thread that lives as long as
    they shall. Linux only. Raises OSError if the kernel refuses.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os._exit(1)
