"""What was measured: one figure with its bound, and the statistics that they share."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value and the bound that it has to keep: at most, or with `least` at least."""

    name: str
    value: float
    bound: float | None = None
    least: bool = False
    unit: str = ""
    interval: tuple[float, float] | None = None
    samples: Sequence[float] = field(default_factory=tuple)
    note: str = ""

    @property
    def kept(self) -> bool | None:
        """Whether the bound is kept; None without one."""
        if self.bound is None:
            return None
        return self.value >= self.bound if self.least else self.value <= self.bound


def interval(samples: Sequence[float], level: float = 0.95, resamples: int = 4000) -> tuple[float, float]:
    """Percentile bootstrap of the median (Efron 1979), with a fixed seed."""
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(samples, k=len(samples))) for _ in range(resamples))
    cut = round((1 - level) / 2 * resamples)
    return medians[cut], medians[-cut - 1]


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    """A markdown table of figures as dictionaries."""
    lines = ["| figure | measured | interval | bound | kept | |", "|---|---|---|---|---|---|"]
    for figure in figures:
        unit = f" {figure['unit']}" if figure["unit"] else ""
        value = f"{number(figure['value'])}{unit}"
        spread = figure["interval"]
        between = f"{number(spread[0])} … {number(spread[1])}" if spread else ""
        bound = ""
        if figure["bound"] is not None:
            bound = f"{'≥' if figure['least'] else '≤'} {number(figure['bound'])}{unit}"
        kept = {True: "yes", False: "**no**", None: ""}[figure["kept"]]
        lines.append(f"| {figure['name']} | {value} | {between} | {bound} | {kept} | {figure['note']} |")
    return "\n".join(lines)


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
