"""Geometry of the page's two pictures, step times and workers' lives, over one shared time axis. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10

from perdure.report.model import Life, Moment, Report, StepTime

WIDTH, LEFT, RIGHT = 960.0, 64.0, 16.0
"""Of every picture, in SVG units: all of it, and what is left for labels on either side."""

STEPS_HEIGHT, TOP, BOTTOM = 240.0, 26.0, 24.0
ROW = 18.0
POINTS_MAX, ROWS_MAX, NUMBERED_MAX = 1200, 48, 40


class TimeAxis:
    """Unix seconds → x. Time in which nothing lived (between two starts of a run) is cut out."""

    GAP = 12.0

    def __init__(self, busy: Iterable[tuple[float, float]]) -> None:
        self.parts = _merge(busy)
        length = sum(end - start for start, end in self.parts) or 1.0
        free = WIDTH - LEFT - RIGHT - self.GAP * max(0, len(self.parts) - 1)
        self.scale = free / length

    def x(self, time: float) -> float:
        """The x of a moment; one inside a cut falls on its left edge."""
        at = LEFT
        for place, (start, end) in enumerate(self.parts):
            if place:
                if time < start:
                    return at
                at += self.GAP
            at += (min(max(time, start), end) - start) * self.scale
            if time <= end:
                break
        return at

    @property
    def breaks(self) -> list[float]:
        """The middle of each cut."""
        return [self.x(end) + self.GAP / 2 for _, end in self.parts[:-1]]

    def ticks(self) -> list[tuple[float, str]]:
        """(x, label) about every eighth of the axis: the time since the start of its part."""
        step = nice_step(sum(end - start for start, end in self.parts) / 8)
        ticks = []
        for start, end in self.parts:
            for index in range(int((end - start) / step) + 1):
                ticks.append((self.x(start + index * step), duration(index * step)))
        return ticks


def _merge(busy: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Joins intervals that touch or lie within 5 % of the whole (at least 1 s) of each other."""
    intervals = sorted(busy)
    if not intervals:
        return [(0.0, 1.0)]
    near = max(1.0, 0.05 * sum(end - start for start, end in _union(intervals, 0.0)))
    return _union(intervals, near)


def _union(intervals: Sequence[tuple[float, float]], near: float) -> list[tuple[float, float]]:
    merged = [intervals[0]]
    for start, end in intervals[1:]:
        if start <= merged[-1][1] + near:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


_ROUND_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def nice_step(least: float) -> float:
    """The smallest round number of seconds that is about `least` or more.

    1, 2 or 5 × 10^k up to 20 s, then round parts of an hour and of a day, then days.
    """
    if least <= 0:
        return 1.0
    if least > 20:
        return next((float(step) for step in _ROUND_S if step >= least), 86400.0 * ceil(least / 86400))
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


def duration(seconds: float) -> str:
    """Seconds as people write them: `40 ms`, `0.25 s`, `45 s`, `2 m 05 s`, `3 h 20 m`."""
    if seconds < 0:
        return "−" + duration(-seconds)
    if seconds >= 60:
        whole, unit, part = (seconds / 60, "h", "m") if seconds >= 3600 else (seconds, "m", "s")
        big, small = divmod(round(whole), 60)
        return f"{big} {unit}" + (f" {small:02d} {part}" if small else "")
    if seconds >= 10 or seconds == int(seconds):
        return f"{seconds:.0f} s"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.3g} ms"


@dataclass(frozen=True, slots=True)
class Mark:
    """A fault on an axis; `number` is its row in the table, empty where numbers would not fit."""

    x: float
    number: str
    title: str


@dataclass(frozen=True, slots=True)
class StepChart:
    """Step times: a line for each start of the run, the median, labelled ticks."""

    lines: tuple[str, ...]
    median_y: float | None
    y_ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """One span of a worker's life."""

    x: float
    width: float
    state: str
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    """One worker: its bars, and the x at which a fault ended it (None: it was not lost)."""

    y: float
    label: str
    bars: tuple[Bar, ...]
    lost_x: float | None
    ended: str


@dataclass(frozen=True, slots=True)
class Pictures:
    """Everything the page draws; `hidden` workers did not fit."""

    axis: TimeAxis
    marks: tuple[Mark, ...]
    steps: StepChart
    rows: tuple[Row, ...]
    hidden: int

    @property
    def rows_height(self) -> float:
        return ROW * len(self.rows)


def draw(report: Report) -> Pictures:
    """The pictures of a report."""
    busy = [(span.start, span.end) for life in report.lives for span in life.spans]
    busy += [(step.time - (step.seconds or 0.0), step.time) for step in report.steps]
    axis = TimeAxis(busy)
    marks = tuple(_mark(axis, i, m, len(report.fault_times)) for i, m in enumerate(report.fault_times, 1))
    shown = _most_telling(report.lives)
    rows = tuple(_row(axis, place, life) for place, life in enumerate(shown))
    return Pictures(axis, marks, _steps(axis, report), rows, len(report.lives) - len(shown))


def _mark(axis: TimeAxis, number: int, moment: Moment, of: int) -> Mark:
    title = f"fault {number}: {moment.label} {moment.detail}".strip()
    return Mark(axis.x(moment.time), str(number) if of <= NUMBERED_MAX else "", title)


def _steps(axis: TimeAxis, report: Report) -> StepChart:
    runs: list[list[StepTime]] = []
    for step in report.steps:
        if step.seconds is None or not runs:
            runs.append([])
        if step.seconds is not None:
            runs[-1].append(step)
    highest = max((step.seconds or 0.0 for step in report.steps), default=0.0) or 1.0
    tick = nice_step(highest / 4)
    count = int(highest / tick) + 1
    top = tick * count

    def y(seconds: float) -> float:
        return STEPS_HEIGHT - BOTTOM - seconds / top * (STEPS_HEIGHT - TOP - BOTTOM)

    lines = []
    for run in filter(None, runs):
        stairs = len(run) <= POINTS_MAX  # a step as wide as it took; thinned, only its end
        points = []
        for step in _thin(run):
            seconds = step.seconds or 0.0
            points += [(step.time - seconds, seconds)] if stairs else []
            points += [(step.time, seconds)]
        lines.append(" ".join(f"{axis.x(time):.1f},{y(seconds):.1f}" for time, seconds in points))
    median_y = None if report.step_s_median is None else y(report.step_s_median)
    return StepChart(
        tuple(lines), median_y, tuple((y(i * tick), duration(i * tick)) for i in range(count + 1))
    )


def _thin(run: Sequence[StepTime]) -> Sequence[StepTime]:
    """At most about `POINTS_MAX` steps: of each stretch the shortest and the longest, so no peak is lost."""
    if len(run) <= POINTS_MAX:
        return run
    edges = [i * len(run) * 2 // POINTS_MAX for i in range(POINTS_MAX // 2)] + [len(run)]
    kept = []
    for start, stop in pairwise(edges):
        stretch = sorted(run[start:stop], key=lambda step: step.seconds or 0.0)
        kept += sorted(
            {stretch[0].step: stretch[0], stretch[-1].step: stretch[-1]}.values(), key=lambda s: s.step
        )
    return kept


def _most_telling(lives: Sequence[Life]) -> list[Life]:
    """The lives to show, in order: all, or those that were lost and the first of the others."""
    if len(lives) <= ROWS_MAX:
        return list(lives)
    order = sorted(range(len(lives)), key=lambda i: (not lives[i].ended, i))[:ROWS_MAX]
    return [lives[i] for i in sorted(order)]


def _row(axis: TimeAxis, place: int, life: Life) -> Row:
    bars = tuple(
        Bar(
            axis.x(span.start),
            max(1.0, axis.x(span.end) - axis.x(span.start)),
            span.state,
            f"worker {life.worker}: {span.state}, {duration(span.end - span.start)}",
        )
        for span in life.spans
    )
    lost = life.ended not in ("", "left") and bool(life.spans)
    return Row(
        place * ROW, f"worker {life.worker}", bars, axis.x(life.spans[-1].end) if lost else None, life.ended
    )
