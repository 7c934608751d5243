"""Where every GPU-second goes: each owner's GPUs by cause, integrated over time.

An owner is a job or the pool of nodes that belong to none. Its GPUs by cause are constant between two
changes; a change closes the stretch before it. The sum over causes and owners is wall time × GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.core.policies.base import CAUSES

INDEX = {cause: index for index, cause in enumerate(CAUSES)}
Rates = Sequence[tuple[int, float]]
"""(cause's index, GPUs) pairs."""


class Account:
    """The GPU-seconds of one owner by cause."""

    def __init__(self) -> None:
        self.totals = [0.0] * len(CAUSES)
        self._since = 0.0
        self._rates: Rates = ()

    def change(self, now: float, rates: Rates) -> None:
        """From `now` on the owner's GPUs are divided among causes as `rates` say."""
        span = now - self._since
        if span > 0:
            totals = self.totals
            for cause, gpus in self._rates:
                totals[cause] += gpus * span
        self._since = now
        self._rates = rates


class Journal:
    """The event log, if it is kept: what the state of jobs and of the pool was from which moment on."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.lines: list[dict[str, Any]] = []

    def write(self, now: float, event: str, **fields: Any) -> None:
        """Append one line."""
        if self.keep:
            self.lines.append({"time_s": now, "event": event, **fields})
