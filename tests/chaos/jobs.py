"""Runs of `faulty_task.py` under the real launcher: start one, wait for it, collect what it left."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from perdure.chaos.faults import Manner
from perdure.chaos.verdict import Commit, Evidence, Expected, Start
from reference import sample_ids, train
from scenario import Scenario, Strike, strikes
from tasks import TASKS

HERE = Path(__file__).parent
PERDURE = Path(sys.executable).parent / "perdure"
DEADLINE_S = 180.0
GONE_S = 5.0
_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100  # inotify(7)
MARK = "PERDURE_TEST_RUN"
SEED = 0


@dataclass
class Running:
    """A launcher at work. `directory` holds the run directory and the workers' notes."""

    process: subprocess.Popen[bytes]
    directory: Path
    mark: str
    temp: Path

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def notes(self) -> Path:
        return self.directory / "notes"

    def wait(self) -> int:
        """The exit code. A run that does not end in time is killed, and the test fails with what it said."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.fail("no end")

    def until_step(self, step: int) -> None:
        """Wait until metrics.jsonl has a step: at least the one after it is being computed."""
        metrics = self.run_dir / "metrics.jsonl"
        if not wait_until(self.run_dir, lambda: any(line["step"] >= step for line in lines(metrics))):
            self.fail(f"no step {step}")

    def until_working(self) -> None:
        """Wait until some worker has begun to compute."""
        begun = lambda: any(path.stat().st_size for path in self.notes.glob("*.micro-batches"))  # noqa: E731
        if not wait_until(self.notes, begun):
            self.fail("no work")

    def until_printed(self, text: str) -> None:
        """Wait until the launcher has printed something."""
        printed = self.directory / "printed"
        if not wait_until(self.directory, lambda: text in printed.read_text(errors="replace")):
            self.fail(f"{text!r} was not printed")

    def fail(self, reason: str) -> NoReturn:
        """End it and the test, with what it said."""
        self.dump()
        self.end()
        pytest.fail(f"{reason} within {DEADLINE_S:.0f} s\n{self.story()}")

    def dump(self) -> None:
        """Have every worker print where its threads are."""
        workers = {int(path.stem) for path in self.notes.glob("*.micro-batches")}
        for pid in workers.intersection(marked(self.mark)):
            os.kill(pid, signal.SIGUSR1)
        _wait_gone([*workers], 1.0)

    def end(self) -> None:
        """Kill the launcher if it is there still; everything below it goes too."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def story(self) -> str:
        """What was lost and struck, what it printed and what happened, for a test that failed."""
        events = [
            f"{event['mono_s']:.3f} {event['event']} worker={event['worker']} {event.get('message', '')}"
            for event in self.events()
            if event["event"] not in ("first_micro_batch", "worker_started")
        ]
        pids = {
            event["worker"]: event["pid"] for event in self.events() if event["event"] == "worker_started"
        }
        faults = [
            f"{event['mono_s']:.3f} worker {event['worker']} (process {pids.get(event['worker'])}): "
            f"{event['kind']} by {event['detected_by']}: {event['message']}"
            for event in self.events()
            if event["event"] == "fault_detected"
        ]
        struck = [f"{strike.name}: worker {strike.worker}" for strike in self.strikes().values()]
        printed = (self.directory / "printed").read_text(errors="replace")
        return "\n".join(["faults:", *faults, "struck:", *struck, "", printed[-6000:], *events[-60:]])

    def events(self) -> list[dict[str, Any]]:
        return lines(self.run_dir / "events.jsonl")

    def leftovers(self) -> list[str]:
        """Whatever of this run still is there, once there was time to go."""
        _wait_gone([*marked(self.mark)], GONE_S)
        left = [f"process {pid}: {_command(pid)}" for pid in marked(self.mark)]
        pids = {event["pid"] for event in self.events() if event["event"] == "worker_started"}
        pids |= {int(path.stem) for path in self.notes.glob("*.micro-batches")}
        for path in Path("/dev/shm").iterdir():
            if any(f"_{pid}_" in path.name for pid in pids):
                left.append(f"shared memory {path.name}")
        left += [f"directory {path}" for name in ("perdure-*", "pymp-*") for path in self.temp.glob(name)]
        shutil.rmtree(self.temp, ignore_errors=True)
        if self.process.returncode != -signal.SIGKILL:  # else the next run clears it away
            left += [f"unfinished {path}" for path in self.run_dir.glob("checkpoints/*.partial")]
        return left

    def evidence(self) -> Evidence:
        """What it left, for the verdict."""
        return Evidence(
            exit_code=self.process.returncode,
            steps=[line["step"] for line in lines(self.run_dir / "metrics.jsonl")],
            samples=[
                (line["step"], line["micro_batch"], tuple(line["ids"]))
                for line in lines(self.run_dir / "samples.jsonl")
            ],
            commits=[Commit(pid, int(words[0]), words[1]) for pid, words in _notes(self.notes, "digests")],
            starts=[
                Start(int(words[-1]), pid, int(words[0]), int(words[1]))
                for pid, words in _notes(self.notes, "micro-batches")
            ],
            fired=frozenset(self.strikes()),
            struck=frozenset(s.pid for s in self.strikes().values()),
            refused=frozenset(e["step"] for e in self.events() if e["event"] == "refused_step"),
            leavers=frozenset(s.pid for s in self.strikes().values() if s.manner is Manner.TERM),
        )

    def strikes(self) -> dict[str, Strike]:
        return strikes(self.notes)


def launch(
    directory: Path,
    task: str,
    steps: int,
    scenario: Scenario | None = None,
    options: Sequence[str] = (),
    script_options: Sequence[str] = (),
) -> Running:
    """Start a run of `steps` steps. Given a directory again, it goes on there."""
    scenario = scenario or Scenario()
    notes = directory / "notes"
    (directory / "run").mkdir(parents=True, exist_ok=True)  # to be watched
    if not notes.exists():
        notes.mkdir(parents=True)
        scenario.lay_out(notes)
    mark = secrets.token_hex(8)
    temp = Path(tempfile.mkdtemp(prefix="run-"))  # not below `directory`: names of sockets must be short
    command = [
        *(str(PERDURE), "run", "--nproc-per-node", str(scenario.members)),
        *("--run-dir", str(directory / "run"), "--log-samples", *options),
        *(str(HERE / "faulty_task.py"), task, "--steps", str(steps), "--seed", str(SEED)),
        *("--blocks", "4", "--digests", str(notes), *script_options),
    ]
    with open(directory / "printed", "ab") as printed:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(temp)},
            start_new_session=True,
        )
    return Running(process, directory, mark, temp)


def undisturbed(task: str, steps: int, faults: Sequence[str] = ()) -> Expected:
    """What the run has to be equal to, whatever strikes it."""
    recipe = TASKS[task]
    samples = len(recipe.build(SEED).dataset)
    return Expected(
        digests=_digests(task, steps),
        per_step=recipe.per_step,
        ids=lambda step, micro_batch: sample_ids(recipe, samples, SEED, step, micro_batch)[1],
        faults=frozenset(faults),
    )


@functools.cache
def _trained(task: str) -> tuple[list[str], Iterator[str]]:
    return [], train(TASKS[task], seed=SEED, steps=1 << 30, blocks=4)


def _digests(task: str, steps: int) -> list[str]:
    known, more = _trained(task)
    while len(known) < steps:
        known.append(next(more))
    return known[:steps]


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; none if it is not there. A torn last line is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _notes(notes: Path, kind: str) -> Iterator[tuple[int, list[str]]]:
    for path in notes.glob(f"*.{kind}"):
        for line in path.read_text().splitlines():
            yield int(path.stem), line.split()


def wait_until(directory: Path, happened: Callable[[], object], deadline_s: float = DEADLINE_S) -> bool:
    """Wait for something that shows in the files of a directory: looked at whenever one changes."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC)
    try:
        if libc.inotify_add_watch(fd, os.fsencode(directory), _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(directory))
        deadline = time.monotonic() + deadline_s
        while not happened():
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            os.read(fd, 65536)
        return True
    finally:
        os.close(fd)


def marked(mark: str) -> Iterator[int]:
    """The processes below a launcher that was started with this mark, itself included; not zombies."""
    wanted = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                environment = Path("/proc", name, "environ").read_bytes()
            except OSError:
                continue
            if wanted in environment.split(b"\0"):
                yield int(name)


def _wait_gone(pids: Sequence[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        os.close(pidfd)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    except OSError:
        return "gone just now"


def refuses(port: int) -> bool:
    """Whether nobody listens on a port of this machine."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return True
    return False


def port_of(run_dir: Path) -> int:
    """Where the coordinator of a run that is going on listens."""
    return int(msgspec.json.decode((run_dir / "coordinator.json").read_bytes())["port"])
