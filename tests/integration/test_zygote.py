"""Workers forked from a real zygote: scripts run as under python, and their ends are told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perdure.agent import procfs
from perdure.agent.process import Ends, Exited, WorkerProcess
from perdure.agent.zygote_client import Zygote
from perdure.schema.errors import ZygoteGoneError
from perdure.schema.messages import Crashed, Fork, WorkerMessage
from perdure.schema.progress import Phase
from perdure.schema.wire import Decoder

DEADLINE_S = 30.0
AGAIN_S = 8.0
"""Python drops an interrupt that comes inside a destructor or a weak reference's callback: press again."""
MARK = "mark-of-test-zygote"


@dataclass
class Outcome:
    """All that a worker said, printed and did."""

    pid: int
    said: list[WorkerMessage] = field(default_factory=list)
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    exited: Exited | None = None
    first_line_s: float = 0.0

    @property
    def crash(self) -> Crashed:
        (crash,) = self.said
        assert isinstance(crash, Crashed)
        return crash


class Bench:
    """One zygote for the module, and a loop that it lives on."""

    def __init__(self, directory: Path) -> None:
        self.runner = asyncio.Runner()
        self.logs = directory
        self.zygote = self.runner.run(self._make())
        self._decoder: Decoder[WorkerMessage] = Decoder(WorkerMessage)
        self._next_worker = 0

    async def _make(self) -> Zygote:
        zygote = Zygote(MARK, self.logs / "zygote.log", lambda line: None)
        self.task = asyncio.create_task(zygote.run())
        return zygote

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, DEADLINE_S))

    def close(self) -> None:
        async def end() -> None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

        self.do(end())
        self.runner.close()
        procfs.end_marked(MARK)
        procfs.reap_orphans(())

    async def start(
        self, script: tuple[str, ...], cwd: Path, env: dict[str, str] | None = None
    ) -> tuple[WorkerProcess, Outcome]:
        self._next_worker += 1
        ends = Ends()
        asked = time.perf_counter()
        request = Fork(self._next_worker, script, str(cwd), env or {}, "here", "127.0.0.1", bytes(32))
        try:
            pid = await self.zygote.fork(request, ends.theirs())
        except BaseException:
            ends.close()
            raise
        ends.close_theirs()
        outcome = Outcome(pid)

        def show(line: str, error: bool) -> None:
            outcome.first_line_s = outcome.first_line_s or time.perf_counter() - asked
            (outcome.err if error else outcome.out).append(line)

        bench = self

        class Recorder:
            def worker_said(self, process: WorkerProcess, body: bytes) -> None:
                outcome.said.append(bench._decoder.decode(body))

            def worker_exited(self, process: WorkerProcess, exited: Exited) -> None:
                outcome.exited = exited

        process = WorkerProcess(self._next_worker, pid, ends, self.logs, Recorder(), show)
        process.go()
        return process, outcome

    def run(
        self, script: tuple[str, ...], cwd: Path, env: dict[str, str] | None = None, signum: int = 0
    ) -> Outcome:
        """Run to the end; with `signum`, send that as soon as a line was printed."""

        async def to_the_end() -> Outcome:
            process, outcome = await self.start(script, cwd, env)
            while signum and not outcome.out:
                await asyncio.sleep(0.002)
            if signum:
                process.signal(signum)
                while not (await asyncio.wait([process.gone], timeout=AGAIN_S))[0]:
                    process.signal(signum)
            await process.gone
            return outcome

        outcome: Outcome = self.do(to_the_end())
        return outcome


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    import ctypes

    libc = ctypes.CDLL(None)
    assert libc.prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER, which an agent does for itself
    made = Bench(tmp_path_factory.mktemp("zygote"))
    yield made
    made.close()
    assert libc.prctl(36, 0, 0, 0, 0) == 0


def write(directory: Path, name: str, source: str) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


def python(script: tuple[str, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *script],
        cwd=cwd,
        env=dict(os.environ),  # without what readline sets behind python's back
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )


# ── as under python ─────────────────────────────────────────────────────────────────────────────────

SELF_PORTRAIT = """
    import json, os, signal, sys, threading
    import __main__
    print(json.dumps({
        "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "name": __name__, "file": __file__,
        "package": __package__, "spec": getattr(__spec__, "name", None), "loader": type(__loader__).__name__,
        "cached": __cached__, "doc": __doc__, "main": __main__.__dict__ is globals(),
        "names": sorted(globals()),
        "builtins": type(__builtins__).__name__, "environment": dict(os.environ), "stdin": sys.stdin.read(),
        "encoding": [sys.stdout.encoding, sys.stderr.errors, sys.stdin.encoding],
        "signals": [str(signal.getsignal(number)) for number in (2, 13, 15, 17)],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "umask": os.umask(0o22),
        "threads": threading.active_count(), "flags": list(sys.flags), "annotations": __annotations__,
    }))
"""


@pytest.mark.parametrize(
    "script",
    [
        ("{dir}/portrait.py", "--one", "two words", ""),
        ("portrait.py",),
        ("./portrait.py", "x"),
        ("sub/../sub/portrait.py",),
        ("link.py",),
        ("-m", "portrait", "-m", "x"),
        ("-m", "package"),
        ("-m", "package.inner", "a"),
        ("package", "as", "directory"),
        ("{dir}/zipped.zip", "a"),
    ],
    ids=" ".join,
)
def test_a_script_sees_what_it_would_see_under_python(
    bench: Bench, tmp_path: Path, script: tuple[str, ...]
) -> None:
    for name in ("portrait.py", "sub/portrait.py", "package/__main__.py", "package/inner.py"):
        write(tmp_path, name, SELF_PORTRAIT)
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "link.py").symlink_to("sub/portrait.py")
    import zipfile

    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("__main__.py", textwrap.dedent(SELF_PORTRAIT))
    script = tuple(part.format(dir=tmp_path) for part in script)
    plain = python(script, tmp_path)
    outcome = bench.run(script, tmp_path)
    assert outcome.err == plain.stderr.splitlines()
    seen, expected = json.loads(outcome.out[0]), json.loads(plain.stdout)
    assert seen["environment"].pop(procfs.MARK) == MARK
    assert seen["environment"].pop(procfs.SCRATCH) == str(procfs.scratch(MARK))
    for one in (seen, expected):
        del one["environment"]["PYTEST_CURRENT_TEST"]
    assert seen == expected
    assert outcome.exited is not None
    assert outcome.exited.exit_code == 0
    assert outcome.said == []


ENDS = {
    "nothing": ("", 0),
    "exit 0": ("import sys; sys.exit(0)", 0),
    "exit": ("exit()", 0),
    "exit 7": ("import sys; sys.exit(7)", 7),
    "exit -1": ("import sys; sys.exit(-1)", 255),
    "exit 256": ("import sys; sys.exit(256)", 0),
    "exit text": ("import sys; sys.exit('that is all')", 1),
    "exit late": ("import atexit, os; atexit.register(os._exit, 9)", 9),
    "os._exit": ("import os; print('lost'); os._exit(5)", 5),
    "raise": ("def f():\n    raise ValueError('no')\nf()", 1),
    "chained": ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e", 1),
    "group": ("raise ExceptionGroup('both', [ValueError(1), KeyError(2)])", 1),
    "syntax": ("x = = 1", 1),
    "hook": ("import sys\nsys.excepthook = lambda *a: print('mine', a[0])\nraise ValueError", 1),
    "no hook": ("import sys\nsys.excepthook = 3\nraise ValueError", 1),
    "bad hook": ("import sys\ndef h(*_): 1 / 0\nsys.excepthook = h\nraise ValueError", 1),
    "atexit": ("import atexit\natexit.register(print, 'bye')\nraise ValueError", 1),
    "thread": ("import threading, time\nthreading.Timer(0.1, print, ['late']).start()", 0),
    "buffered": ("import sys\nsys.stdout.write('no end of line')\nsys.exit(3)", 3),
    "surrogates": ("raise ValueError('\\udcff')", 1),
    "recursion": ("def f(): f()\nf()", 1),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", -signal.SIGINT),
    "SIGTERM": ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
    "SIGKILL": ("import os; print('x'); os.kill(os.getpid(), 9)", -signal.SIGKILL),
    "abort": ("import os; os.abort()", -signal.SIGABRT),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_under_python(bench: Bench, tmp_path: Path, name: str) -> None:
    source, code = ENDS[name]
    write(tmp_path, "script.py", source)
    plain = python(("-u", "script.py"), tmp_path)
    assert plain.returncode == code
    outcome = bench.run(("script.py",), tmp_path)
    assert outcome.exited is not None
    exited = outcome.exited
    assert (exited.exit_code if exited.signum is None else -exited.signum) == plain.returncode
    assert outcome.out == plain.stdout.splitlines()
    if name == "recursion":  # the launcher takes a few of the thousand frames
        assert outcome.err[-1] == plain.stderr.splitlines()[-1]
    elif name != "abort":  # the stack of the abort is printed too
        assert outcome.err == plain.stderr.splitlines()
    told = (code > 0 and name not in ("exit late", "os._exit")) or name == "KeyboardInterrupt"
    assert len(outcome.said) == told


def test_a_script_that_is_not_there(bench: Bench, tmp_path: Path) -> None:
    for script in (("nowhere.py",), ("-m", "nowhere")):
        plain = python(script, tmp_path)
        outcome = bench.run(script, tmp_path)
        assert outcome.err == plain.stderr.splitlines()
        assert outcome.exited is not None
        assert outcome.exited.exit_code == plain.returncode
        assert outcome.crash.exit_code == plain.returncode


def test_ctrl_c(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import time\nprint('on', flush=True), time.sleep(60)\n")
    outcome = bench.run(("script.py",), tmp_path, signum=signal.SIGINT)
    assert outcome.exited is not None
    assert outcome.exited.signum == signal.SIGINT
    assert outcome.err[-1] == "KeyboardInterrupt"
    assert outcome.crash.kind == "KeyboardInterrupt"
    assert outcome.crash.where == f"{tmp_path}/script.py:2"


def test_segmentation_fault_shows_where(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import ctypes\nctypes.string_at(0)\n")
    outcome = bench.run(("script.py",), tmp_path)
    assert outcome.exited is not None
    assert outcome.exited.signum == signal.SIGSEGV
    assert any(f'"{tmp_path}/script.py", line 2' in line for line in outcome.err)


# ── what is told of an error ────────────────────────────────────────────────────────────────────────


def test_the_innermost_line_of_the_users_own_code_is_named(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path, "mine.py", "import json\n\ndef parse(text):\n    return json.loads(text)\n")
    write(tmp_path, "script.py", "import mine\n\nmine.parse('{')\n")
    crash = bench.run(("script.py",), tmp_path).crash
    assert crash.kind == "json.decoder.JSONDecodeError"
    assert crash.where == f"{tmp_path}/mine.py:4"
    assert crash.traceback.startswith(
        f'Traceback (most recent call last):\n  File "{tmp_path}/script.py", line 3'
    )
    assert crash.exit_code == 1
    assert not crash.user


def test_a_mistake_in_the_use_of_perdure_is_the_users(bench: Bench, tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        """
        from perdure.schema.errors import ProtectError
        class Mine(Exception): pass
        raise ProtectError("sparse gradients; use dense ones")
        """,
    )
    outcome = bench.run(("script.py",), tmp_path)
    assert (outcome.crash.user, outcome.crash.exit_code) == (True, 4)
    assert outcome.exited is not None
    assert outcome.exited.exit_code == 4
    write(tmp_path, "script.py", "x = 1\nif x\n")
    crash = bench.run(("script.py",), tmp_path).crash
    assert (crash.kind, crash.user, crash.where) == ("SyntaxError", True, f"{tmp_path}/script.py:2")


def test_a_very_long_traceback_is_cut_in_the_middle(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path, "script.py", "raise ValueError('a' * 10**6 + 'z')")
    crash = bench.run(("script.py",), tmp_path).crash
    assert len(crash.traceback) < 70_000
    assert crash.traceback.startswith("Traceback")
    assert crash.traceback.endswith("az\n")


# ── what a worker has ───────────────────────────────────────────────────────────────────────────────


def test_the_context_reaches_the_script_and_not_its_children(bench: Bench, tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        """
        import os
        from perdure.schema.messages import Joined, Leaving
        from perdure.worker import boot
        context = boot.CONTEXT
        print(context.worker, context.node, context.host, len(context.data_key))
        context.send(Joined())
        if os.fork() == 0:
            print(boot.CONTEXT, context.control.fileno(), flush=True)
            os._exit(0)
        os.wait()
        context.send(Leaving())
        print(sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:6])
        """,
    )
    outcome = bench.run(("script.py",), tmp_path)
    assert outcome.out[0].endswith(" here 127.0.0.1 32")
    assert outcome.out[1] == "None -1"
    assert [type(one).__name__ for one in outcome.said] == ["Joined", "Leaving"]


def test_workers_draw_different_numbers_from_unseeded_generators(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import random, numpy\nprint(random.random(), numpy.random.rand())")
    drawn = [bench.run(("script.py",), tmp_path).out[0].split() for _ in range(2)]
    assert not set(drawn[0]) & set(drawn[1])


def test_the_number_of_threads_is_the_environments(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import os, torch\nprint(torch.get_num_threads(), os.environ['RANK'])")
    for threads in ("1", "3"):
        assert bench.run(("script.py",), tmp_path, {"OMP_NUM_THREADS": threads, "RANK": "7"}).out == [
            f"{threads} 7"
        ]


def test_progress_can_be_read_while_the_interpreter_is_stuck(bench: Bench, tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        """
        import ctypes, time
        from perdure.schema.progress import Phase
        from perdure.worker import boot
        page = boot.CONTEXT.progress
        start = time.perf_counter()
        for _ in range(10000):
            page.write(Phase.DATA, 1, 2, 3)
        print((time.perf_counter() - start) / 10000 * 1e6)
        page.write(Phase.COMPUTE, 12, 3, 96)
        print("stuck", flush=True)
        ctypes.PyDLL(None).sleep(60)    # keeps the lock of the interpreter
        """,
    )

    async def look() -> tuple[Any, Outcome]:
        process, outcome = await bench.start(("script.py",), tmp_path)
        while len(outcome.out) < 2:
            await asyncio.sleep(0.002)
        seen = process.progress()
        process.signal(signal.SIGKILL)
        await process.gone
        return seen, outcome

    seen, outcome = bench.do(look())
    assert (seen.counter, seen.phase, seen.step, seen.micro_batch, seen.samples) == (
        10001,
        Phase.COMPUTE,
        12,
        3,
        96,
    )
    print(f"one write of the progress page: {outcome.out[0]} µs")


def test_own_session_and_parent(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import os\nprint(os.getpid(), os.getsid(0), os.getpgid(0), os.getppid())")
    outcome = bench.run(("script.py",), tmp_path)
    assert outcome.out[0] == f"{outcome.pid} {outcome.pid} {outcome.pid} {os.getpid()}"


# ── the zygote ──────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_runs_its_first_line_soon(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path, "script.py", "print('first')\nimport torch\n")
    took = sorted(bench.run(("script.py",), tmp_path).first_line_s for _ in range(5))
    print(f"asked → first line: {[round(1000 * one, 1) for one in took]} ms")
    assert took[2] < 0.3


def test_cuda_is_not_initialised(bench: Bench, tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import torch\nprint(torch.cuda.is_initialized())")
    assert bench.run(("script.py",), tmp_path).out == ["False"]


def test_a_worker_that_is_not_let_go_runs_nothing(bench: Bench, tmp_path: Path) -> None:
    path = write(tmp_path, "script.py", "open('ran', 'w')")

    async def fork_and_forget() -> None:
        ends = Ends()
        pid = await bench.zygote.fork(Fork(0, (str(path),), str(tmp_path), {}, "", "", b""), ends.theirs())
        ends.close()
        os.waitid(os.P_PID, pid, os.WEXITED)

    bench.do(fork_and_forget())
    assert not (tmp_path / "ran").exists()


def test_workers_outlive_their_zygote_and_another_one_takes_over(bench: Bench, tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "import sys\nprint('up', flush=True)\nsys.stdin = None\nimport time\ntime.sleep(60)",
    )

    async def kill_it() -> None:
        process, outcome = await bench.start(("script.py",), tmp_path)
        while not outcome.out:
            await asyncio.sleep(0.002)
        first = bench.zygote.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ZygoteGoneError):
            await bench.start(("script.py",), tmp_path)
        again, second = await bench.start(("script.py",), tmp_path)
        assert bench.zygote.pid != first
        assert process.alive
        for one in (process, again):
            one.signal(signal.SIGKILL)
            await one.gone
        assert second.exited is not None

    bench.do(kill_it())


def test_a_request_that_is_too_large_is_refused(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="bytes"):
        bench.run(("script.py", "x" * 200_000), tmp_path)
