"""The stall of the same SIGKILL under perdure, torchrun's restarts and torchft, one after the other.

A worker is killed in the middle of step 12. The stall is (first new commit after the kill − last commit
before it) − the median step before it; a commit is the first of its step by any process, and a step that is
done once more is no new commit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import diary
from figures import Figure
from settings import STEP_1S, WORKERS

import jobs

REPEATS = 7
KILLED_STEP = 12
DEADLINE_S = 240.0
TORCHFT = "torchft==0.2.0"
ENVIRONMENT = Path(tempfile.gettempdir()) / "perdure-bench-torchft"
SHARED_STORE_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Otherwise torchrun's restarted gloo workers read stale addresses from the agent's store."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """torchft's, in seconds; `heartbeat` and `join` are the lighthouse's."""

    timeout: float
    quorum: float
    heartbeat: float
    join: float


USUAL = Timeouts(timeout=30, quorum=60, heartbeat=5, join=10)
"""Those of torchft's own train_ddp example, else its defaults."""
LOW = Timeouts(timeout=5, quorum=15, heartbeat=2, join=1)
"""As low as it stands."""


def measure(scale: float) -> list[Figure]:
    """All systems in turn, `REPEATS` times."""
    make_environment()
    arms: dict[str, Callable[[Path], contextlib.AbstractContextManager[object]]] = {
        "perdure": perdure,
        "torchrun": torchrun,
        "torchft, usual timeouts": lambda folder: torchft(folder, USUAL),
        "torchft, low timeouts": lambda folder: torchft(folder, LOW),
    }
    stalls: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(max(1, round(REPEATS * scale))):
        for name, start in arms.items():
            with tempfile.TemporaryDirectory(prefix="perdure-bench-") as folder:
                stall = killed(Path(folder), start)
            stalls[name].append(stall)
            print(f"  {name}: {stall:.2f} s", flush=True)
    return figures(stalls)


def figures(stalls: dict[str, list[float]]) -> list[Figure]:
    """Each system's stall, and the ratios to perdure's."""
    ours = statistics.median(stalls["perdure"])
    bounds = {"torchrun": 30.0, "torchft, usual timeouts": 20.0, "torchft, low timeouts": 4.0}
    found = [
        Figure(name=f"stall, {name}", value=statistics.median(samples), unit="s", samples=samples)
        for name, samples in stalls.items()
    ]
    for name, bound in bounds.items():
        theirs = statistics.median(stalls[name])
        found.append(
            Figure(
                name=f"stall, {name} / perdure",
                value=theirs / ours if ours > 0 else float("inf"),
                bound=bound,
                least=True,
                note=f"medians {theirs:.2f} and {ours:.3f} s of {len(stalls[name])} kills each",
            )
        )
    return found


def killed(folder: Path, start: Callable[[Path], contextlib.AbstractContextManager[object]]) -> float:
    """Run one arm, kill a worker in the middle of step 12, and return the stall."""
    with start(folder):
        ends = wait(folder, KILLED_STEP - 1)
        step_s = statistics.median(ends[step + 1] - ends[step] for step in range(2, KILLED_STEP - 1))
        time.sleep(max(0.0, ends[KILLED_STEP - 1] + step_s / 2 - time.time()))
        os.kill(victim(folder), signal.SIGKILL)
        last = max(commits(folder))
        ends = wait(folder, last + 1)
    return ends[last + 1] - ends[last] - step_s


def commits(folder: Path) -> dict[int, float]:
    """When each step was first committed by any process."""
    found: dict[int, float] = {}
    for when, step in diary.read(folder):
        found.setdefault(step, when)
    return found


def victim(folder: Path) -> int:
    """The process that committed last but one: a member that is neither the first nor the last."""
    newest: dict[int, float] = {}
    for path in folder.glob("*.steps"):
        newest[int(path.stem)] = float(path.read_text().split()[-2])
    return sorted(newest, key=lambda pid: newest[pid])[-2]


def wait(folder: Path, step: int) -> dict[int, float]:
    """Wait until the step is committed: `commits`. Raises TimeoutError."""
    deadline = time.monotonic() + DEADLINE_S
    while step not in (found := commits(folder)):
        if time.monotonic() > deadline:
            logs = [path.read_text(errors="replace")[-1500:] for path in folder.glob("*.log")]
            raise TimeoutError("\n".join([f"no step {step}, only {sorted(found)}", *logs]))
        time.sleep(0.01)
    return found


# ── the arms ────────────────────────────────────────────────────────────────────────────────────────


def perdure(folder: Path) -> jobs.Started:
    return jobs.perdure(STEP_1S, folder / "run", 1000, "--diary", str(folder))


def torchrun(folder: Path) -> jobs.Started:
    checkpoint = ("--checkpoint", str(folder / "checkpoint.pt"), "--every", "5")
    return jobs.ddp(
        *(STEP_1S, folder / "torchrun.log", 1000, "--diary", str(folder), *checkpoint, "--bucket-view"),
        launcher=("--max-restarts", "3"),
        extra=SHARED_STORE_OFF,
    )


@contextlib.contextmanager
def torchft(folder: Path, timeouts: Timeouts) -> Iterator[None]:
    """A lighthouse, and a supervisor that starts a replica again as soon as it has ended."""
    port = free_port()
    lighthouse = [
        *(ENVIRONMENT / "bin" / "torchft_lighthouse", "--bind", f"[::]:{port}", "--min_replicas", "2"),
        *("--heartbeat_timeout_ms", f"{timeouts.heartbeat * 1000:.0f}"),
        *("--join_timeout_ms", f"{timeouts.join * 1000:.0f}", "--quorum_tick_ms", "100"),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(jobs.Started(lighthouse, folder / "lighthouse.log"))
        supervisor = [
            *(jobs.PYTHON, jobs.HERE / "supervisor.py", str(WORKERS)),
            *(ENVIRONMENT / "bin" / "python", jobs.HERE / "train_torchft.py", *STEP_1S.arguments()),
            *("--steps", "1000", "--diary", folder, "--replicas", str(WORKERS)),
            *("--lighthouse", f"http://127.0.0.1:{port}"),
            *("--timeout-s", f"{timeouts.timeout:.0f}", "--quorum-s", f"{timeouts.quorum:.0f}", "--replica"),
        ]
        stack.enter_context(jobs.Started(supervisor, folder / "torchft.log"))
        yield


def free_port() -> int:
    """A port that the kernel has just had free: the lighthouse does not say which it bound."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def make_environment() -> None:
    """torchft in a virtual environment of its own, made once."""
    if (ENVIRONMENT / "ready").exists():
        return
    for command in (
        [str(jobs.PYTHON), "-m", "venv", "--clear", str(ENVIRONMENT)],
        [str(ENVIRONMENT / "bin" / "pip"), "install", "--quiet", TORCHFT, "torch==2.13.0", "numpy"],
    ):
        print(f"$ {' '.join(command)}", flush=True)
        subprocess.run(command, check=True, capture_output=True)
    (ENVIRONMENT / "ready").touch()
