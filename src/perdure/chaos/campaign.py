"""When an outside process strikes, and whom: pure, from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from perdure.schema.messages import PsRow


class Campaign:
    """Strikes at uniformly random times at uniformly random workers.

    One whole, active worker is always left alone, whoever it is: a total loss is another matter (G5).
    """

    def __init__(self, seed: int, every_s: float) -> None:
        """
        Args:
            seed: the same seed, the same choices.
            every_s: the mean of the pauses between two strikes, in seconds; each is uniform in (0, 2·mean).
        """
        self._random = random.Random(seed)
        self._every_s = every_s

    def pause_s(self) -> float:
        """How long to wait before the next strike, in seconds."""
        return self._random.uniform(0.0, 2.0 * self._every_s)

    def choose(self, rows: Sequence[PsRow]) -> PsRow | None:
        """The worker to strike; None if nobody can be spared just now."""
        able = [row for row in rows if row.state == "active"]
        living = sorted((row for row in rows if row.pid > 0), key=lambda row: row.id)
        if len(able) > 1:
            return self._random.choice(living)
        others = [row for row in living if row not in able]
        return self._random.choice(others) if able and others else None
