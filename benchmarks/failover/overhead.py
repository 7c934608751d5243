"""A fault-free step of perdure against DDP's, in interleaved segments of two jobs that live side by side."""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, interval
from gate import Segment, Turns
from settings import STEP_1S, STEP_100MS, WORKERS, Workload

import jobs

START_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured; a segment's first step is not counted."""

    launches: int
    pairs: int
    segment: int


SIZES = {
    STEP_1S: Size(launches=2, pairs=8, segment=6),
    STEP_100MS: Size(launches=3, pairs=10, segment=31),
}
BOUNDS = {STEP_1S: 1.03, STEP_100MS: 1.08}
DDP_OPTIONS = ("--bucket-view",)


@dataclass(frozen=True)
class Pair:
    """Two segments, one right after the other."""

    perdure: Segment
    ddp: Segment

    @property
    def ratio(self) -> float:
        return self.perdure.step_s / self.ddp.step_s

    @property
    def cpu_ratio(self) -> float:
        return self.perdure.cpu_s / self.ddp.cpu_s

    def __str__(self) -> str:
        ours, theirs = self.perdure, self.ddp
        return (
            f"step: perdure {ours.step_s:.4f} s, DDP {theirs.step_s:.4f} s, ratio {self.ratio:.3f};"
            f" processor time of a step: {ours.cpu_s:.4f} s, {theirs.cpu_s:.4f} s, ratio {self.cpu_ratio:.3f}"
        )


def measure(scale: float) -> list[Figure]:
    """Both step lengths; `scale` multiplies the number of pairs."""
    found = []
    for workload, size in SIZES.items():
        launches = max(1, round(size.launches * min(1.0, scale)))
        pairs = [pair for _ in range(launches) for pair in launch(workload, size, scale)]
        ratios = [pair.ratio for pair in pairs]
        found.append(
            Figure(
                name=f"fault-free step, perdure / DDP, {workload.name}",
                value=statistics.median(ratios),
                bound=BOUNDS[workload],
                interval=interval(ratios),
                samples=ratios,
                note=f"median step perdure {statistics.median(p.perdure.step_s for p in pairs):.4f} s,"
                f" DDP {statistics.median(p.ddp.step_s for p in pairs):.4f} s; {len(pairs)} pairs of"
                f" {size.segment - 1} steps; processor time"
                f" {statistics.median(p.cpu_ratio for p in pairs):.3f}",
            )
        )
    return found


def launch(workload: Workload, size: Size, scale: float) -> list[Pair]:
    """The pairs of segments in one launch of both jobs."""
    pairs = max(2, round(size.pairs * scale))
    steps = (pairs + 1) * size.segment
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as name:
        folder = Path(name)
        turns = Turns(folder / "gate", START_S)
        options = ("--gate", str(folder / "gate"), "--segment", str(size.segment))
        try:
            with (
                jobs.perdure(workload, folder / "run", steps, *options) as ours,
                jobs.ddp(workload, folder / "ddp.log", steps, *options, *DDP_OPTIONS) as theirs,
            ):
                try:
                    turns.gather(("perdure", "ddp"), WORKERS)
                    found = alternate(turns, pairs)
                except OSError as error:
                    logs = [job.log.read_text(errors="replace")[-2000:] for job in (ours, theirs)]
                    raise RuntimeError("\n".join(["a job did not get to its gate", *logs])) from error
                turns.go("perdure")
                turns.go("ddp")
                ours.finish(START_S)
                theirs.finish(START_S)
        finally:
            turns.close()
    return found


def alternate(turns: Turns, pairs: int) -> list[Pair]:
    """Run `pairs` pairs of segments, in an order drawn for each pair."""
    order = random.Random(0)
    turns.arrive("perdure")
    turns.arrive("ddp")
    found = []
    for _ in range(pairs):
        took: dict[str, Segment] = {}
        for job in order.sample(("perdure", "ddp"), 2):
            turns.go(job)
            took[job] = turns.arrive(job)
        pair = Pair(took["perdure"], took["ddp"])
        found.append(pair)
        print(f"  {pair}", flush=True)
    return found
