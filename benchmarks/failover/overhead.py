"""A fault-free step of perdure against DDP's, in interleaved segments of two jobs that live side by side."""

from __future__ import annotations

import dataclasses
import random
import statistics
import tempfile
from collections.abc import Mapping
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
SMALL_PAGES = ("PERDURE_HUGE_PAGES", "0")
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
    """Both step lengths, and the shorter one without huge pages; `scale` multiplies the number of pairs."""
    found = [
        figure(f"fault-free step, perdure / DDP, {workload.name}", workload, SIZES[workload], scale, bound)
        for workload, bound in BOUNDS.items()
    ]
    found.append(
        figure(
            f"the same with {SMALL_PAGES[0]}={SMALL_PAGES[1]}, {STEP_100MS.name}, small pages",
            STEP_100MS,
            dataclasses.replace(SIZES[STEP_100MS], launches=1),
            scale,
            extra=dict([SMALL_PAGES]),
        )
    )
    return found


def figure(
    name: str,
    workload: Workload,
    size: Size,
    scale: float,
    bound: float | None = None,
    extra: Mapping[str, str] | None = None,
) -> Figure:
    """The median ratio of the pairs of several launches."""
    launches = max(1, round(size.launches * min(1.0, scale)))
    pairs = [pair for _ in range(launches) for pair in launch(workload, size, scale, extra or {})]
    ratios = [pair.ratio for pair in pairs]
    return Figure(
        name=name,
        value=statistics.median(ratios),
        bound=bound,
        interval=interval(ratios),
        samples=ratios,
        note=f"median step perdure {statistics.median(p.perdure.step_s for p in pairs):.4f} s,"
        f" DDP {statistics.median(p.ddp.step_s for p in pairs):.4f} s; {len(pairs)} pairs of"
        f" {size.segment - 1} steps; processor time"
        f" {statistics.median(p.cpu_ratio for p in pairs):.3f}",
    )


def launch(workload: Workload, size: Size, scale: float, extra: Mapping[str, str]) -> list[Pair]:
    """The pairs of segments in one launch of both jobs; perdure's gets `extra` in its environment."""
    pairs = max(2, round(size.pairs * scale))
    steps = (pairs + 1) * size.segment
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as name:
        folder = Path(name)
        turns = Turns(folder / "gate", START_S)
        options = ("--gate", str(folder / "gate"), "--segment", str(size.segment))
        try:
            with (
                jobs.perdure(workload, folder / "run", steps, *options, extra=extra) as ours,
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
