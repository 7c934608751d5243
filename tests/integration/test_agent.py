"""The real agent with real workers, told what to do by a scripted coordinator on the real wire."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.agent import zygote_client
from perdure.schema.errors import OrphanedError, PerdureError, UsageError
from perdure.schema.ids import Generation
from perdure.schema.messages import (
    AgentHello,
    Asked,
    Crashed,
    FromWorker,
    Notice,
    Ready,
    Seal,
    Status,
    StopWorker,
    ToWorker,
    WorkerEnding,
    WorkerExited,
)
from perdure.schema.plan import Position, Shape
from perdure.schema.wire import body
from scripted import DEADLINE_S, ScriptedCoordinator, Stage, living

SLEEP = "import signal\nprint('up', flush=True)\nsignal.pause()\n"
JOIN = """
from perdure.schema.messages import Joined, Ready
from perdure.schema.plan import Position, Shape
from perdure.worker import boot
context = boot.CONTEXT
context.send(Joined())
context.send(Ready("127.0.0.1", 4000, Shape(16, 4, 100, (10,)), Position(context.worker)))
"""


class Loop:
    """A loop that lives across tests."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, DEADLINE_S))

    def close(self) -> None:
        self._runner.close()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture(scope="module")
def stage(loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    before = set(psutil.Process().children(recursive=True))
    made = Stage(tmp_path_factory.mktemp("agent"))
    loop.do(made.open())
    yield made
    ended = loop.do(made.close())
    assert ended == (0, "the end")
    assert set(psutil.Process().children(recursive=True)) <= before


def test_the_hello_says_what_the_agent_is_for(loop: Loop, stage: Stage) -> None:
    hello = loop.do(stage.coordinator.hear(AgentHello))
    assert (hello.node, hello.host, hello.workers, hello.standby) == ("here", "127.0.0.1", 2, 0)
    assert hello.script == (str(stage.script), "an", "argument")
    assert hello.seen == ()


# ── ends of workers ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("source", "code", "signum"),
    [
        ("pass", 0, None),
        ("import os; os._exit(5)", 5, None),
        ("raise SystemExit(7)", 7, None),
        ("1 / 0", 1, None),
        ("import os; os.kill(os.getpid(), 9)", None, signal.SIGKILL),
        ("import ctypes; ctypes.string_at(0)", None, signal.SIGSEGV),
    ],
)
def test_how_a_worker_ended_is_told(
    loop: Loop, stage: Stage, source: str, code: int | None, signum: int | None
) -> None:
    before = time.time()
    _, exited = loop.do(stage.run(source))
    assert (exited.exit_code, exited.signal) == (code, signum)
    assert 0 <= exited.detect_s < 1
    assert before <= exited.wall_s <= time.time()


def test_a_kill_is_told_within_50_ms(loop: Loop, stage: Stage) -> None:
    async def once() -> float:
        worker, pid = await stage.start(SLEEP)
        await stage.until(lambda: (f"[worker {worker}] up", False) in stage.shown)
        killed = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        await stage.exit_of(worker)
        return time.perf_counter() - killed

    took = sorted(loop.do(once()) for _ in range(7))
    print(f"SIGKILL → WorkerExited heard: {[round(1000 * one, 1) for one in took]} ms")
    assert took[3] < 0.05


HOLD = """
import signal
from perdure.schema.messages import Crashed, Joined
from perdure.worker import boot
from perdure.worker.link import Link
link = Link(boot.CONTEXT, print)
link.send(Joined(link.start()))
memory = bytearray(b"1") * (256 << 20)
link.send(Crashed("Last", "here", "", 1))
signal.pause()
"""


def test_that_a_worker_is_ending_is_told_before_the_kernel_has_taken_its_memory_apart(
    loop: Loop, stage: Stage
) -> None:
    async def once() -> tuple[list[str], float]:
        worker, pid = await stage.start(HOLD)
        await stage.coordinator.hear(
            FromWorker, lambda one: one.worker == worker and b"Last" in bytes(one.body)
        )
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        await stage.exit_of(worker)
        heard = [one for one in stage.coordinator.heard if getattr(one, "worker", None) == worker]
        [ending] = [one for one in heard if isinstance(one, WorkerEnding)]
        return [type(one).__name__ for one in heard[-2:]], ending.wall_s - killed

    order, took = loop.do(once())
    print(f"SIGKILL → WorkerEnding: {1000 * took:.1f} ms")
    assert order == ["WorkerEnding", "WorkerExited"]
    assert took < 0.05


def test_the_exception_and_the_last_lines_are_told(loop: Loop, stage: Stage) -> None:
    source = (
        "import sys\nfor n in range(100):\n    print('line', n, file=sys.stderr)\nraise KeyError('gone')\n"
    )
    worker, exited = loop.do(stage.run(source))
    (crash,) = stage.coordinator.said_by(worker)
    assert isinstance(crash, Crashed)
    assert (crash.kind, crash.where) == ("KeyError", f"{stage.script}:4")
    assert exited.tail.splitlines()[0] == "line 84"
    assert exited.tail.splitlines()[-1] == "KeyError: 'gone'"


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_everything_a_worker_said_is_told_before_its_end(loop: Loop, stage: Stage, end: str) -> None:
    source = f"""
import os, sys
from perdure.schema.messages import HealFailed
from perdure.schema.ids import Generation
from perdure.worker import boot
for n in range(300):
    boot.CONTEXT.send(HealFailed(Generation(1, n), "x" * 500))
sys.stdout.write("a" * 50000 + "\\n")
sys.stderr.write("the last line")
{end}
"""
    worker, exited = loop.do(stage.run(source))
    said = stage.coordinator.said_by(worker)
    assert [one.generation.number for one in said] == list(range(300))
    of_worker = [one for one in stage.coordinator.heard if getattr(one, "worker", None) == worker]
    assert isinstance(of_worker[-1], WorkerExited)
    assert (stage.logs / f"worker-{worker}.out").read_text() == "a" * 50000 + "\n"
    assert exited.tail == "the last line"
    loop.do(stage.until(lambda: (f"[worker {worker}] the last line", True) in stage.shown))


# ── what a worker started ───────────────────────────────────────────────────────────────────────────


def test_what_a_worker_started_ends_with_it_and_is_reaped(loop: Loop, stage: Stage) -> None:
    source = """
        import multiprocessing, os, signal, subprocess, time
        loader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        loader.start()
        own_group = subprocess.Popen(["sleep", "60"], process_group=0)
        ended = subprocess.Popen(["true"])
        between = os.fork()
        if between == 0:
            orphan = subprocess.Popen(["sleep", "60"])
            print("pids", orphan.pid, flush=True)
            os._exit(0)
        os.waitpid(between, 0)
        print("pids", os.getpid(), loader.pid, own_group.pid, ended.pid, flush=True)
        signal.pause()
    """

    async def kill_and_look() -> float:
        worker, pid = await stage.start(source)
        await stage.until(lambda: len(stage.lines(worker)) == 2)
        pids = [int(one) for line in stage.lines(worker) for one in line.split()[1:]]
        assert len(living(pids)) == 5
        os.kill(pid, signal.SIGKILL)
        exited = await stage.exit_of(worker)
        await stage.until(lambda: not living(pids))
        return time.time() - exited.wall_s

    print(f"all that a worker had started gone {1000 * loop.do(kill_and_look()):.0f} ms after its exit")


def test_a_daemon_that_holds_the_pipe_does_not_delay_the_exit(loop: Loop, stage: Stage) -> None:
    source = """
        import subprocess, sys
        daemon = subprocess.Popen(["sleep", "60"], start_new_session=True)
        print(daemon.pid)
    """
    started = time.perf_counter()
    worker, exited = loop.do(stage.run(source))
    assert exited.exit_code == 0
    assert time.perf_counter() - started < 5
    (daemon,) = stage.lines(worker)
    assert living([int(daemon)])  # it left the worker's session; it ends with the agent


# ── what goes through the agent ─────────────────────────────────────────────────────────────────────


def test_output_is_shown_line_by_line_with_the_workers_name(loop: Loop, stage: Stage) -> None:
    source = """
        import os, sys
        for part in ("one ", "line\\ntwo", " lines\\n", "bar 1\\rbar 2\\rbar 3\\n", "rest"):
            os.write(1, part.encode())
        print("problem", file=sys.stderr)
        print(sys.argv[1:], os.environ["RANK"])
    """

    async def run() -> int:
        worker, _ = await stage.start(source, {"RANK": "3"})
        await stage.exit_of(worker)
        await stage.until(lambda: len(stage.lines(worker)) == 5)
        return worker

    worker = loop.do(run())
    assert stage.lines(worker) == [
        "one line",
        "two lines",
        "bar 3",
        "rest['an', 'argument'] 3",
        "problem",
    ] or (
        sorted(stage.lines(worker))
        == sorted(["one line", "two lines", "bar 3", "rest['an', 'argument'] 3", "problem"])
    )
    assert (f"[worker {worker}] problem", True) in stage.shown
    assert (stage.logs / f"worker-{worker}.err").read_text() == "problem\n"


def test_the_coordinators_messages_reach_the_worker(loop: Loop, stage: Stage) -> None:
    source = """
        from perdure.schema.messages import Adopted, CoordinatorMessage
        from perdure.schema.wire import FrameReader
        from perdure.worker import boot
        reader = FrameReader(CoordinatorMessage)
        seen = []
        while len(seen) < 20:
            seen += reader.feed(boot.CONTEXT.control.recv(65536))
        for one in seen:
            boot.CONTEXT.send(Adopted(one.generation, len(one.members)))
    """

    async def tell() -> list[Any]:
        worker, _ = await stage.start(source)
        for number in range(20):
            stage.coordinator.say(ToWorker(worker, body(Seal(Generation(1, number), ()))))
        await stage.exit_of(worker)
        return stage.coordinator.said_by(worker)

    assert [one.generation.number for one in loop.do(tell())] == list(range(20))


@pytest.mark.parametrize(
    "data", ["b'garbage'", "frame(b'\\x81\\xa4type\\xa7Welcome')", "encode(Seal(Generation(1, 1), ()))"]
)
def test_a_worker_that_breaks_the_wire_is_killed(loop: Loop, stage: Stage, data: str) -> None:
    source = f"""
        import signal
        from perdure.schema.ids import Generation
        from perdure.schema.messages import Seal
        from perdure.schema.wire import encode, frame
        from perdure.worker import boot
        boot.CONTEXT.control.sendall({data})
        signal.pause()
    """
    worker, exited = loop.do(stage.run(source))
    assert exited.signal == signal.SIGKILL
    assert f"worker {worker} is killed" in exited.tail
    assert stage.coordinator.said_by(worker) == []


def test_progress_is_told_when_it_changes(loop: Loop, stage: Stage) -> None:
    source = """
        import time
        from perdure.schema.progress import Phase
        from perdure.worker import boot
        for step in range(2):
            boot.CONTEXT.progress.write(Phase.COMPUTE, step, 3, 8 * step)
            time.sleep(0.6)  # longer than the agent waits between two looks at the page
    """

    async def run() -> list[Any]:
        start = len(stage.coordinator.heard)
        worker, _ = await stage.start(source)
        await stage.exit_of(worker)
        heard = [one for one in stage.coordinator.heard[start:] if isinstance(one, Status)]
        return [
            row for one in heard for row in one.workers if row.worker == worker and row.phase == "compute"
        ]

    rows = loop.do(run())
    assert [(row.step, row.micro_batch, row.samples) for row in rows] == [(0, 3, 0), (1, 3, 8)]


def test_signals_are_passed_on(loop: Loop, stage: Stage) -> None:
    async def stop(signum: int) -> WorkerExited:
        worker, _ = await stage.start(SLEEP)
        await stage.until(lambda: stage.lines(worker))
        stage.coordinator.say(StopWorker(worker, signum))
        return await stage.exit_of(worker)

    for signum in (signal.SIGTERM, signal.SIGKILL):
        assert loop.do(stop(signum)).signal == signum


def test_a_worker_stopped_before_it_started_runs_nothing(loop: Loop, stage: Stage) -> None:
    async def stop() -> tuple[int, WorkerExited]:
        worker = stage.order("print('ran')")
        stage.coordinator.say(StopWorker(worker, signal.SIGKILL))
        return worker, await stage.exit_of(worker)

    worker, exited = loop.do(stop())
    assert exited.signal == signal.SIGKILL
    assert stage.lines(worker) == []


def test_notices_and_wishes(loop: Loop, stage: Stage) -> None:
    stage.coordinator.say(Notice("worth knowing"))
    loop.do(stage.until(lambda: ("perdure: worth knowing", True) in stage.shown))
    stage.agent.ask(signal.SIGINT)
    assert loop.do(stage.coordinator.hear(Asked)).signum == signal.SIGINT


# ── what goes wrong around workers ──────────────────────────────────────────────────────────────────


def test_workers_outlive_the_zygote_and_others_can_be_started(loop: Loop, stage: Stage) -> None:
    async def kill_it() -> None:
        worker, pid = await stage.start(SLEEP)
        await stage.until(lambda: stage.lines(worker))
        zygote = stage.zygote_pid()
        os.kill(zygote, signal.SIGKILL)
        _, exited = await stage.run("print('after')")
        assert exited.exit_code == 0
        assert living([pid]) == [pid]
        os.kill(pid, signal.SIGKILL)
        await stage.exit_of(worker)
        assert living([zygote]) == []

    loop.do(kill_it())
    assert any("another one is started" in line for line, _ in stage.shown)


def test_a_lost_coordinator_is_found_again_and_told_what_there_is(loop: Loop, stage: Stage) -> None:
    async def lose() -> None:
        coordinator = stage.coordinator
        worker, pid = await stage.start(JOIN + SLEEP)
        await stage.until(lambda: stage.lines(worker))
        other, other_pid = await stage.start(SLEEP)
        await stage.until(lambda: stage.lines(other))
        await coordinator.hear(FromWorker, lambda one: one.worker == worker)
        heard = len(coordinator.heard)
        await coordinator.close()
        os.kill(other_pid, signal.SIGKILL)
        await stage.until(lambda: not living([other_pid]))
        await coordinator.open()
        started = time.perf_counter()
        hello = await coordinator.hear(AgentHello, since=heard)
        print(f"coordinator back → hello: {time.perf_counter() - started:.2f} s")
        (seen,) = hello.seen
        assert (seen.worker, seen.pid, seen.joined) == (worker, pid, True)
        ready = Ready("127.0.0.1", 4000, Shape(16, 4, 100, (10,)), Position(worker))
        assert seen.ready == ready
        assert (await stage.exit_of(other)).signal == signal.SIGKILL
        await coordinator.hear(
            Status, lambda one: [row.worker for row in one.workers] == [worker], since=heard
        )
        coordinator.say(StopWorker(worker, signal.SIGKILL))
        await stage.exit_of(worker)

    loop.do(lose())


def test_without_a_coordinator_an_agent_ends_its_workers_after_a_while(loop: Loop, tmp_path: Path) -> None:
    async def orphan() -> list[int]:
        stage = Stage(tmp_path, orphan_s=0.5)
        await stage.open()
        worker, pid = await stage.start(SLEEP)
        await stage.until(lambda: stage.lines(worker))
        await stage.coordinator.close()
        with pytest.raises(OrphanedError, match="no coordinator"):
            await stage.task
        return [pid]

    assert living(loop.do(orphan())) == []


def test_who_asks_while_the_coordinator_is_out_of_reach_is_answered_and_can_end_the_node(
    loop: Loop, tmp_path: Path
) -> None:
    async def ask() -> list[int]:
        stage = Stage(tmp_path)
        await stage.open()
        worker, pid = await stage.start(SLEEP)
        await stage.until(lambda: stage.lines(worker))
        await stage.coordinator.close()
        await stage.until(lambda: any("out of reach" in line for line, _ in stage.shown))
        stage.agent.ask(signal.SIGINT)
        assert stage.shown[-1] == (
            "perdure: signal 2: passed on once the coordinator answers; again to end this node at once",
            True,
        )
        before = len(stage.coordinator.heard)
        await stage.coordinator.open()
        assert (await stage.coordinator.hear(AgentHello, since=before)).asked == signal.SIGINT
        await stage.coordinator.close()
        stage.shown.clear()
        await stage.until(lambda: any("out of reach" in line for line, _ in stage.shown))
        stage.agent.ask(signal.SIGTERM)
        ended = await stage.task
        assert (ended.exit_code, ended.message) == (143, "ended at once")
        return [pid]

    assert living(loop.do(ask())) == []


@pytest.mark.parametrize("secret", [b"another secret, just as long", None])
def test_a_wrong_secret_or_address_is_said_at_once(loop: Loop, tmp_path: Path, secret: bytes | None) -> None:
    async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-something\r\n")
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    async def refused() -> None:
        stage = Stage(tmp_path)
        if secret is None:
            server = await asyncio.start_server(strange, "127.0.0.1", 0)
            stage.coordinator.port = server.sockets[0].getsockname()[1]
        else:
            stage.coordinator = ScriptedCoordinator(secret)
            await stage.coordinator.open()
        with pytest.raises(UsageError, match="secret"):
            await stage.open_agent()
        if secret is None:
            server.close()
        await stage.coordinator.close()
        assert stage.coordinator.heard == []

    loop.do(refused())


def test_a_zygote_that_cannot_start_ends_the_agent(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote_client.sys, "executable", "/bin/false")

    async def fail() -> None:
        stage = Stage(tmp_path)
        await stage.coordinator.open()
        with pytest.raises(PerdureError, match=r"zygote\.log"):
            await stage.open_agent()
        await stage.coordinator.close()

    loop.do(fail())


# ── nothing is left ─────────────────────────────────────────────────────────────────────────────────

FAMILY = """
    import os, subprocess, time
    same = subprocess.Popen(["sleep", "60"])
    daemon = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print("pids", os.getpid(), same.pid, daemon.pid, flush=True)
    time.sleep(60)  # until it is killed
"""


def test_a_cancelled_agent_leaves_nothing(loop: Loop, tmp_path: Path) -> None:
    async def cancel() -> list[int]:
        stage = Stage(tmp_path)
        await stage.open()
        worker, _ = await stage.start(FAMILY)
        await stage.until(lambda: stage.lines(worker))
        pids = [int(one) for one in stage.lines(worker)[0].split()[1:]]
        pids.append(stage.zygote_pid())
        assert len(living(pids)) == 4
        stage.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stage.task
        await stage.coordinator.close()
        return pids

    descriptors = len(os.listdir("/proc/self/fd"))
    assert living(loop.do(cancel())) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # the garbage collector may close others'


LAUNCHER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from scripted import Stage

async def main():
    stage = Stage(Path(sys.argv[2]))
    await stage.open()
    for _ in range(2):
        worker, _ = await stage.start({family!r})
        await stage.until(lambda: stage.lines(worker))
        print(stage.lines(worker)[0], flush=True)
    print("pids", stage.zygote_pid(), flush=True)
    await asyncio.sleep(60)  # until it is killed

asyncio.run(main())
"""


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER.format(family=FAMILY), here, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for _ in range(3) for pid in re.findall(r"\d+", launcher.stdout.readline())]
        assert len(living(pids)) == 7
        launcher.kill()
        killed = time.perf_counter()
    while left := [pid for pid in living(pids) if not _is_zombie(pid)]:
        assert time.perf_counter() - killed < 5, left
        time.sleep(0.005)  # they are other processes' children: their ends give this one no event
    print(f"launcher killed → nothing left: {1000 * (time.perf_counter() - killed):.0f} ms")


def _is_zombie(pid: int) -> bool:
    """Dead, and waiting for whoever is init here."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
