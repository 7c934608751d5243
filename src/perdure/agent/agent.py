"""The agent: one per node. Starts workers, passes their messages on, tells how they end, ends with them.

    launcher ── Agent.run ──┬── Link          the coordinator's orders, the workers' messages
                            ├── Zygote        a process that forks workers
                            └── WorkerProcess one for each: socket, streams, progress, pidfd

It decides nothing: what is to be started, killed or told comes from the coordinator. Only when none has
been there for `orphan_s` does it end its workers of its own accord (P10). Workers and zygote die with the
process that runs the agent, however that one ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from perdure.agent import procfs
from perdure.agent.link import Link, Target
from perdure.agent.process import Ends, Exited, Show, WorkerProcess
from perdure.agent.zygote_client import Zygote
from perdure.schema.errors import ZygoteGoneError
from perdure.schema.ids import WorkerId
from perdure.schema.messages import (
    AgentHello,
    AgentWelcome,
    Asked,
    CoordinatorToAgent,
    EndAgent,
    Fork,
    FromWorker,
    Notice,
    Progress,
    StartWorker,
    Status,
    StopWorker,
    ToWorker,
    WorkerEnding,
    WorkerExited,
    WorkerSeen,
    WorkerStarted,
)
from perdure.schema.wire import derive

STATUS_S: Final = 0.2
"""Progress pages are read this often."""

EX_OSERR: Final = 71
"""sysexits.h: the exit code told of a worker that the system would not start."""

END_S_MAX: Final = 5.0
"""Dead workers are waited for so long at the end."""

TAIL_CHARS_MAX: Final = 8192


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """What an agent is told once. `script` is a path and its arguments, or -m, a module and its arguments.

    `node` names this machine within the job, `host` is where other nodes reach it. Logs go below
    `run_dir`/logs; workers start in `directory`.
    """

    node: str
    host: str
    target: Target
    run_dir: Path
    script: tuple[str, ...]
    workers: int
    standby: int = 0
    directory: Path = field(default_factory=Path.cwd)


class Ended(NamedTuple):
    """How the job ended, as the coordinator told it."""

    exit_code: int
    message: str


class Agent:
    """Runs the workers of one node until the coordinator ends it.

    `show` takes one line for the terminal and whether it is of stderr; it is called from the event loop
    and must not wait.
    """

    def __init__(self, config: AgentConfig, show: Show) -> None:
        self._config = config
        self._show = show
        self._logs = config.run_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._mark = secrets.token_hex(16)
        self._link = Link(config.target, self._hello, self._receive, self._say)
        self._zygote = Zygote(self._mark, self._logs / "zygote.log", self._say)
        self._workers: dict[WorkerId, WorkerProcess] = {}
        self._starting: dict[WorkerId, asyncio.Task[None]] = {}
        self._unburied: set[asyncio.Future[None]] = set()
        self._stopped_early: dict[WorkerId, int] = {}
        self._orphans_possible = False
        self._told: tuple[Progress, ...] = ()
        self._asked: list[int] = []
        self._asked_in_hello = False
        self._key = ""
        self._end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    async def run(self) -> Ended:
        """Serve until the coordinator says how the job ended.

        However it ends, cancelled or by an error, no worker, zygote or anything that they started is left.
        Raises UsageError for a wrong address or secret, PerdureError when there is no coordinator for
        `orphan_s` or when workers cannot be started.
        """
        with _subreaper():
            parts = [
                asyncio.create_task(self._link.run(), name="link"),
                asyncio.create_task(self._zygote.run(), name="zygote"),
                asyncio.create_task(self._report(), name="status"),
            ]
            try:
                waited: list[asyncio.Future[Any]] = [*parts, self._end]
                done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if self._end not in done:
                    for failed in done:
                        failed.result()
                return self._end.result()
            finally:
                await self._end_all(parts)

    def ask(self, signum: int) -> None:
        """Pass on that the person at this terminal wants the job to end; if that cannot be done, end here."""
        self._asked.append(signum)
        if len(self._asked) > (2 if self._link.connected else 1):
            if not self._end.done():
                self._end.set_result(Ended(128 + signum, "ended at once"))
            return
        if self._link.connected:
            self._link.send(Asked(signum))
        else:  # told by the next hello, or after the welcome
            self._say(
                f"signal {signum}: passed on once the coordinator answers; again to end this node at once"
            )

    def _say(self, text: str) -> None:
        self._show(f"perdure: {text}", True)

    # ── what the coordinator says ───────────────────────────────────────────────────────────────────

    def _hello(self) -> AgentHello:
        config = self._config
        self._asked_in_hello = bool(self._asked)
        return AgentHello(
            node=config.node,
            host=config.host,
            workers=config.workers,
            standby=config.standby,
            script=config.script,
            version=version("perdure"),
            seen=tuple(
                WorkerSeen(one.worker, one.pid, one.joined, one.ready) for one in self._workers.values()
            ),
            key=self._key,
            asked=self._asked[0] if self._asked else 0,
        )

    def _receive(self, message: CoordinatorToAgent) -> None:
        match message:
            case StartWorker():
                self._order(message)
            case StopWorker(worker, signum):
                if worker in self._workers:
                    self._workers[worker].signal(signum)
                elif worker in self._starting:
                    self._stopped_early[worker] = signum
            case ToWorker(worker, body):
                if worker in self._workers:
                    self._workers[worker].send(bytes(body))
            case EndAgent(exit_code, text):
                if not self._end.done():
                    self._end.set_result(Ended(exit_code, text))
            case Notice(text):
                self._say(text)
            case AgentWelcome(key=key):
                self._told = ()  # a new connection: it knows nothing
                if not (self._key and self._workers):  # else these may be of the job before
                    self._key = key
                if self._asked and not self._asked_in_hello:
                    self._link.send(Asked(self._asked[0]))

    def _order(self, order: StartWorker) -> None:
        """Start a worker in the background: the first has to wait for the zygote's imports."""
        if order.worker in self._workers or order.worker in self._starting:
            return
        task = asyncio.create_task(self._start(order), name=f"start worker {order.worker}")
        self._starting[order.worker] = task

        def started(task: asyncio.Task[None]) -> None:
            del self._starting[order.worker]
            self._stopped_early.pop(order.worker, None)
            if not task.cancelled() and (error := task.exception()) and not self._end.done():
                self._end.set_exception(error)

        task.add_done_callback(started)

    async def _start(self, order: StartWorker) -> None:
        worker, asked_s = order.worker, time.monotonic()
        prefix = f"[worker {worker}] "
        try:
            pid, ends = await self._fork(order)
            process = WorkerProcess(
                worker, pid, ends, self._logs, self, lambda line, err: self._show(prefix + line, err)
            )
        except (OSError, ZygoteGoneError) as error:
            took_s = time.monotonic() - asked_s
            self._link.send(
                WorkerExited(worker, EX_OSERR, None, took_s, time.time(), f"not started: {error}")
            )
            return
        self._workers[worker] = process
        self._unburied.add(process.gone)
        process.gone.add_done_callback(self._unburied.discard)
        self._link.send(WorkerStarted(worker, pid))
        if worker in self._stopped_early:
            process.signal(self._stopped_early.pop(worker))
        process.go()

    async def _fork(self, order: StartWorker) -> tuple[int, Ends]:
        """A worker that waits to be let go. Raises OSError; ZygoteGoneError when no try helped."""
        config = self._config
        request = Fork(
            worker=order.worker,
            script=config.script,
            cwd=str(config.directory),
            env=order.env,
            node=config.node,
            host=config.host,
            data_key=derive(config.target.secret, "data plane"),
        )
        for last in (False, False, True):
            ends = Ends()
            try:
                pid = await self._zygote.fork(request, ends.theirs())
            except BaseException as error:
                ends.close()  # whatever was forked gets end-of-file there, and runs nothing
                if last or not isinstance(error, ZygoteGoneError):
                    raise
            else:
                ends.close_theirs()
                return pid, ends
        raise AssertionError("the last try returns or raises")

    # ── what the workers do ─────────────────────────────────────────────────────────────────────────

    def worker_said(self, process: WorkerProcess, body: bytes) -> None:
        """Pass a worker's message on."""
        self._link.send(FromWorker(process.worker, msgspec.Raw(body)))

    def worker_ending(self, process: WorkerProcess) -> None:
        """Tell at once that a worker is ending; how, is told when the kernel is done with it."""
        self._link.send(WorkerEnding(process.worker, time.time(), _doing(process)))

    def worker_exited(self, process: WorkerProcess, exited: Exited) -> None:
        """Tell how a worker ended; all that it said has been passed on before."""
        del self._workers[process.worker]
        self._orphans_possible = True
        self._link.send(
            WorkerExited(
                worker=process.worker,
                exit_code=exited.exit_code,
                signal=exited.signum,
                detect_s=time.monotonic() - exited.noticed_s,
                wall_s=time.time(),
                tail=process.tail[-TAIL_CHARS_MAX:],
                doing=_doing(process),
            )
        )

    async def _report(self) -> None:
        """Tell what the workers do, when that changed; clear away what dead ones left, when all is quiet."""
        while True:
            await asyncio.sleep(STATUS_S)
            rows = tuple(self._rows())
            if rows != self._told:
                self._told = rows
                self._link.send(Status(rows))
            quiet = not self._starting and len(self._unburied) == len(self._workers)
            if self._orphans_possible and quiet:
                self._orphans_possible = False
                known = {one.pid for one in self._workers.values()} | {self._zygote.pid}
                await asyncio.to_thread(procfs.reap_orphans, known)

    def _rows(self) -> Iterator[Progress]:
        for one in self._workers.values():
            doing = _doing(one)
            if doing is not None:
                yield doing

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────

    async def _end_all(self, parts: list[asyncio.Task[None]]) -> None:
        """Leave nothing: workers first and at once, as this may be cancelled a second time."""
        for process in self._workers.values():
            process.signal(signal.SIGKILL)
        tasks = [*parts, *self._starting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in self._workers.values():  # one that was being started just now
            process.signal(signal.SIGKILL)
        if self._unburied:
            await asyncio.wait(self._unburied, timeout=END_S_MAX)
        await asyncio.to_thread(procfs.end_marked, self._mark)
        await asyncio.to_thread(procfs.reap_orphans, set())
        await self._link.close()


def _doing(process: WorkerProcess) -> Progress | None:
    """A worker's progress page as it is told; it can be read until the worker is buried."""
    now = process.progress()
    if now is None:
        return None
    return Progress(
        process.worker, process.pid, now.phase.name.lower(), now.step, now.micro_batch, now.samples
    )


_PR_SET_CHILD_SUBREAPER: Final = 36  # prctl(2)
_PR_GET_CHILD_SUBREAPER: Final = 37


@contextmanager
def _subreaper() -> Iterator[None]:
    """While this lasts, processes below this one whose parent ended become its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) != 0 or (
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0
    ):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
