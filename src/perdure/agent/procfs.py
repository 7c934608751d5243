"""Finding and ending processes that were started below a worker, through /proc."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, NamedTuple

_ROUNDS = 8
_REAP_S = 2.0
_POLL_S = 0.002

SHARED_MEMORY: Final = Path("/dev/shm")

MARK: Final = "PERDURE_AGENT"
"""Environment variable that everything below one agent inherits; its value is the agent's alone."""

SCRATCH: Final = "PERDURE_SCRATCH"
"""Environment variable: a directory for workers' sockets, made when needed, removed with the agent."""


class Process(NamedTuple):
    """One line of /proc/PID/stat, in part."""

    pid: int
    state: str
    parent: int
    session: int


def parse_stat(text: str) -> Process:
    """The name of a process is in parentheses and may itself hold spaces and parentheses."""
    pid, _, rest = text.partition(" (")
    state, parent, _, session = rest[rest.rindex(")") + 2 :].split(" ", 4)[:4]
    return Process(int(pid), state, int(parent), int(session))


def process(pid: int) -> Process | None:
    """The process with this pid; None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return parse_stat(file.read())
    except OSError:
        return None


def processes() -> list[Process]:
    """Every process that can be seen."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [found for found in map(process, pids) if found is not None]


def end_session(session: int) -> None:
    """SIGKILL and reap what is left of a dead worker's session.

    The worker itself must not have been reaped: as long as it is a zombie, nothing else can get its number.
    Shared memory that torch's loader processes had made and nobody had taken over yet goes with them.
    """
    ended = _end(lambda found: found.session == session and found.pid != session)
    for pid in (session, *ended):
        for left in SHARED_MEMORY.glob(f"torch_{pid}_*"):
            with contextlib.suppress(OSError):
                left.unlink()


def scratch(mark: str) -> Path:
    """The scratch directory of the agent with this mark; short, as names of sockets must be."""
    return Path(tempfile.gettempdir(), f"perdure-{mark[:12]}")


def end_marked(mark: str) -> None:
    """SIGKILL and reap everything below this agent that carries its mark, in whatever session.

    Its scratch directory goes too.
    """
    wanted = f"{MARK}={mark}".encode()
    _end(lambda found: found.state != "Z" and wanted in _environment(found.pid))
    shutil.rmtree(scratch(mark), ignore_errors=True)


def reap_orphans(known: Collection[int | None]) -> None:
    """Reap ended processes that became children of this one because their own parent ended first.

    A launcher's own children are in its session or in `known`; they are left to those who wait for them.
    """
    own_pid, own_session = os.getpid(), os.getsid(0)
    for found in processes():
        orphan = found.parent == own_pid and found.session != own_session and found.pid not in known
        if orphan and found.state == "Z":
            _reap(found.pid)


def _end(wanted: Callable[[Process], bool]) -> tuple[int, ...]:
    """Kill what is wanted until a look finds nothing more, as one that is killed may have forked.

    Returns the pids.
    """
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        found = [one for one in processes() if one.pid != os.getpid() and wanted(one)]
        fresh = [one for one in found if one.pid not in killed]
        for one in fresh:
            _kill(one)
            killed.add(one.pid)
        if not fresh:
            break
    ended = tuple(killed)
    deadline = time.monotonic() + _REAP_S
    while killed and time.monotonic() < deadline:
        killed = {pid for pid in killed if not _reap(pid)}
        if killed:
            time.sleep(_POLL_S)
    return ended


def _kill(found: Process) -> None:
    """SIGKILL `found`, unless its number has become another process's since it was looked at."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(found.pid)
        try:
            again = process(found.pid)
            if again is not None and again.session == found.session:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def _reap(pid: int) -> bool:
    """Whether `pid` is gone: reaped here, or by its own parent."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    return process(pid) is None


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().split(b"\0")
    return []
