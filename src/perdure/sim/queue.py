"""Virtual time: timers in order; those of one moment in the order in which they were set."""

from __future__ import annotations

import heapq
from typing import Any

from perdure.schema.errors import UsageError

TIMERS_MAX = 10_000_000
"""Timers of one run beyond which it is given up: it would take more than minutes, or for ever."""


class Timers:
    """A heap of (time, number, what). A timer that is no longer wanted is recognised by its owner's token."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any]] = []
        self._number = 0

    def set(self, time_s: float, what: Any) -> None:
        """Fire `what` at `time_s`. Raises `UsageError` if the run sets timers without end."""
        self._number += 1
        if self._number > TIMERS_MAX:
            raise UsageError(
                f"simulate.days: more than {TIMERS_MAX:,} happenings until {time_s:.3g} s, expected fewer "
                "days, or rarer checkpoints and faults"
            )
        heapq.heappush(self._heap, (time_s, self._number, what))

    def next_time(self) -> float | None:
        """When the next timer fires, or None."""
        return self._heap[0][0] if self._heap else None

    def pop(self) -> Any:
        """Take the next timer off."""
        return heapq.heappop(self._heap)[2]
