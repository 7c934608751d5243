"""When an outside process strikes, and whom: pure, from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from perdure.schema.ids import WorkerId
from perdure.schema.messages import PsRow


class Campaign:
    """Strikes at uniformly random times at uniformly random workers.

    One whole, active worker is always left alone, whoever it is: a total loss is another matter (G5). A
    worker that was chosen is not counted on any more, nor chosen again, unless the strike does not last.
    """

    def __init__(self, seed: int, every_s: float, lasting: bool = True) -> None:
        """
        Args:
            seed: the same seed, the same choices.
            every_s: the mean of the pauses between two strikes, in seconds; each is uniform in (0, 2·mean).
            lasting: whether a worker that is struck is lost; else it goes on at the next strike.
        """
        self._random = random.Random(seed)
        self._every_s = every_s
        self._lasting = lasting
        self._chosen: set[WorkerId] = set()

    def pause_s(self) -> float:
        """How long to wait before the next strike, in seconds."""
        return self._random.uniform(0.0, 2.0 * self._every_s)

    def choose(self, rows: Sequence[PsRow]) -> PsRow | None:
        """The worker to strike; None if nobody can be spared just now."""
        living = [row for row in rows if row.pid is not None and row.id not in self._chosen]
        able = [row for row in living if row.state == "active"]
        spared = able if len(able) == 1 else []
        found = sorted((row for row in living if row not in spared), key=lambda row: row.id)
        if not able or not found:
            return None
        row = self._random.choice(found)
        if self._lasting:
            self._chosen.add(row.id)
        return row
