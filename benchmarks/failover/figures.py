"""What was measured: one figure with its bound, and the statistics that they share."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


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
