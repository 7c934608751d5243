"""A worker's peak proportional memory without faults, perdure against DDP."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import diary
from figures import Figure
from settings import MEMORY, WORKERS

import jobs

STEPS = 6
SAMPLE_S = 0.01
START_S = 300.0


def measure(scale: float) -> list[Figure]:
    """One job after the other, so that neither shares pages with the other; DDP's writes no checkpoints."""
    steps = max(3, round(STEPS * scale))
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as name:
        folder = Path(name)

        def ddp(*extra: str) -> Callable[[tuple[str, ...]], jobs.Started]:
            return lambda options: jobs.ddp(MEMORY, folder / "ddp.log", steps, *options, *extra)

        def perdure(*launcher: str) -> Callable[[tuple[str, ...]], jobs.Started]:
            return lambda options: jobs.perdure(
                MEMORY, folder / "run", steps, *options, launcher=("--fresh", *launcher)
            )

        ours = peaks(folder / "perdure", steps, perdure("--checkpoint-every", "0"))
        writing = peaks(folder / "writing", steps, perdure())
        plain = peaks(folder / "plain", steps, ddp())
        view = peaks(folder / "view", steps, ddp("--bucket-view"))
    return [
        figure("peak PSS of a worker, perdure / DDP", ours, plain, 1.05),
        figure("the same, DDP with gradient_as_bucket_view", ours, view, None),
        figure("the same, and a worker that copies the state for a checkpoint", writing, plain, None),
    ]


def figure(name: str, ours: list[int], theirs: list[int], bound: float | None) -> Figure:
    mine, other = statistics.fmean(ours), statistics.fmean(theirs)
    return Figure(
        name=name,
        value=mine / other,
        bound=bound,
        samples=[nbytes / 1e6 for nbytes in (*ours, *theirs)],
        note=f"mean over the workers {mine / 1e6:.0f} and {other / 1e6:.0f} MB",
    )


def peaks(folder: Path, steps: int, start: Callable[[tuple[str, ...]], jobs.Started]) -> list[int]:
    """The largest PSS seen of each worker of a job, in bytes."""
    folder.mkdir()
    found: dict[int, int] = {}
    deadline = time.monotonic() + START_S
    with start(("--diary", str(folder))) as job:
        while job.process.poll() is None and time.monotonic() < deadline:
            for path in folder.glob("*.steps"):
                pid = int(path.stem)
                found[pid] = max(found.get(pid, 0), pss(pid))
            time.sleep(SAMPLE_S)
        job.finish(1.0)
    committed = diary.read(folder)
    if len(found) != WORKERS or len(committed) != WORKERS * steps:
        raise RuntimeError(f"{len(found)} workers committed {len(committed)} steps")
    print(f"  {[round(nbytes / 1e6) for nbytes in found.values()]} MB", flush=True)
    return list(found.values())


def pss(pid: int) -> int:
    """A process's proportional set size in bytes; 0 when it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)
